//! What a policy file returns.

use crate::base::time::Span;
use crate::model::policy::Rung;

/// What a policy would do.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The rung; none to wait for the host.
    pub rung: Option<Rung>,
    /// How long it is held back.
    pub after: Span,
    /// Why, in plain words.
    pub why: String,
}

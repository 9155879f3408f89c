//! The result of a policy file.

use mainstay_model::policy::Rung;
use mainstay_model::time::Span;

/// The action that a policy proposes.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The rung. `None` to wait for the host.
    pub rung: Option<Rung>,
    /// How long the action is delayed.
    pub after: Span,
    /// The reason, as a sentence.
    pub why: String,
}

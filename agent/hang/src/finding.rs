//! What the judge of hangs concludes.

use mainstay_model::hang::Hang;
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};

/// How long ranks that a signal stopped are waited for: whoever stopped them may resume them.
pub(crate) const STOPPED_LIMIT: Span = Span::seconds(30);
/// When such ranks are reported.
pub(crate) const STOPPED_REPORT_AFTER: Span = Span::seconds(3);

/// The result of one look.
#[derive(Clone, Debug, PartialEq)]
pub enum HangStatus {
    /// Something moves, or nothing is overdue.
    Progressing,
    /// Nothing moves for longer than usual, and there is a reason to wait.
    Pending(Suspicion),
    /// A signal stopped ranks. The sender may resume them, so the judge waits.
    Stopped(Suspicion),
    /// It looks like a hang, but may be work. It is reported and never acted on.
    Suspected(Suspicion),
    /// Nothing moves, and nothing will move.
    Confirmed(Box<Hang>),
}

/// One or several ranks that hold up the job for longer than usual.
#[derive(Clone, Debug, PartialEq)]
pub struct Suspicion {
    /// The ranks that all others wait for; empty if unknown.
    pub ranks: Vec<Rank>,
    /// Since when nothing has moved.
    pub since: Mono,
    /// How long the judge waits in all.
    pub limit: Span,
    /// The reason, as a sentence.
    pub why: String,
}

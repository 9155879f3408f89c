//! What the judge of hangs says.

use crate::base::id::Rank;
use crate::base::time::{Mono, Span};
use crate::model::hang::Hang;

/// What a look came to.
#[derive(Clone, Debug, PartialEq)]
pub enum Outlook {
    /// Something moves, or nothing is overdue.
    Calm,
    /// Nothing moves for longer than usual, and there is a reason to wait.
    Waiting(Suspicion),
    /// A signal stopped ranks. Whoever sent it may let them go on, so that is waited for.
    Stopped(Suspicion),
    /// It looks like a hang, and cannot be told from work: said, and never acted on.
    Doubt(Suspicion),
    /// Nothing moves, and nothing will.
    Hang(Box<Hang>),
}

/// A rank or several that hold up the job for longer than usual.
#[derive(Clone, Debug, PartialEq)]
pub struct Suspicion {
    /// Whom everybody waits for; empty if that cannot be told.
    pub ranks: Vec<Rank>,
    /// Since when nothing has moved.
    pub since: Mono,
    /// How long that is waited for in all.
    pub limit: Span,
    /// Why, in plain words.
    pub why: String,
}

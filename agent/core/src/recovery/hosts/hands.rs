//! What a launcher does with orders to start and to stop ranks that may come late, or from a leader that does not know of its
//! ranks.

use crate::base::id::Attempt;

/// What becomes of an order to start ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStart {
    /// The attempt is over here, or was started before.
    Ignore,
    /// Ranks of an earlier attempt run: a leader that replaced another one may not know of them. It stops them, and starts
    /// another attempt.
    Refuse,
    /// The ranks are started.
    Start,
}

/// An order to start the ranks of `attempt`. `newest` is the newest attempt here, `had_ranks` whether any of its ranks were
/// started, `have_ranks` whether some run.
pub fn on_start(
    attempt: Attempt,
    newest: Attempt,
    had_ranks: bool,
    have_ranks: bool,
    in_process: bool,
) -> OnStart {
    if attempt < newest || (attempt == newest && had_ranks) {
        OnStart::Ignore
    } else if !in_process && have_ranks {
        OnStart::Refuse
    } else {
        OnStart::Start
    }
}

/// Whether an order to stop `attempt` stops ranks here. Where the attempt did not come about, ranks of the one before may wait
/// in their processes; an attempt that is older than the newest is over.
pub fn on_stop(attempt: Attempt, newest: Attempt) -> bool {
    attempt >= newest
}

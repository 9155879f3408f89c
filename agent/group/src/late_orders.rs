//! How a launcher handles orders to start and to stop ranks that may be late, or from a leader that does not know its
//! ranks.

use mainstay_model::id::Attempt;

/// The reaction to an order to start ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStart {
    /// The attempt is over on this host, or was started before.
    Ignore,
    /// Ranks of an earlier attempt run. A leader that replaced another may not know about them. It stops them and
    /// starts another attempt.
    Refuse,
    /// The ranks are started.
    Start,
}

/// Decides on an order to start the ranks of `attempt`. `newest` is the newest attempt on this host, `had_ranks`
/// whether any of its ranks were started, `have_ranks` whether some run.
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

/// Whether an order to stop `attempt` stops ranks on this host. If the attempt did not start, ranks of the one before
/// may still wait in their processes. An attempt older than the newest is over.
pub fn on_stop(attempt: Attempt, newest: Attempt) -> bool {
    attempt >= newest
}

//! How often peers are asked what they have. Hosts of one job ask each other often while something changes and seldom while nothing
//! does: each question is a connection with its own keys, which costs both sides about a millisecond of a core. Whatever depends on
//! what the others have just now (a restore, a decision on a step) asks by itself.

use std::time::Duration;

/// After so many rounds without a change there is nothing new to be expected.
const ROUNDS_AFTER_A_CHANGE: u32 = 4;

/// Times the interval, while nothing changes.
const WHEN_QUIET: u32 = 8;

/// The pace of one service.
#[derive(Debug, Default)]
pub(super) struct AskPace {
    /// How many changes there were at the last round.
    seen: u64,
    /// Rounds since the last change.
    quiet: u32,
}

impl AskPace {
    /// A round is over. `changes`: how many changes there were on this host so far. `complete`: all peers answered, and a leader says
    /// when there are others.
    pub(super) fn round(&mut self, changes: u64, complete: bool) {
        let is_quiet = self.seen == changes && complete;
        self.quiet = if is_quiet { self.quiet.saturating_add(1) } else { 0 };
        self.seen = changes;
    }

    /// Whether the next round is due so long after the last one.
    pub(super) fn is_due(&self, since: Duration, interval: Duration, changes: u64) -> bool {
        let may_wait = self.quiet >= ROUNDS_AFTER_A_CHANGE && self.seen == changes;
        since >= if may_wait { interval * WHEN_QUIET } else { interval }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(1);

    fn after(rounds: u32, complete: bool) -> AskPace {
        let mut pace = AskPace::default();
        (0..rounds).for_each(|_| pace.round(3, complete));
        pace
    }

    #[test]
    fn peers_are_asked_less_often_once_nothing_has_changed_for_some_rounds() {
        assert!(after(ROUNDS_AFTER_A_CHANGE, true).is_due(INTERVAL, INTERVAL, 3));
        let quiet = after(ROUNDS_AFTER_A_CHANGE + 1, true);
        assert!(!quiet.is_due(INTERVAL * (WHEN_QUIET - 1), INTERVAL, 3));
        assert!(quiet.is_due(INTERVAL * WHEN_QUIET, INTERVAL, 3));
    }

    #[test]
    fn a_change_ends_the_pause_and_is_followed_for_some_rounds() {
        let mut pace = after(20, true);
        assert!(pace.is_due(INTERVAL, INTERVAL, 4), "there was a change since the last round");
        assert!(!pace.is_due(INTERVAL / 2, INTERVAL, 4), "but not more often than that");
        pace.round(4, true);
        pace.round(4, true);
        assert!(pace.is_due(INTERVAL, INTERVAL, 4));
    }

    #[test]
    fn a_peer_that_does_not_answer_is_asked_again_soon() {
        assert!(after(20, false).is_due(INTERVAL, INTERVAL, 3));
    }
}

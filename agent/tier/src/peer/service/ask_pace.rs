//! How often peers are asked what they have. Hosts of one job ask all others at once while something changes. While nothing does,
//! they ask them one after the other: each question is a connection with its own keys, which costs both sides about a millisecond of
//! a core, and hosts that have started together would all ask at the same moment. Whatever depends on what the others have just now
//! (a restore, a decision on a step) asks by itself.

use std::time::Duration;

/// After so many rounds without a change there is nothing new to be expected.
const ROUNDS_AFTER_A_CHANGE: u32 = 4;

/// Intervals over which the questions of a round are spread while nothing changes.
const WHEN_QUIET: u32 = 7;

/// The pace of one service.
#[derive(Debug, Default)]
pub(super) struct AskPace {
    /// How many changes there were at the last round.
    seen: u64,
    /// Rounds since the last change.
    quiet: u32,
}

impl AskPace {
    /// A round is over. `changes`: how many changes there were on this host when it began. `complete`: all peers answered, and a
    /// leader says when there are others.
    pub(super) fn round(&mut self, changes: u64, complete: bool) {
        let is_quiet = self.seen == changes && complete;
        self.quiet = if is_quiet { self.quiet.saturating_add(1) } else { 0 };
        self.seen = changes;
    }

    /// Over what time the questions of the next round are spread.
    pub(super) fn spread(&self, interval: Duration) -> Duration {
        if self.quiet >= ROUNDS_AFTER_A_CHANGE { interval * WHEN_QUIET } else { Duration::ZERO }
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
    fn questions_are_spread_once_nothing_has_changed_for_some_rounds() {
        assert_eq!(after(ROUNDS_AFTER_A_CHANGE, true).spread(INTERVAL), Duration::ZERO);
        assert_eq!(after(ROUNDS_AFTER_A_CHANGE + 1, true).spread(INTERVAL), INTERVAL * WHEN_QUIET);
    }

    #[test]
    fn after_a_change_all_are_asked_at_once_for_some_rounds() {
        let mut pace = after(20, true);
        pace.round(4, true);
        assert_eq!(pace.spread(INTERVAL), Duration::ZERO);
        pace.round(4, true);
        assert_eq!(pace.spread(INTERVAL), Duration::ZERO);
    }

    #[test]
    fn a_peer_that_does_not_answer_is_asked_again_soon() {
        assert_eq!(after(20, false).spread(INTERVAL), Duration::ZERO);
    }
}

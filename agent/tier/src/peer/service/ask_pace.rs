//! Chooses the peers to ask for their inventories. Hosts of one job ask all others in each interval while something changes. If
//! nothing changes, or if no shard is stored anywhere, they ask each peer only in one of several intervals. Peers that do not answer
//! are asked in each interval, but not many at a time. A request is a connection with its own keys, which costs both sides about a
//! millisecond of CPU time, and hosts that started together would all ask at the same moment. Operations that depend on the current
//! inventories (a restore, a decision on a step) ask by themselves.

use std::time::Duration;

/// Number of rounds without a change after which nothing new is expected.
const ROUNDS_AFTER_A_CHANGE: u32 = 4;

/// While nothing changes, a peer that answers is asked once in this many rounds.
const ROUNDS_WHEN_QUIET: usize = 8;

/// Maximum number of peers that are asked at once; more are asked one by one over half an interval. While nothing changes, also the number
/// of silent peers that are asked in one round; if there are very many, one in `ROUNDS_WHEN_QUIET` of them.
const MAX_AT_ONCE: usize = 8;

/// The pace of one service.
#[derive(Debug, Default)]
pub(super) struct AskPace {
    /// Number of changes at the last round.
    seen: u64,
    /// Rounds since the last change.
    quiet: u32,
    rounds: usize,
}

impl AskPace {
    /// Of all peers, each with whether it answered last, those to ask in the next round. `is_empty`: as far as is known, no shard is
    /// stored anywhere, so that only the liveness of the others matters.
    pub(super) fn next(
        &self,
        peers: impl IntoIterator<Item = (String, bool)>,
        is_empty: bool,
    ) -> Vec<String> {
        let peers = peers.into_iter();
        if !is_empty && self.quiet < ROUNDS_AFTER_A_CHANGE {
            return peers.map(|(name, _)| name).collect();
        }
        let (answer, mut silent): (Vec<_>, Vec<_>) =
            peers.enumerate().partition(|(_, (_, answers))| *answers);
        let is_due = |index: usize| (index + self.rounds).is_multiple_of(ROUNDS_WHEN_QUIET);
        let due = answer.into_iter().filter(|(index, _)| is_due(*index));
        // All of them get their turn.
        let at_once = MAX_AT_ONCE.max(silent.len().div_ceil(ROUNDS_WHEN_QUIET));
        let turn = (self.rounds * at_once).checked_rem(silent.len()).unwrap_or(0);
        silent.rotate_left(turn);
        due.chain(silent.into_iter().take(at_once)).map(|(_, (name, _))| name).collect()
    }

    /// Ends a round. `changes`: number of changes on this host when it started. `is_settled`: nothing is expected
    /// of the others, and changes of the peers are reported by another component.
    pub(super) fn round(&mut self, changes: u64, is_settled: bool) {
        let is_quiet = self.seen == changes && is_settled;
        self.quiet = if is_quiet { self.quiet.saturating_add(1) } else { 0 };
        self.seen = changes;
        self.rounds = self.rounds.wrapping_add(1);
    }
}

/// The time over which requests to this many peers are spread.
pub(super) fn spread(interval: Duration, peers: usize) -> Duration {
    if peers > MAX_AT_ONCE { interval / 2 } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn after(rounds: u32, is_settled: bool) -> AskPace {
        let mut pace = AskPace::default();
        (0..rounds).for_each(|_| pace.round(3, is_settled));
        pace
    }

    fn peers(count: usize) -> Vec<(String, bool)> {
        (0..count).map(|index| (format!("{index:02}"), true)).collect()
    }

    #[test]
    fn all_are_asked_until_nothing_has_changed_for_some_rounds() {
        assert_eq!(after(0, true).next(peers(20), false).len(), 20);
        assert_eq!(after(ROUNDS_AFTER_A_CHANGE, true).next(peers(20), false).len(), 20);
        assert_eq!(after(20, false).next(peers(20), false).len(), 20, "a step has too few copies");
    }

    #[test]
    fn while_nothing_changes_each_peer_is_asked_once_in_some_rounds() {
        let mut pace = after(ROUNDS_AFTER_A_CHANGE + 1, true);
        let mut asked = Vec::new();
        for _ in 0..ROUNDS_WHEN_QUIET {
            let now = pace.next(peers(20), false);
            assert!(now.len() <= 3, "{now:?}");
            asked.extend(now);
            pace.round(3, true);
        }
        asked.sort();
        assert_eq!(asked, peers(20).into_iter().map(|(name, _)| name).collect::<Vec<_>>());
    }

    #[test]
    fn after_a_change_all_are_asked_again_for_some_rounds() {
        let mut pace = after(20, true);
        for _ in 0..ROUNDS_AFTER_A_CHANGE {
            pace.round(4, true);
            assert_eq!(pace.next(peers(20), false).len(), 20);
        }
        pace.round(4, true);
        assert!(pace.next(peers(20), false).len() <= 3);
    }

    #[test]
    fn a_peer_that_does_not_answer_is_asked_again_in_each_round_and_the_others_are_not() {
        let mut pace = after(20, true);
        let mut known = peers(20);
        known[7].1 = false;
        for _ in 0..ROUNDS_WHEN_QUIET {
            let asked = pace.next(known.clone(), false);
            assert!(asked.contains(&known[7].0) && asked.len() <= 4, "{asked:?}");
            pace.round(3, true);
        }
    }

    #[test]
    fn many_peers_that_do_not_answer_take_turns() {
        let mut pace = after(20, true);
        let mut known = peers(20);
        known.iter_mut().for_each(|(_, answers)| *answers = false);
        let mut asked = BTreeSet::new();
        for _ in 0..5 {
            let now = pace.next(known.clone(), false);
            assert_eq!(now.len(), MAX_AT_ONCE);
            asked.extend(now);
            pace.round(3, true);
        }
        assert_eq!(asked.len(), 20);
    }

    #[test]
    fn while_no_shard_is_stored_hosts_that_start_together_do_not_all_ask_all() {
        let mut pace = AskPace::default();
        let mut known = peers(63);
        known.iter_mut().for_each(|(_, answers)| *answers = false);
        for round in 0..8 {
            let now = pace.next(known.clone(), true);
            // New peers, and those whose turn it is again.
            assert!(now.len() <= 2 * MAX_AT_ONCE, "{round}: {now:?}");
            known.iter_mut().filter(|(name, _)| now.contains(name)).for_each(|(_, answers)| *answers = true);
            // Each start of ranks sets the peers again.
            pace.round(round, true);
        }
        assert!(known.iter().all(|(_, answers)| *answers), "all are known before long");
        pace.round(9, true);
        assert_eq!(pace.next(known, false).len(), 63, "the first step changes that");
    }

    #[test]
    fn a_few_peers_are_all_asked_at_once() {
        let known: Vec<(String, bool)> =
            peers(MAX_AT_ONCE).into_iter().map(|(name, _)| (name, false)).collect();
        assert_eq!(AskPace::default().next(known, true).len(), MAX_AT_ONCE);
    }

    #[test]
    fn many_peers_are_never_asked_all_at_once() {
        let interval = Duration::from_secs(1);
        assert_eq!(spread(interval, MAX_AT_ONCE), Duration::ZERO);
        assert_eq!(spread(interval, MAX_AT_ONCE + 1), interval / 2);
    }
}

//! Whether any rank is still awaited, checked after each of many reports. The search starts at the rank that was
//! found last, so that all reports of an attempt together visit each rank a few times, instead of every rank for each
//! report.

use std::collections::BTreeMap;

use mainstay_model::id::Rank;

use super::RankState;

/// The awaited rank that was found last. The condition must not become true again for a rank for which it was false,
/// or only rarely: then all ranks are visited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Awaited(Option<Rank>);

impl Awaited {
    /// Whether the condition holds for any rank.
    pub(super) fn any(
        &mut self,
        ranks: &BTreeMap<Rank, RankState>,
        is_awaited: impl Fn(Rank, &RankState) -> bool,
    ) -> bool {
        let from = self.0.unwrap_or(Rank(0));
        let is_awaited = |(rank, state): &(&Rank, &RankState)| is_awaited(**rank, state);
        let found = ranks.range(from..).find(is_awaited).or_else(|| ranks.range(..from).find(is_awaited));
        self.0 = found.map(|(rank, _)| *rank);
        found.is_some()
    }
}

/// The conditions that are checked for the ranks of an attempt.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AwaitedConditions {
    /// A rank that has not connected.
    pub(super) connected: Awaited,
    /// A rank that sends heartbeats and has not completed a step.
    pub(super) stepped: Awaited,
    /// A rank that has not ended.
    pub(super) ended: Awaited,
    /// A rank that may still show why its peers lost it.
    pub(super) may_end: Awaited,
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    fn ranks(many: u32) -> BTreeMap<Rank, RankState> {
        (0..many).map(|rank| (Rank(rank), RankState::default())).collect()
    }

    proptest! {
        /// With reports in any order the result equals that of a full scan.
        #[test]
        fn it_equals_a_full_scan(order in Just((0..40).collect::<Vec<u32>>()).prop_shuffle()) {
            let (mut ranks, mut awaited) = (ranks(40), Awaited::default());
            let is_awaited = |_: Rank, state: &RankState| !state.connected;
            for rank in order {
                prop_assert_eq!(awaited.any(&ranks, is_awaited), ranks.values().any(|state| !state.connected));
                ranks.entry(Rank(rank)).or_default().connected = true;
            }
            prop_assert!(!awaited.any(&ranks, is_awaited));
            // A rank for which it becomes true again is found, wherever it is.
            ranks.entry(Rank(3)).or_default().connected = false;
            prop_assert!(awaited.any(&ranks, is_awaited));
        }
    }

    #[test]
    fn reports_in_order_visit_each_rank_a_few_times() {
        let (mut ranks, mut awaited, looks) = (ranks(1000), Awaited::default(), Cell::new(0));
        for rank in 0..1000 {
            ranks.entry(Rank(rank)).or_default().connected = true;
            awaited.any(&ranks, |_, state| {
                looks.set(looks.get() + 1);
                !state.connected
            });
        }
        assert!(looks.get() < 4000, "{}", looks.get());
    }
}

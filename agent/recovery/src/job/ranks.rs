//! The ranks of an attempt, their states, and their hosts.

use std::collections::{BTreeMap, BTreeSet};

use mainstay_diagnosis::root_rank::RankEnd;
use mainstay_model::entry::{HostOfRanks, StepDone};
use mainstay_model::id::Rank;
use mainstay_model::time::Mono;
use mainstay_model::verdict::Verdict;

/// The state of a rank in the current attempt.
#[derive(Clone, Debug, Default)]
pub(super) struct RankState {
    connected: bool,
    /// When the kernel started to tear down its process, if that was seen.
    pub(super) ending_at: Option<Mono>,
    pub(super) end: RankEnd,
    pub(super) first: Option<StepDone>,
    pub(super) newest: Option<StepDone>,
}

/// The ranks of an attempt.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranks {
    states: BTreeMap<Rank, RankState>,
    awaited: AwaitedConditions,
    /// Ranks that sent heartbeats in this or an earlier attempt. After a restart the job waits for all of them.
    pub(super) beating: BTreeSet<Rank>,
    /// The hosts of the ranks, for messages; empty if there is one host.
    pub(super) hosts: Vec<HostOfRanks>,
}

impl Ranks {
    /// Starts an attempt with these ranks.
    pub(super) fn start(&mut self, ranks: impl Iterator<Item = Rank>) {
        self.states = ranks.map(|rank| (rank, RankState::default())).collect();
    }

    /// Ranks that no longer exist are not waited for.
    pub(super) fn resize(&mut self, ranks: u32) {
        self.beating.retain(|rank| rank.0 < ranks);
    }

    pub(super) fn list(&self) -> Vec<Rank> {
        self.states.keys().copied().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.states.len()
    }

    pub(super) fn get_mut(&mut self, rank: Rank) -> Option<&mut RankState> {
        self.states.get_mut(&rank)
    }

    pub(super) fn connect(&mut self, rank: Rank) {
        if let Some(state) = self.states.get_mut(&rank) {
            state.connected = true;
            self.beating.insert(rank);
        }
    }

    pub(super) fn all_connected(&mut self) -> bool {
        !self.awaited.connected.any(&self.states, |_, state| !state.connected)
    }

    pub(super) fn all_ended(&mut self) -> bool {
        !self.awaited.ended.any(&self.states, |_, state| state.end.exit.is_none())
    }

    /// Whether this rank lost a peer, and a peer may still show why.
    pub(super) fn awaits_a_peers_end(&mut self, rank: Rank) -> bool {
        let lost = self.states.get(&rank).is_some_and(|state| state.end.speaks_of_a_lost_peer());
        let may_end = |_: Rank, state: &RankState| {
            state.end.exit.is_none() && state.ending_at.is_none() && !state.end.speaks_of_a_lost_peer()
        };
        lost && self.awaited.may_end.any(&self.states, may_end)
    }

    /// The first and the newest step of each rank that sends heartbeats, if there are any and all
    /// of them have completed a step.
    pub(super) fn steps(&mut self) -> Option<Vec<(StepDone, StepDone)>> {
        let silent = |rank, state: &RankState| state.newest.is_none() && self.beating.contains(&rank);
        if self.awaited.stepped.any(&self.states, silent) {
            return None;
        }
        let beating = self.states.iter().filter(|(rank, _)| self.beating.contains(rank));
        let stepped: Option<Vec<(StepDone, StepDone)>> =
            beating.map(|(_, state)| Some((state.first?, state.newest?))).collect();
        stepped.filter(|stepped| !stepped.is_empty())
    }

    /// The first step of each rank that has completed one.
    pub(super) fn first_steps(&self) -> impl Iterator<Item = StepDone> {
        self.states.values().filter_map(|rank| rank.first)
    }

    /// How each rank ended.
    pub(super) fn ends(&self) -> BTreeMap<Rank, RankEnd> {
        let end = |(rank, state): (&Rank, &RankState)| {
            // A replayed journal has no steps, but records where each rank ended.
            let step = state.newest.map(|newest| newest.step).or(state.end.step);
            let end = RankEnd { step, heartbeats: state.connected, ..state.end.clone() };
            (*rank, end.with_last_words())
        };
        self.states.iter().map(end).collect()
    }

    /// Adds the host where a failure started, if there are several.
    pub(super) fn locate(&self, verdict: &mut Verdict) {
        let Some(culprit) = verdict.culprit else { return };
        let Some(HostOfRanks { host, node_rank, .. }) = HostOfRanks::find(&self.hosts, culprit) else {
            return;
        };
        verdict.evidence.push(format!("{culprit} ran on host {host} (node rank {node_rank})"));
        if let Some(rest) = verdict.headline.strip_prefix(&format!("{culprit} ")).map(str::to_owned)
            && !rest.starts_with("on host ")
        {
            verdict.headline = format!("{culprit} on host {host} {rest}");
        }
        verdict.host = Some(host.clone());
    }

    /// The hosts of these ranks.
    pub(super) fn hosts_of(&self, ranks: &[Rank]) -> Vec<String> {
        let host = |rank: &Rank| HostOfRanks::find(&self.hosts, *rank).map(|host| host.host.clone());
        let mut hosts: Vec<String> = ranks.iter().filter_map(host).collect();
        hosts.dedup();
        hosts
    }
}

/// Whether any rank is still awaited, checked after each of many reports. The search starts at the
/// rank that was found last, so that all reports of an attempt together visit each rank a few
/// times, instead of every rank for each report. The condition must not become true again for a
/// rank for which it was false, or only rarely: then all ranks are visited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Awaited(Option<Rank>);

impl Awaited {
    /// Whether the condition holds for any rank.
    fn any(
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
struct AwaitedConditions {
    /// A rank that has not connected.
    connected: Awaited,
    /// A rank that sends heartbeats and has not completed a step.
    stepped: Awaited,
    /// A rank that has not ended.
    ended: Awaited,
    /// A rank that may still show why its peers lost it.
    may_end: Awaited,
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

//! Finds the ranks that all others wait for in one snapshot of all ranks: by collective counters if there are any,
//! else by what distinguishes some ranks from the others.

use crate::activity::{Activity, ProcessState};
use crate::wait_for::{End, Located, Presence, TOGETHER, locate as walk};
use crate::watch::Watch;
use mainstay_model::hang::HangKind;
use mainstay_model::time::Mono;

/// Ranks that hold up the job, with the reasons.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Suspects {
    pub(crate) kind: HangKind,
    /// The ranks that all others wait for; empty if unknown.
    pub(crate) culprits: Vec<u32>,
    /// The ranks among which the culprit is.
    pub(crate) among: Vec<u32>,
    pub(crate) confidence: f64,
    pub(crate) evidence: Vec<String>,
}

impl Suspects {
    fn new(kind: HangKind, culprits: Vec<u32>, confidence: f64, evidence: String) -> Suspects {
        Suspects { kind, among: culprits.clone(), culprits, confidence, evidence: vec![evidence] }
    }
}

/// A rank is a root if it has at least one part in this many of the votes of the first.
pub(crate) const ROOT_SHARE: u32 = 10;

impl Watch {
    pub(crate) fn locate(&self) -> Suspects {
        let stopped = self.ranks_where(|rank| self.lives(rank) && self.state(rank) == ProcessState::Stopped);
        if !stopped.is_empty() {
            let text = format!("{} in state T (stopped)", self.processes(&stopped));
            return Suspects::new(HangKind::Stopped, stopped, 0.97, text);
        }
        self.by_counters().unwrap_or_else(|| self.by_place())
    }

    fn by_counters(&self) -> Option<Suspects> {
        if self.counters.is_empty() {
            return None;
        }
        let located =
            walk(&self.counters, |rank| self.presence(rank), |rank| self.host(rank), self.ranks.len());
        let (first, votes) = *located.ends.first()?;
        let waiting = located.waiting;
        let text =
            |who: &str| format!("by collective counters {votes} of {waiting} waiting ranks wait for {who}");
        Some(match first {
            End::Root(_) => {
                let roots: Vec<u32> = located
                    .ends
                    .iter()
                    .filter(|(_, share)| share.saturating_mul(ROOT_SHARE) >= votes)
                    .filter_map(|(end, _)| if let End::Root(rank) = end { Some(*rank) } else { None })
                    .collect();
                let kind = self.kind_of_root(roots[0] as usize);
                let text = text(&self.listed(&roots));
                Suspects::new(kind, roots, 0.97, text)
            }
            End::Silent(_) => self.silent(&located),
            End::Mismatch(rank) => Suspects::new(
                HangKind::Mismatch,
                vec![rank],
                0.9,
                format!(
                    "{} entered another operation under the number that the others are in",
                    self.listed(&[rank])
                ),
            ),
            End::Cycle(_) => {
                let text = format!("{} wait for each other in a circle", self.listed(&located.circle));
                Suspects::new(HangKind::Mismatch, located.circle, 0.8, text)
            }
            End::Network(row) => {
                let text = format!(
                    "all members of communicator {} have entered an operation and none has left it",
                    self.counters.name(row)
                );
                let among = self.ranks_where(|rank| self.lives(rank));
                Suspects { among, ..Suspects::new(HangKind::Network, Vec::new(), 0.8, text) }
            }
        })
    }

    /// The host that sends nothing and that most ranks wait for, of those that fell silent last. The job continued
    /// after the others had fallen silent, so it does not wait for them. Of ranks that never registered it returns
    /// all.
    fn silent(&self, located: &Located) -> Suspects {
        let mut hosts: std::collections::BTreeMap<u32, (u32, Vec<(u32, u32)>)> =
            std::collections::BTreeMap::new();
        for (end, votes) in &located.ends {
            let End::Silent(rank) = end else { continue };
            let (sum, named) = hosts.entry(self.host(*rank as usize)).or_default();
            *sum = sum.saturating_add(*votes);
            named.push((*rank, *votes));
        }
        let never = |rank: &u32| !self.ranks[*rank as usize].sample.registered;
        let received =
            |named: &[(u32, u32)]| named.iter().map(|(rank, _)| self.ranks[*rank as usize].received).max();
        let last = hosts.values().filter_map(|(_, named)| received(named)).max().unwrap_or_default();
        let with_the_job = hosts
            .values()
            .filter(|(_, named)| received(named) >= Some(Mono(last.0.saturating_sub(TOGETHER.0))));
        let (mut votes, mut named) = with_the_job.max_by_key(|(sum, _)| *sum).cloned().unwrap_or_default();
        let mut kind = HangKind::SilentHost;
        if named.first().is_some_and(|(rank, _)| never(rank)) {
            let all = hosts.values().flat_map(|(_, named)| named).copied();
            named = all.filter(|(rank, _)| never(rank)).collect();
            votes = named.iter().map(|(_, votes)| *votes).sum();
            kind = HangKind::NeverRegistered;
        }
        let most = named.iter().map(|(_, votes)| *votes).max().unwrap_or(0);
        let mut silent: Vec<u32> = named
            .iter()
            .filter(|(_, votes)| votes.saturating_mul(ROOT_SHARE) >= most)
            .map(|(rank, _)| *rank)
            .collect();
        silent.sort_unstable();
        let text = format!(
            "by collective counters {votes} of {} waiting ranks wait for {}, which sends nothing",
            located.waiting,
            self.listed(&silent)
        );
        Suspects::new(kind, silent, 0.8, text)
    }

    /// Whether a rank's counters are current.
    fn presence(&self, rank: usize) -> Presence {
        let state = &self.ranks[rank];
        if !self.lives(rank) || state.sample.closed {
            return Presence::OtherHosts;
        }
        if state.received < self.moved || !state.sample.registered {
            return Presence::Silent(state.received);
        }
        if self.state(rank) == ProcessState::Uninterruptible || self.phases.is_data(state.sample.phase) {
            return Presence::OtherHosts;
        }
        Presence::Reports
    }

    fn kind_of_root(&self, rank: usize) -> HangKind {
        let sample = &self.ranks[rank].sample;
        if !self.lives(rank) || sample.closed {
            HangKind::FinishedEarly
        } else if !sample.registered {
            HangKind::NeverRegistered
        } else if self.phases.is_data(sample.phase) {
            HangKind::DataInput
        } else if self.state(rank) == ProcessState::Uninterruptible {
            HangKind::BlockedIo
        } else {
            HangKind::UserCode
        }
    }

    /// Without counters: what distinguishes the few from the many.
    fn by_place(&self) -> Suspects {
        let registered = self.ranks_where(|rank| self.lives(rank) && self.ranks[rank].sample.registered);
        let never = self.ranks_where(|rank| self.lives(rank) && !self.ranks[rank].sample.registered);
        if !never.is_empty() && self.newest_step().is_none() {
            let text = format!("{} of {} ranks have registered", registered.len(), self.ranks.len());
            return Suspects::new(HangKind::NeverRegistered, never, 0.9, text);
        }
        if let Some(found) = self.uninterruptible(&registered).or_else(|| self.finished_early()) {
            return found;
        }
        let behind = self.behind(&registered);
        let found = self.in_data(&behind).or_else(|| self.in_no_collective(&behind));
        if let Some(found) = found.or_else(|| self.in_few(&behind)).or_else(|| self.by_activity(&behind)) {
            return found;
        }
        if behind.len() * 2 <= registered.len() {
            let kind = self.kind_of_root(behind[0] as usize);
            let text = format!("{} completed fewer steps than the others", self.listed(&behind));
            return Suspects::new(kind, behind, 0.85, text);
        }
        Suspects {
            kind: HangKind::AllStill,
            culprits: Vec::new(),
            among: behind,
            confidence: 0.3,
            evidence: vec!["no counter, step, section or process state differs between the ranks".to_owned()],
        }
    }

    fn uninterruptible(&self, registered: &[u32]) -> Option<Suspects> {
        let found = within(registered, |rank| self.state(rank) == ProcessState::Uninterruptible);
        (!found.is_empty() && found.len() < registered.len()).then(|| {
            let text = format!("{} in state D (uninterruptible sleep)", self.processes(&found));
            Suspects::new(self.kind_of_root(found[0] as usize), found, 0.85, text)
        })
    }

    /// A rank that has finished with fewer steps than one that waits: uneven data.
    fn finished_early(&self) -> Option<Suspects> {
        let most = self.newest_step();
        let done = self.ranks_where(|rank| !self.lives(rank) || self.ranks[rank].sample.closed);
        let done = within(&done, |rank| self.ranks[rank].sample.step <= most);
        (!done.is_empty()).then(|| {
            let text = format!("{} exited normally while others continue", self.listed(&done));
            Suspects::new(HangKind::FinishedEarly, done, 0.7, text)
        })
    }

    /// The ranks that completed the fewest steps, and those of which that is unknown.
    fn behind(&self, registered: &[u32]) -> Vec<u32> {
        let step = |rank: u32| self.ranks[rank as usize].sample.step;
        let known = registered.iter().filter(|rank| !self.prints_nothing(**rank as usize));
        let least = known.map(|rank| step(*rank)).min().flatten();
        let is_behind = |rank: &u32| step(*rank) == least || self.prints_nothing(*rank as usize);
        registered.iter().copied().filter(is_behind).collect()
    }

    fn in_data(&self, ranks: &[u32]) -> Option<Suspects> {
        let found = within(ranks, |rank| self.phases.is_data(self.ranks[rank].sample.phase));
        (!found.is_empty() && found.len() < self.ranks.len()).then(|| {
            let section = self.phases.name(self.ranks[found[0] as usize].sample.phase);
            let text = format!("only {} has section {section} open", self.listed(&found));
            Suspects::new(HangKind::DataInput, found, 0.9, text)
        })
    }

    fn in_no_collective(&self, ranks: &[u32]) -> Option<Suspects> {
        let found = within(ranks, |rank| !self.phases.is_collective(self.ranks[rank].sample.phase));
        (!found.is_empty() && found.len() < ranks.len()).then(|| {
            let text = format!(
                "{} outside the section in which the others wait for each other",
                self.listed(&found)
            );
            Suspects::new(self.kind_of_root(found[0] as usize), found, 0.85, text)
        })
    }

    /// The smallest group of ranks that are in the same section, if it is no more than half.
    fn in_few(&self, ranks: &[u32]) -> Option<Suspects> {
        let mut groups: std::collections::BTreeMap<_, Vec<u32>> = std::collections::BTreeMap::new();
        for rank in ranks {
            groups.entry(self.ranks[*rank as usize].sample.phase).or_default().push(*rank);
        }
        if groups.len() < 2 {
            return None;
        }
        let earliest = |group: &[u32]| group.iter().map(|rank| self.ranks[*rank as usize].sample.since).min();
        let few = groups.into_values().min_by_key(|group| (group.len(), earliest(group)))?;
        (few.len() * 2 <= ranks.len()).then(|| {
            let section = self.phases.name(self.ranks[few[0] as usize].sample.phase);
            let text = format!("{} in {section}, the others elsewhere", self.listed(&few));
            Suspects::new(self.kind_of_root(few[0] as usize), few, 0.75, text)
        })
    }

    fn by_activity(&self, ranks: &[u32]) -> Option<Suspects> {
        let (still, busy): (Vec<u32>, Vec<u32>) =
            ranks.iter().partition(|rank| self.activity(**rank as usize) == Some(Activity::Still));
        if still.is_empty() || busy.is_empty() {
            return None;
        }
        let (few, does) =
            if busy.len() <= still.len() { (busy, "use CPU time") } else { (still, "use none") };
        let text = format!("{} {does}, unlike the others", self.listed(&few));
        Some(Suspects::new(self.kind_of_root(few[0] as usize), few, 0.6, text))
    }
}

fn within(ranks: &[u32], is: impl Fn(usize) -> bool) -> Vec<u32> {
    ranks.iter().copied().filter(|rank| is(*rank as usize)).collect()
}

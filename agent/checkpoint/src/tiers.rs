//! The progress of each tier: the newest step that remains if all nearer tiers are lost.

use std::collections::BTreeSet;

use crate::choice::{RestoreRequest, choose};
use crate::inventory::{Copy, Medium};

/// Where a step is stored, the nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// In the memory of the hosts whose ranks saved it: survives the exit of ranks and launchers.
    Memory,
    /// On the disks of these hosts: survives their restart.
    Disk,
    /// On other hosts: survives the loss of one.
    Peer,
    /// In storage that outlives all hosts.
    Durable,
}

impl Tier {
    /// All tiers, the nearest first.
    pub const ALL: [Tier; 4] = [Tier::Memory, Tier::Disk, Tier::Peer, Tier::Durable];

    /// Its name in metrics and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Tier::Memory => "memory",
            Tier::Disk => "disk",
            Tier::Peer => "peer",
            Tier::Durable => "durable",
        }
    }

    fn from_copy(copy: &Copy) -> Tier {
        match (copy.medium, copy.own) {
            (Medium::Durable, _) => Tier::Durable,
            (_, false) => Tier::Peer,
            (Medium::Memory, true) => Tier::Memory,
            (Medium::Disk, true) => Tier::Disk,
        }
    }
}

/// The newest whole step of a run in one tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierState {
    /// The run id that the user gave.
    pub run: String,
    /// The tier.
    pub tier: Tier,
    /// The step.
    pub step: u64,
    /// When its last shard was sealed, seconds since 1970.
    pub created: i64,
}

impl TierState {
    /// Seconds since it was sealed, at `now` in seconds since 1970; 0 if it was sealed later by another host's clock.
    pub fn age_s(&self, now: i64) -> u64 {
        now.saturating_sub(self.created).max(0).unsigned_abs()
    }
}

/// The newest step of each run that is whole within one tier alone; tiers without one are absent.
pub fn newest_by_tier(copies: &[Copy]) -> Vec<TierState> {
    let runs: BTreeSet<&str> = copies.iter().map(|copy| copy.shard.key.run_id()).collect();
    let mut found = Vec::new();
    for tier in Tier::ALL {
        let of_tier = || copies.iter().filter(|copy| Tier::from_copy(copy) == tier);
        for run in &runs {
            let newest = choose(of_tier(), RestoreRequest { run: Some(run), ..RestoreRequest::default() });
            found.extend(newest.step.map(|step| TierState {
                run: (*run).to_owned(),
                tier,
                step: step.key.step,
                created: step.created,
            }));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::{Shard, StepKey};

    fn copy(holder: &str, medium: Medium, own: bool, step: u64, rank: u32) -> Copy {
        let key = StepKey { step, job: "job".into(), run: "run@7".into(), attempt: 0, world: 2 };
        let shard = Shard {
            key,
            rank,
            root: format!("{step}.{rank}"),
            bytes: 1,
            created: 1000 + step as i64,
            piece: None,
        };
        Copy { holder: holder.into(), medium, own, verified: true, shard }
    }

    #[test]
    fn each_tier_is_counted_separately_and_only_with_whole_steps() {
        let mut copies = Vec::new();
        for (rank, host) in ["a", "b"].into_iter().enumerate() {
            let rank = rank as u32;
            copies.push(copy(host, Medium::Memory, true, 30, rank));
            copies.push(copy(host, Medium::Disk, true, 20, rank));
            copies.push(copy("c", Medium::Memory, false, 10, rank));
        }
        // Only one of two ranks.
        copies.push(copy("c", Medium::Disk, false, 20, 0));
        copies.push(copy("a", Medium::Memory, true, 40, 0));
        let found = newest_by_tier(&copies);
        let listed: Vec<_> = found.iter().map(|key| (key.tier.as_str(), key.step, key.age_s(1050))).collect();
        assert_eq!(listed, [("memory", 30, 20), ("disk", 20, 30), ("peer", 10, 40)]);
        assert_eq!((found[0].run.as_str(), found[0].age_s(0)), ("run", 0));
        assert!(newest_by_tier(&[]).is_empty());
    }
}

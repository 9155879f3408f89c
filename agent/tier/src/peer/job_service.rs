//! Service for the launchers of one job: lists the shards on this host, and fetches the shards of its ranks before they start.
//! The leader of the job decides on the step.

use std::collections::BTreeMap;

use mainstay_checkpoint::inventory::{Copy, Medium, StepKey, restorable, steps};

use super::error::PeerError;
use super::local_shards::Watched;
use super::restore::Progress;
use super::service::Service;

/// Maximum number of reported steps, the newest.
const MAX_REPORTED: usize = 16;

/// The shards of a host's ranks are in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Brought {
    /// The root of each rank's shard.
    pub roots: BTreeMap<u32, String>,
    /// Shards fetched from other hosts.
    pub fetched: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Service {
    /// The copies on this host of the newest steps of a run: of its own ranks, and stored for others.
    pub fn holding(&self, run: &str) -> Vec<Copy> {
        let mine = |copies: Vec<Copy>| -> Vec<Copy> {
            copies
                .into_iter()
                .filter(|copy| copy.holder == self.name() && copy.medium != Medium::Durable)
                .collect()
        };
        let mut copies = mine(restorable(self.copies()));
        let newest: Vec<StepKey> =
            steps(&copies, Some(run)).into_iter().take(MAX_REPORTED).map(|step| step.key).collect();
        copies.retain(|copy| newest.contains(&copy.shard.of));
        copies
    }

    /// Fetches the shards of these ranks of a step: shards in the launcher's memory stay there, all others go into the
    /// directory. Each is compared with its owner's seal.
    ///
    /// # Errors
    /// A shard is not available: no answering host has a good copy.
    pub fn bring(
        &self,
        key: &StepKey,
        place: &Watched,
        ranks: &[u32],
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<Brought, PeerError> {
        let shared = &*self.shared;
        shared.own.watch(place.clone());
        shared.own.look();
        shared.refresh();
        let step = shared.step(key);
        let step = step.ok_or_else(|| PeerError::Local("no host that answers has any of it".to_owned()))?;
        let mut roots = BTreeMap::new();
        let mut absent = Vec::new();
        let (mut bytes, mut fetched) = (0, 0);
        for rank in ranks {
            let copies = step.ranks.get(rank).map_or(&[][..], Vec::as_slice);
            let Some(copy) = copies.first() else {
                return Err(PeerError::Local(format!("no host that answers has the shard of rank {rank}")));
            };
            let root = copy.shard.root.clone();
            if !self.is_good_in_memory(&root) {
                absent.push(*rank);
            }
            roots.insert(*rank, root);
        }
        if !absent.is_empty() {
            // Copies that were found damaged no longer count.
            let step = shared.step(key);
            for rank in &absent {
                let copies = step.as_ref().and_then(|step| step.ranks.get(rank)?.first());
                let none =
                    || PeerError::Local(format!("no host that answers has a good shard of rank {rank}"));
                roots.insert(*rank, copies.ok_or_else(none)?.shard.root.clone());
            }
            let came = shared.bring(key, place, Some(&absent), report)?;
            (bytes, fetched) = (came.bytes, came.fetched);
            shared.own.look();
        }
        Ok(Brought { roots, fetched, bytes })
    }

    /// Whether a shard in the memory of this host's launcher matches its seal.
    fn is_good_in_memory(&self, root: &str) -> bool {
        let Some(opened) = self.shared.own.open_pooled(root) else { return false };
        let good = matches!(opened.first_bad(), Ok(None)) && opened.is_still();
        if !good {
            // Use another copy, from any host.
            self.shared.distrust(self.name(), root);
        }
        good
    }

    /// The steps of a launch of which each shard is on at least two hosts, newest first: as attempt and step.
    pub fn copied(&self, launch: &str) -> Vec<(u64, u64)> {
        let mut copies = self.shared.copies();
        copies.retain(|copy| copy.shard.of.run == launch);
        let all = steps(&copies, None);
        let copied = all.iter().filter(|step| step.is_whole() && step.least_copies() > self.redundancy());
        let mut copied: Vec<(u64, u64)> = copied.map(|step| (step.key.attempt, step.key.step)).collect();
        copied.sort_unstable_by(|a, b| b.cmp(a));
        copied
    }
}

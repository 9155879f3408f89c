//! Detects ranks that declared that they save equal bytes and did not, on this host and on all peers that answer.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use mainstay_checkpoint::divergence::{ReplicaDivergence, SavedShard, divergences};
use mainstay_checkpoint::inventory::StepKey;

use super::Shared;
use crate::peer::message::StoredCopy;
use crate::peer::sealed::Sealed;

/// Maximum number that is remembered; the oldest steps are forgotten first.
const MOST: usize = 64;

/// Divergences by step and group.
pub(super) type Found = BTreeMap<(StepKey, String), ReplicaDivergence>;

impl Shared {
    /// Compares shards that ranks declared equal: of this host, and of peers by their last inventories.
    pub(super) fn compare_shared_content(&self) {
        divergences(&self.reported_shared_content()).into_iter().for_each(|found| self.remember(found));
    }

    /// Same for an offered shard. If it differs from those of others, asks peers again: only its owner reports the rank and host.
    pub(crate) fn compare_offered(&self, sealed: &Sealed) {
        let Some(content) = &sealed.shared_content else { return };
        let is_equal = |of: &SavedShard| {
            of.of != sealed.shard.of || of.group != content.group || of.root == content.root
        };
        let is_known = |of: &SavedShard| of.of == sealed.shard.of && of.rank == sealed.shard.rank;
        let reported = self.reported_shared_content();
        if !reported.iter().all(is_equal) && !reported.iter().any(is_known) {
            self.refresh();
            self.compare_shared_content();
        }
    }

    fn reported_shared_content(&self) -> Vec<SavedShard> {
        let of = |holder: &str, held: &StoredCopy| {
            let (group, root) = held.shared_content.clone().filter(|_| held.own)?;
            let (of, rank) = (held.shard.of.clone(), held.shard.rank);
            Some(SavedShard { of, group, rank, holder: holder.to_owned(), root })
        };
        let own = self.inventory_unlooked();
        let mut reported: Vec<SavedShard> = own.iter().filter_map(|held| of(self.name(), held)).collect();
        for (name, peer) in self.peers().iter() {
            reported.extend(peer.inventory.copies.iter().filter_map(|held| of(name, held)));
        }
        reported
    }

    fn remember(&self, found: ReplicaDivergence) {
        let mut known = self.reports.divergences.lock().unwrap_or_else(PoisonError::into_inner);
        let roots = |of: &ReplicaDivergence| -> Vec<(u32, String)> {
            of.members.iter().map(|member| (member.rank, member.root.clone())).collect()
        };
        let place = (found.of.clone(), found.group.clone());
        let before = known.get(&place);
        if before.is_some_and(|before| roots(before) == roots(&found)) {
            return;
        }
        if before.is_none() {
            self.counters.divergences.fetch_add(1, Ordering::Relaxed);
        }
        tracing::error!("{}", found.sentence());
        known.insert(place, found);
        while known.len() > MOST {
            known.pop_first();
        }
    }
}

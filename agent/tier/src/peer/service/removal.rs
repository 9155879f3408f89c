//! Deletes the copies of a step everywhere, and replicas that no rule keeps.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey};

use super::Service;
use crate::peer::error::PeerError;
use crate::peer::message::Withdrawal;

impl Service {
    /// Deletes all copies of a step, on this host, on peers and in durable storage. Returns their number.
    ///
    /// # Errors
    /// A copy exists and cannot be deleted.
    pub fn remove(&self, key: &StepKey) -> Result<usize, PeerError> {
        let shared = &self.shared;
        let copies = shared.copies();
        let of_step = || copies.iter().map(|copy| &copy.shard).filter(|shard| shard.of == *key);
        let is_theirs =
            |copy: &&Copy| copy.own && copy.medium != Medium::Durable && copy.holder != shared.name();
        let elsewhere = copies.iter().filter(|copy| copy.shard.of == *key).find(is_theirs);
        if let Some(copy) = elsewhere.filter(|_| shared.pass.tls().is_none()) {
            return Err(PeerError::Local(format!(
                "ranks on {} wrote step {}, and agents without TLS do not delete what ranks of another host wrote: run \
                 `mainstay ckpt rm` on that host",
                copy.holder, key.step
            )));
        }
        let shards: BTreeMap<&str, &Shard> = of_step().map(|shard| (shard.root.as_str(), shard)).collect();
        let _deleting = shared.withdrawals.deleting.lock().unwrap_or_else(PoisonError::into_inner);
        // Copies that are being made, or that are on an unreachable host, are deleted later.
        shared.are_withdrawn(of_step().map(|shard| shard.whole().to_owned()));
        let mut count = 0;
        for root in shards.keys() {
            let own = shared.own.remove(root).map_err(|error| PeerError::Local(error.to_string()))?;
            count += usize::from(own) + usize::from(shared.store.remove(root));
        }
        if let Some(durable) = shared.durable() {
            count += durable.remove(key)?;
        }
        let what = Withdrawal {
            everything: true,
            ..Withdrawal::of(shards.into_values(), shared.store.withdrawal_key())
        };
        let mut stays = None;
        for peer in shared.alive() {
            let dropped = shared.asking().forget(&peer, &what)?;
            count += dropped.count;
            stays = stays.or((dropped.refused > 0).then_some(peer));
        }
        shared.refresh();
        match stays {
            None => Ok(count),
            Some(peer) => Err(PeerError::Local(format!(
                "{count} copies of step {} were deleted, and those at {peer} stay: another host has put them there, and agents without \
                 TLS delete a replica only for that host. Run `mainstay ckpt rm` on it, or give the agents certificates (`checkpoint.tls_certificate`)",
                key.step
            ))),
        }
    }

    /// Deletes replicas on this host that no rule keeps. Returns their number.
    pub fn collect(&self) -> usize {
        self.shared.collect()
    }
}

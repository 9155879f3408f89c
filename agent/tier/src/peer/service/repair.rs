//! What has too few copies is sent, and what no rule keeps is deleted.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mainstay_core::checkpoint::inventory::{StepKey, steps};
use mainstay_core::checkpoint::placement::{Host, Rules};
use mainstay_core::checkpoint::retention::{Repair, Retention, deletable, repairs};

use super::{BACK_OFF, Shared};
use crate::peer::client::Sending;
use crate::peer::error::{PeerError, Reason};
use crate::peer::message::Held;

/// Whether the bytes were not as they were sealed before they went out.
fn is_ours(error: &PeerError) -> bool {
    matches!(error, PeerError::Corrupt { peer, .. } if peer == "this host")
}

impl Shared {
    /// All agents, as far as replicas go.
    pub(super) fn hosts(&self) -> Vec<Host> {
        let now = Instant::now();
        let mut hosts =
            vec![Host { name: self.name().to_owned(), domain: self.settings.domain.clone(), usable: true }];
        hosts.extend(self.peers().iter().map(|(name, peer)| Host {
            name: name.clone(),
            domain: peer.inventory.domain.clone(),
            usable: peer.alive && peer.not_before.is_none_or(|until| until <= now),
        }));
        hosts
    }

    pub(super) fn next_repair(&self) -> Option<Repair> {
        let rules = Rules { copies: self.settings.copies, avoid: self.settings.avoid.clone() };
        let mut copies = self.copies();
        let shared = self.own.shared();
        copies.retain(|copy| !shared.contains(&copy.shard.root));
        repairs(self.name(), &copies, &self.hosts(), &rules).into_iter().next()
    }

    pub(super) fn repair(&self, repair: &Repair) {
        let Repair { shard, to } = repair;
        let Some(opened) = self.open(&shard.root) else {
            // It was deleted meanwhile, or cannot be read: the next look tells.
            self.distrust(self.name(), &shard.root);
            return;
        };
        let going = || opened.pin();
        let sending = Sending { limit: &self.limit, streams: self.settings.streams, going: &going };
        match self.asking().put(to, &opened.sealed, &opened.bytes, &sending) {
            Ok(sent) => {
                self.counters.shards_sent.fetch_add(1, Ordering::Relaxed);
                self.counters.bytes_sent.fetch_add(sent.bytes, Ordering::Relaxed);
                let mut peers = self.peers();
                let Some(peer) = peers.get_mut(to) else { return };
                (peer.failures, peer.not_before) = (0, None);
                if sent.bytes > 0 {
                    peer.rate = Some((sent.bytes as f64 / sent.took.as_secs_f64().max(1e-9)) as u64);
                }
                // It told so itself; the next inventory will have it too.
                let medium = mainstay_core::checkpoint::inventory::Medium::Disk;
                let held = Held { shard: shard.clone(), medium, own: false, verified: true };
                peer.inventory.copies.retain(|other| other.shard.root != shard.root);
                peer.inventory.copies.push(held);
            }
            Err(error) if (is_ours(&error) || matches!(error, PeerError::Local(_))) && !opened.is_still() => {
                // A save needed its memory, or a trainer wrote its files again; nothing is wrong with it. What replaced it, or its copy
                // on the disk, is next.
                tracing::debug!(
                    step = shard.of.step,
                    rank = shard.rank,
                    "a step was passed over in memory while it was sent"
                );
                let _ = self.asking().forget(to, vec![shard.root.clone()]);
            }
            Err(error) => self.failed(shard, to, &error),
        }
    }

    pub(super) fn failed(
        &self,
        shard: &mainstay_core::checkpoint::inventory::Shard,
        to: &str,
        error: &PeerError,
    ) {
        self.counters.failures.fetch_add(1, Ordering::Relaxed);
        if is_ours(error) {
            tracing::error!(
                run = shard.of.run,
                step = shard.of.step,
                rank = shard.rank,
                "the bytes of a shard are not those that were sealed: it is offered no more"
            );
            return self.distrust(self.name(), &shard.root);
        }
        let mut peers = self.peers();
        let Some(peer) = peers.get_mut(to) else { return };
        peer.failures = peer.failures.saturating_add(1);
        let factor = 1_u32 << peer.failures.min(6).saturating_sub(1);
        let wait = match error {
            PeerError::Reported { reason: Reason::Full, .. } => BACK_OFF.1,
            _ => (BACK_OFF.0 * factor).min(BACK_OFF.1),
        };
        peer.not_before = Some(Instant::now() + wait);
        peer.error = Some(error.to_string());
        tracing::warn!(peer = to, step = shard.of.step, rank = shard.rank, %error, "a shard was not taken; another peer is tried");
    }

    /// Steps that the rules do not keep any more.
    pub(crate) fn deletable(&self) -> Vec<StepKey> {
        let copies = self.copies();
        let retention = Retention { keep: self.settings.keep, copies: self.settings.copies + 1 };
        let runs: BTreeSet<&str> = copies.iter().map(|copy| copy.shard.of.run_id()).collect();
        runs.into_iter().flat_map(|run| deletable(&steps(&copies, Some(run)), retention)).collect()
    }

    pub(super) fn collect(&self) -> usize {
        let gone: BTreeSet<StepKey> = self.deletable().into_iter().collect();
        let held = self.store.list();
        held.iter().filter(|(shard, ..)| gone.contains(&shard.of) && self.store.remove(&shard.root)).count()
    }
}

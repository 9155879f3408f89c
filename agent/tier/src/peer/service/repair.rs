//! Sends shards with too few copies, and deletes copies that no rule keeps.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey, restorable, steps, steps_among};
use mainstay_checkpoint::parity::Parity;
use mainstay_checkpoint::placement::cut_for;
use mainstay_checkpoint::retention::{Repair, Retention, counting, deletable, repairs};
use mainstay_checkpoint::spares::to_spare;

use super::{BACK_OFF_BOUNDS, Settings, Shared};
use crate::lock;
use crate::parity::cut;
use crate::peer::client::SendOptions;
use crate::peer::error::{PeerError, Reason};
use crate::peer::local_shards::OpenShard;
use crate::peer::message::StoredCopy;
use crate::peer::withdrawal::WithdrawalLock;
use crate::seal::Bytes;
use crate::seal::SealedShard;

/// Time without a chunk of a newer step after which an older step is copied anyway.
const NEWER_STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether the bytes already differed from the seal on this host.
fn is_ours(error: &PeerError) -> bool {
    matches!(error, PeerError::Corrupt { peer, .. } if peer == "this host")
}

impl Shared {
    /// The next shard to send: first those with too few copies, then those that spares lack.
    pub(super) fn next_repair(&self) -> Option<Repair> {
        if self.spares().contains(self.name()) {
            // Hosts with ranks send their own shards.
            return None;
        }
        self.next_of_hosts().or_else(|| self.next_for_spares())
    }

    fn next_for_spares(&self) -> Option<Repair> {
        let spares = self.spare_hosts();
        let launch = self.keeps_from().map(|(launch, _)| launch);
        launch.filter(|_| !spares.is_empty()).and_then(|launch| {
            let mut copies = self.copies();
            copies
                .retain(|copy| !copy.own || copy.holder != self.name() || !self.is_paused(&copy.shard.root));
            let next = to_spare(self.name(), &launch, &copies, &spares)?;
            self.all_were_asked_about(&next.shard.root).then_some(next)
        })
    }

    fn next_of_hosts(&self) -> Option<Repair> {
        let Settings { copies: count, parity, .. } = &self.settings;
        let rules = self.rules();
        let mut copies = self.copies();
        let shared = self.own.shared();
        copies.retain(|copy| !shared.contains(&copy.shard.root));
        let hosts = self.hosts();
        let mut needed = repairs(self.name(), &copies, &hosts, &rules);
        // An owner that saves as fast as it sends has often overwritten a step in its memory when that is complete here. A copy back would
        // compete with the newer step that is being received.
        needed.retain(|repair| !self.store.newer_is_coming(&repair.shard, NEWER_STEP_TIMEOUT));
        needed.retain(|repair| !self.is_paused(&repair.shard.root));
        self.put_in_order(&mut needed, &copies);
        let next = needed.into_iter().find(|repair| self.all_were_asked_about(&repair.shard.root));
        if let (Some(parity), Some(next)) = (parity, &next) {
            let is_cut = cut_for(self.name(), &hosts, &rules).is_some();
            if self.sender.too_few.swap(!is_cut, Ordering::Relaxed) == is_cut {
                let step = next.shard.key.step;
                if is_cut {
                    tracing::info!(step, %parity, "shards are kept in pieces");
                } else {
                    tracing::warn!(step, %parity, replicas = count, "too few other failure domains answer for the pieces of a shard: it gets replicas");
                }
            }
        }
        next
    }

    /// A step is useful only if all its shards have their copies, so steps with a copy come first. Otherwise, if saves are faster than
    /// copies, each rank and each host would send the newest step at a different time, and no step would be complete. After a step was
    /// overwritten while it was sent, steps on disk come first, where they can be held.
    fn put_in_order(&self, needed: &mut [Repair], copies: &[Copy]) {
        let wanted: BTreeSet<&StepKey> = needed.iter().map(|repair| &repair.shard.key).collect();
        // Without the owner's copy, the newest step with all copies would have one too few.
        let safe = self.own.pinned_runs().into_iter().filter_map(|run| self.newest_safe(&run, copies));
        let safe: BTreeSet<StepKey> = safe.collect();
        let kept = wanted.union(&safe.iter().collect()).copied().collect();
        {
            let job = self.job();
            self.own.hold_only(&kept, job.as_ref().and_then(|job| job.keeps_from.as_ref()));
        }
        if needed.is_empty() {
            self.sender.overtaken.store(false, Ordering::Relaxed);
            return;
        }
        let coming = self.store.coming();
        let sent = copies.iter().filter(|copy| !copy.own).map(|copy| &copy.shard.key);
        let started: BTreeSet<StepKey> =
            sent.chain(&coming).filter(|key| wanted.contains(key)).cloned().collect();
        let on_disk = self.own.on_disk();
        started.iter().filter(|key| on_disk.contains(key)).for_each(|key| self.own.hold(key));
        let is_overtaken = self.sender.overtaken.load(Ordering::Relaxed);
        needed.sort_by_key(|Repair { shard, .. }| {
            (!started.contains(&shard.key), is_overtaken && !on_disk.contains(&shard.key))
        });
        if let Some(first) = needed.first().filter(|first| on_disk.contains(&first.shard.key)) {
            self.own.hold(&first.shard.key);
        }
    }

    fn newest_safe(&self, run: &str, copies: &[Copy]) -> Option<StepKey> {
        let states = steps(copies, Some(run)).into_iter();
        let mut safe = states.filter(|key| key.is_whole() && key.least_copies() > self.settings.copies);
        safe.next().map(|state| state.key)
    }

    /// Whether all peers have reported their inventories since a replica arrived: its sender has the shard, and a peer that was asked
    /// before may not have known it.
    fn all_were_asked_about(&self, root: &str) -> bool {
        let Some(since) = self.store.since(root) else { return true };
        self.peers().values().all(|peer| !peer.alive || peer.asked.is_some_and(|asked| asked >= since))
    }

    pub(super) fn repair(&self, repair: &Repair) {
        let Repair { shard, to, .. } = repair;
        // It may have moved from memory to disk since the last look.
        let again = || {
            self.own.look();
            self.open_to_send(shard)
        };
        let Some((opened, lock)) = self.open_to_send(shard).or_else(again) else {
            self.was_not_opened(&shard.root);
            return;
        };
        let going = || opened.pin();
        let sending =
            SendOptions { limit: &self.sender.limit, streams: self.settings.streams, going: &going, lock };
        let piece = repair.piece.map(|which| self.piece(&opened, which)).transpose();
        let offered = match &piece {
            Ok(Some((sealed, _))) => sealed.shard.clone(),
            _ => shard.clone(),
        };
        let sent = piece.and_then(|piece| match piece {
            Some((sealed, bytes)) => self.client().put(to, &sealed, &bytes, &sending),
            None => self.client().put(to, &opened.sealed, &opened.bytes, &sending),
        });
        match sent {
            Ok(sent) => {
                let (step, rank, took_ms) = (shard.key.step, shard.rank, sent.took.as_millis() as u64);
                tracing::debug!(peer = to, step, rank, bytes = sent.bytes, took_ms, "a shard was sent");
                self.count(|counts| {
                    counts.shards_sent += 1;
                    counts.bytes_sent += sent.bytes;
                });
                let mut peers = self.peers();
                let Some(peer) = peers.get_mut(to) else { return };
                (peer.failures, peer.not_before) = (0, None);
                if sent.bytes > 0 {
                    peer.rate = Some((sent.bytes as f64 / sent.took.as_secs_f64().max(1e-9)) as u64);
                }
                // The peer confirmed it; its next inventory will include it.
                let medium = mainstay_checkpoint::inventory::Medium::Disk;
                peer.inventory.copies.retain(|other| other.shard.root != offered.root);
                let held =
                    StoredCopy { shard: offered, medium, own: false, verified: true, shared_content: None };
                peer.inventory.copies.push(held);
            }
            Err(error) if (is_ours(&error) || matches!(error, PeerError::Local(_))) && !opened.is_still() => {
                // A save needed its memory, or a trainer wrote its files again; nothing is wrong with it. Its successor, or its copy
                // on disk, is next.
                tracing::debug!(
                    step = shard.key.step,
                    rank = shard.rank,
                    "a step was replaced in memory while it was sent"
                );
                self.sender.overtaken.store(true, Ordering::Relaxed);
                // The sent part is useful only if the rest can come from disk.
                if !self.own.is_held(&shard.root) {
                    let _ = self.forget_at(to, &[offered]);
                }
            }
            Err(error) => self.failed(shard, to, &error),
        }
    }

    /// A shard could not be opened to be sent. One of this host's ranks is tried again later: a busy host may not have
    /// listed its new place yet, and its seal was not compared, so it is not damaged. A replica has one place only. A
    /// shard that is no longer listed was deleted.
    fn was_not_opened(&self, root: &str) {
        let is_it = |(shard, ..): &(Shard, Medium, bool)| shard.root == root;
        if self.own.list().iter().any(is_it) {
            let mut unopened = lock(&self.sender.unopened);
            unopened.retain(|_, since| since.elapsed() < BACK_OFF_BOUNDS.0);
            unopened.insert(root.to_owned(), Instant::now());
        } else if self.store.list().iter().any(is_it) {
            self.distrust(self.name(), root);
        }
    }

    fn is_paused(&self, root: &str) -> bool {
        let unopened = lock(&self.sender.unopened);
        unopened.get(root).is_some_and(|since| since.elapsed() < BACK_OFF_BOUNDS.0)
    }

    /// Opens a shard on this host, with the lock of all its replicas: this agent can withdraw shards of its own ranks; a replica can be
    /// withdrawn by the agent that sent it.
    fn open_to_send(&self, shard: &Shard) -> Option<(OpenShard, Option<WithdrawalLock>)> {
        // Memory is faster but may be overwritten.
        let is_overtaken = self.sender.overtaken.load(Ordering::Relaxed);
        let held = is_overtaken.then(|| self.own.open_pinned(&shard.root).map(OpenShard::of_file)).flatten();
        let own = held.or_else(|| self.own.open(&shard.root));
        let own = own.map(|opened| (opened, Some(self.store.withdrawal_key().lock(shard.whole()))));
        own.or_else(|| Some((self.open(&shard.root)?, self.store.lock_of(&shard.root))))
    }

    /// One piece of a shard, in a scratch file next to the store while it is sent.
    fn piece(
        &self,
        opened: &OpenShard,
        (parity, index): (Parity, u32),
    ) -> Result<(SealedShard, Bytes), PeerError> {
        let whole = &opened.sealed;
        let size = parity.lane(whole.shard.bytes) + whole.manifest.len() as u64;
        let room = self.store.scratch(size);
        let room = room.map_err(|error| PeerError::Local(format!("making room for a piece: {error}")))?;
        opened.pin();
        let sealed = cut(whole, &*opened.bytes, parity, index, &room)?;
        Ok((sealed, room.into()))
    }

    pub(super) fn failed(&self, shard: &Shard, to: &str, error: &PeerError) {
        self.count(|counts| counts.failures += 1);
        if is_ours(error) {
            tracing::error!(
                run = %shard.key.run,
                step = shard.key.step,
                rank = shard.rank,
                "the bytes of a shard differ from those that were sealed: it is no longer offered"
            );
            return self.distrust(self.name(), &shard.root);
        }
        if self.stops() {
            // The hosts of a job stop at about the same time.
            return;
        }
        let mut peers = self.peers();
        let Some(peer) = peers.get_mut(to) else { return };
        peer.failures = peer.failures.saturating_add(1);
        let factor = 1_u32 << peer.failures.min(6).saturating_sub(1);
        let wait = match error {
            PeerError::Reported { reason: Reason::Full, .. } => BACK_OFF_BOUNDS.1,
            _ => (BACK_OFF_BOUNDS.0 * factor).min(BACK_OFF_BOUNDS.1),
        };
        peer.not_before = Some(Instant::now() + wait);
        peer.error = Some(error.to_string());
        if self.has_leader() && matches!(error, PeerError::Lost { .. } | PeerError::Unreachable { .. }) {
            // The leader of the job reports which of its hosts are lost.
            tracing::debug!(peer = to, step = shard.key.step, rank = shard.rank, %error, "a shard was not taken");
            return;
        }
        tracing::warn!(peer = to, step = shard.key.step, rank = shard.rank, %error, "a shard was not taken; another peer is tried");
    }

    /// Steps that no rule keeps.
    pub(crate) fn deletable(&self) -> Vec<StepKey> {
        let hosts = self.hosts();
        let counting = |copies: Vec<Copy>| counting(self.name(), copies, &hosts, self.settings.copies + 1);
        let (copies, wanted) = counting(self.copies());
        let retention = Retention { keep: self.settings.keep, copies: wanted };
        // Rarely needed.
        let possible: OnceCell<Vec<Copy>> = OnceCell::new();
        let possible = || possible.get_or_init(|| restorable(counting(self.copies_as_last_reported()).0));
        let runs: BTreeSet<&str> = copies.iter().map(|copy| copy.shard.key.run_id()).collect();
        let of_run = |run| {
            let may_be_whole = |key: &StepKey| {
                let states = steps_among(possible(), Some(run));
                states.iter().any(|state| state.key == *key && state.is_whole())
            };
            deletable(&steps(&copies, Some(run)), may_be_whole, retention)
        };
        runs.into_iter().flat_map(of_run).collect()
    }

    /// Deletes what ranks of this host have written of these shards, on the request of a user at another host. Returns their number.
    pub(crate) fn remove_own(&self, roots: &[String]) -> usize {
        let removed = |root: &&String| match self.own.remove(root) {
            Ok(was_there) => was_there,
            Err(error) => {
                tracing::warn!(%error, "a shard that was to be removed cannot be deleted");
                false
            }
        };
        roots.iter().filter(removed).count()
    }

    pub(super) fn collect(&self) -> usize {
        let mut gone: BTreeSet<StepKey> = self.deletable().into_iter().collect();
        if let Some((launch, from)) = self.keeps_from() {
            // A shard seen in memory may have been overwritten since: a newer step counts only if it is kept there.
            gone.retain(|key| key.run != launch || (key.attempt, key.step) < from);
        }
        let held = self.store.list();
        held.iter().filter(|(shard, ..)| gone.contains(&shard.key) && self.store.remove(&shard.root)).count()
    }
}

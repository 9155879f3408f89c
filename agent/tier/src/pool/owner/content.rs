//! The content of the memory: which steps are whole in it, which of them are written next, and the
//! life of each slot.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mainstay_checkpoint_format::Manifest;
use mainstay_checkpoint_format::control::{Control, Slot, State};

use crate::disk::WriteError;
use crate::os::monotonic_ms;
use crate::pool::Settings;
use crate::pool::choose::{self, AttemptStep, SealedSlot};
use crate::pool::memory::RankMemory;
use crate::pool::owner::WholeStep;
use crate::pool::owner::write::{WriteBatch, WriteResult};
use crate::seal::SealError;

/// A rank that has waited this long for a slot may get the slot of a step that is not whole yet.
const MAX_SLOT_WAIT: Duration = Duration::from_secs(2);

/// Pause after a failed write to disk.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(10);

/// Maximum number of steps that wait to be taken.
const MAX_WHOLE_STEPS: usize = 4;

/// Steps in the memory of this host's ranks, and what is known of their copies on disk.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub(super) epoch: u64,
    pub(super) ranks: Vec<RankMemory>,
    sealed: BTreeMap<(u32, usize), SlotContent>,
    pub(super) on_disk: BTreeSet<(AttemptStep, u32)>,
    /// Shards of steps in memory that ranks themselves wrote to disk, as of the last check.
    pub(super) elsewhere: BTreeSet<(AttemptStep, u32)>,
    pub(super) batch: Option<WriteBatch>,
    pub(super) writing: bool,
    pub(super) messages: Vec<String>,
    last_messages: String,
    pub(super) last_failure: Option<(String, Instant)>,
    waiting_since: BTreeMap<u32, Instant>,
    /// The attempt, and the last of its steps at which replicas agreed.
    pub(super) agreed: Option<AttemptStep>,
    /// The newest whole step that was saved before that.
    vouched: Option<AttemptStep>,
    /// The newest step of which each shard, of all hosts, has a copy on another host.
    pub(super) copied: Option<AttemptStep>,
    pub(super) memory: Option<(u64, Instant)>,
    pub(super) disk: Option<(u64, Instant)>,
    /// Steps that became whole in memory and were not taken yet.
    pub(super) whole: Vec<WholeStep>,
}

#[derive(Debug)]
struct SlotContent {
    slot: Slot,
    manifest: Manifest,
    writing: bool,
    when: Instant,
}

impl SlotContent {
    fn at(&self) -> AttemptStep {
        (self.slot.epoch, self.slot.step)
    }
}

impl Content {
    /// Empty memory of these ranks.
    pub(super) fn new(ranks: Vec<RankMemory>, messages: Vec<String>) -> Content {
        Content { ranks, messages, ..Content::default() }
    }

    /// Accepts what ranks filled in the last attempt and discards what they were filling.
    pub(super) fn begin_attempt(&mut self, epoch: u64) {
        for memory in &self.ranks {
            let Ok(control) = memory.control() else { continue };
            for slot in control.all() {
                match slot.state {
                    State::Filled if slot.epoch == self.epoch => _ = control.advance(&slot, State::Sealing),
                    // Its file is replaced: a process that still writes into it has no effect.
                    State::Filling | State::Filled => _ = control.advance(&slot, State::Damaged),
                    _ => {}
                }
            }
            control.set_waits(false);
            control.set_epoch(epoch);
        }
        self.waiting_since.clear();
        self.epoch = epoch;
    }

    pub(super) fn pages(&self) -> impl Iterator<Item = Control<'_>> {
        self.ranks.iter().filter_map(|memory| memory.control().ok())
    }

    pub(super) fn add_notice(&mut self, message: String) {
        if self.last_messages != message {
            tracing::debug!("{message}");
            self.last_messages.clone_from(&message);
            self.messages.push(message);
        }
    }

    pub(super) fn held(&self) -> Vec<SealedSlot> {
        let held = self.sealed.iter().map(|((rank, index), sealed)| SealedSlot {
            rank: *rank,
            index: *index,
            at: sealed.at(),
            writing: sealed.writing,
        });
        held.collect()
    }

    /// The newest step that is whole over memory and the shards that ranks wrote to disk themselves when they had no slot.
    fn newest_whole(&self, settings: &Settings) -> Option<AttemptStep> {
        self.newest_whole_of(&self.held(), settings)
    }

    /// The shards to write next: first the step to go back to, then the newest whole one.
    pub(super) fn unsaved(&self, settings: &Settings) -> Vec<SealedSlot> {
        let held = self.held();
        let on_disk = |at: AttemptStep, rank: u32| self.on_disk.contains(&(at, rank));
        let vouched = choose::to_write(&held, self.vouched, &on_disk);
        if vouched.is_empty() {
            choose::to_write(&held, self.newest_whole_of(&held, settings), &on_disk)
        } else {
            vouched
        }
    }

    /// Determines the whole step that was saved before the replicas last agreed.
    pub(super) fn vouch(&mut self, settings: &Settings) {
        let Some((attempt, agreed)) = self.agreed else { return };
        let mut held = self.held();
        held.retain(|shard| shard.at.0 == attempt && shard.at.1 <= agreed);
        let newest = self.newest_whole_of(&held, settings).filter(|at| Some(*at) > self.vouched);
        if let Some(at) = newest {
            self.vouched = Some(at);
            self.pages().for_each(|control| control.set_vouched(at.1));
        }
    }

    /// Records a step whose last shard was sealed, for the comparison of what ranks saved.
    fn note_whole(&mut self, at: AttemptStep) {
        let of_rank = |memory: &RankMemory| {
            let sealed = self.sealed.range((memory.rank, 0)..=(memory.rank, usize::MAX));
            let mut found = sealed.filter(|(_, sealed)| sealed.at() == at);
            found.next().and_then(|(_, sealed)| Some(sealed.manifest.chunks.as_ref()?.sums.clone()))
        };
        if self.ranks.len() < 2 {
            return;
        }
        let Some(chunks) = self.ranks.iter().map(of_rank).collect::<Option<Vec<_>>>() else { return };
        if self.whole.len() == MAX_WHOLE_STEPS {
            self.whole.remove(0);
        }
        self.whole.push(WholeStep { attempt: at.0, step: at.1, chunks });
    }

    fn newest_whole_of(&self, held: &[SealedSlot], settings: &Settings) -> Option<AttemptStep> {
        let elsewhere = |at: AttemptStep, rank: u32| {
            self.on_disk.contains(&(at, rank)) || self.elsewhere.contains(&(at, rank))
        };
        choose::newest_whole(held, &settings.ranks, &elsewhere)
    }

    /// Shards that steps in memory lack: their ranks may have written them to the disk themselves.
    pub(super) fn lacking(&self, settings: &Settings) -> Vec<(AttemptStep, u32)> {
        let held: BTreeSet<(AttemptStep, u32)> =
            self.sealed.iter().map(|((rank, _), content)| (content.at(), *rank)).collect();
        let steps: BTreeSet<AttemptStep> = held.iter().map(|(at, _)| *at).collect();
        let all = steps.into_iter().flat_map(|at| settings.ranks.clone().map(move |rank| (at, rank)));
        all.filter(|shard| !held.contains(shard) && !self.on_disk.contains(shard)).collect()
    }
}

// The life of each slot: accepted, sealed, passed to the writer, freed, withdrawn.

pub(super) type SealTask = (u32, Slot, Arc<File>);

impl Content {
    /// The slots to seal: filled in this attempt, or accepted when it ended.
    pub(super) fn accept(&mut self, settings: &Settings) -> Vec<SealTask> {
        let mut tasks = Vec::new();
        let mut messages = Vec::new();
        for memory in &self.ranks {
            let Ok(control) = memory.control() else { continue };
            for slot in control.all() {
                let file = memory.files.get(slot.index);
                let fits = slot.used <= slot.capacity && slot.world_size == u64::from(settings.world_size);
                match (slot.state, file) {
                    (State::Sealing, Some(file)) => tasks.push((memory.rank, slot, file.clone())),
                    (State::Filled, Some(file)) if fits && slot.epoch == self.epoch => {
                        if let Some(slot) = control.advance(&slot, State::Sealing) {
                            tasks.push((memory.rank, slot, file.clone()));
                        }
                    }
                    (State::Filled, _) => {
                        _ = control.advance(&slot, State::Damaged);
                        messages.push(format!(
                            "step {} of rank {} is not taken: it is of attempt {} and a world of {}, and this is attempt {} of {}",
                            slot.step, memory.rank, slot.epoch, slot.world_size, self.epoch, settings.world_size
                        ));
                    }
                    _ => {}
                }
            }
        }
        messages.into_iter().for_each(|message| self.add_notice(message));
        tasks
    }

    /// Records the result of sealing a slot.
    pub(super) fn sealed(&mut self, rank: u32, slot: &Slot, sealed: Result<Manifest, SealError>) {
        let Some(memory) = self.ranks.iter().find(|memory| memory.rank == rank) else { return };
        let Ok(control) = memory.control() else { return };
        let laid = sealed.map_err(|error| error.to_string()).and_then(|manifest| {
            memory.lay_manifest(slot.index, &manifest).map_err(|error| error.to_string())?;
            Ok(manifest)
        });
        match laid {
            Ok(manifest) => {
                if let Some(slot) = control.advance(slot, State::Sealed) {
                    let sealed = SlotContent { slot, manifest, writing: false, when: Instant::now() };
                    self.sealed.insert((rank, slot.index), sealed);
                    self.note_whole((slot.epoch, slot.step));
                }
            }
            Err(error) => {
                _ = control.advance(slot, State::Damaged);
                let step = slot.step;
                self.add_notice(format!(
                    "step {step} of rank {rank} is not sealed: {error}; older steps are untouched"
                ));
            }
        }
    }

    /// Ensures that every rank has a free slot, if one may be freed. With `replace`, a slot that is being written to disk
    /// may be freed too for a rank that has waited long: it gets another file, and the write goes on in the old one.
    pub(super) fn free(&mut self, settings: &Settings, replace: bool) {
        let newest = self.newest_whole(settings);
        if let Some(newest) = newest {
            let sealed = self.sealed.values().filter(|sealed| sealed.at() == newest);
            if let Some(when) = sealed.map(|sealed| sealed.when).max() {
                self.memory = Some((newest.1, when));
            }
        }
        let held = self.held();
        // While ranks of this attempt may still be loading, keep every step that they could choose.
        let all_have_saved = settings
            .ranks
            .clone()
            .all(|rank| held.iter().any(|shard| shard.rank == rank && shard.at.0 == self.epoch));
        let (mut freed, now) = (Vec::new(), monotonic_ms());
        for memory in &self.ranks {
            let Ok(control) = memory.control() else { continue };
            let waits = control.waits();
            let since = if waits {
                Some(*self.waiting_since.entry(memory.rank).or_insert_with(Instant::now))
            } else {
                self.waiting_since.remove(&memory.rank);
                None
            };
            let has_one = control.all().any(|slot| {
                let fits = slot.capacity >= memory.requested_bytes;
                matches!(slot.state, State::Free | State::Filling | State::Damaged) && (fits || !waits)
            });
            if has_one || !(waits || all_have_saved) {
                continue;
            }
            let long = since.is_some_and(|since| since.elapsed() > MAX_SLOT_WAIT);
            // A copy on disk is safe.
            let vouched = self.vouched.filter(|at| !self.on_disk.contains(&(*at, memory.rank)));
            // Of two slots, one must be freed eventually, regardless of the disk.
            let vouched = vouched.filter(|_| !long || control.slots() > 2);
            // A slot that is being sent to a peer is not freed, but a save does not wait for that.
            let pinned = |slot: &Slot| !waits && control.is_pinned(slot, now);
            let mut held = held.clone();
            held.iter_mut()
                .filter(|shard| shard.rank == memory.rank && pinned(&control.slot(shard.index)))
                .for_each(|shard| shard.writing = true);
            let copied = self.copied.filter(|_| !long || control.slots() > 2);
            let kept: Vec<_> = vouched.into_iter().chain(copied).collect();
            let to_free = |held: &[SealedSlot]| choose::to_free(held, memory.rank, newest, &kept, long);
            let idle = to_free(&held);
            let written = || {
                held.iter_mut().for_each(|shard| shard.writing = false);
                to_free(&held)
            };
            let Some(index) = idle.or_else(|| (replace && long).then(written).flatten()) else { continue };
            let slot = control.slot(index);
            // Too small for what the rank saves now, or read by the writer: it gets another file.
            let another = slot.capacity < memory.requested_bytes || idle.is_none();
            let to = if another { State::Damaged } else { State::Free };
            if slot.state == State::Sealed && control.advance(&slot, to).is_some() {
                freed.push((memory.rank, index));
            }
        }
        for key in freed {
            self.sealed.remove(&key);
        }
    }

    /// Passes the newest whole step to the writer, if it is idle.
    pub(super) fn begin_write(&mut self, settings: &Settings, finishing: bool) {
        let paused =
            self.last_failure.as_ref().is_some_and(|(_, at)| finishing || at.elapsed() < PAUSE_AFTER_FAILURE);
        if self.writing || self.batch.is_some() || paused {
            return;
        }
        let wanted = self.unsaved(settings);
        if wanted.is_empty() {
            return;
        }
        let mut shards = Vec::new();
        for held in wanted {
            let file = self.ranks.iter().find(|memory| memory.rank == held.rank);
            let file = file.and_then(|memory| memory.files.get(held.index)).cloned();
            if let (Some(sealed), Some(file)) = (self.sealed.get_mut(&(held.rank, held.index)), file) {
                sealed.writing = true;
                shards.push((held, sealed.manifest.clone(), file));
            }
        }
        self.writing = true;
        let is_alone = settings.ranks == (0..settings.world_size);
        let among = (!is_alone).then(|| (settings.ranks.clone(), self.copied.map(|at| at.1)));
        self.batch = Some(WriteBatch { shards, vouched: self.vouched.map(|at| at.1), among });
    }

    /// Records the result of a batch.
    pub(super) fn written(&mut self, batch: &WriteBatch, written: WriteResult) {
        self.writing = false;
        for (held, ..) in &batch.shards {
            if let Some(sealed) = self.sealed.get_mut(&(held.rank, held.index)) {
                sealed.writing = false;
            }
        }
        self.on_disk.extend(written.done.iter().map(|held| (held.at, held.rank)));
        match written.failed {
            None => {
                self.last_failure = None;
                if let Some((held, ..)) = batch.shards.first() {
                    let sealed = self.sealed.get(&(held.rank, held.index));
                    // Its slot may have another step by now.
                    let sealed = sealed.filter(|sealed| sealed.at() == held.at);
                    let when = sealed.map_or_else(Instant::now, |sealed| sealed.when);
                    self.disk = Some((held.at.1, when));
                }
            }
            Some((_, WriteError::GivenUp)) => {}
            Some((held, WriteError::Changed { chunk })) => {
                self.withdraw(held);
                self.add_notice(format!(
                    "step {} of rank {} is withdrawn: chunk {chunk} of it changed in memory after it was sealed. Something \
                     writes where it must not, or the memory is faulty; older steps are untouched",
                    held.at.1, held.rank
                ));
            }
            Some((held, error)) => {
                let message = format!("step {} cannot be written to the disk: {error}", held.at.1);
                let is_known =
                    self.last_failure.as_ref().is_some_and(|(before, _)| *before == error.to_string());
                self.last_failure = Some((error.to_string(), Instant::now()));
                if !is_known {
                    self.add_notice(format!("{message}; it stays in memory, and the next one is tried"));
                }
            }
        }
    }

    fn withdraw(&mut self, held: SealedSlot) {
        let sealed = self.sealed.get(&(held.rank, held.index));
        if sealed.is_some_and(|sealed| sealed.at() != held.at) {
            // The slot has another file and step by now.
            return;
        }
        self.sealed.remove(&(held.rank, held.index));
        let memory = self.ranks.iter().find(|memory| memory.rank == held.rank);
        if let Some(Ok(control)) = memory.map(RankMemory::control) {
            let slot = control.slot(held.index);
            _ = control.advance(&slot, State::Damaged);
        }
    }
}

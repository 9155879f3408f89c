//! The life of each slot: accepted, sealed, passed to the writer, freed, withdrawn.

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use mainstay_checkpoint_format::Manifest;
use mainstay_checkpoint_format::control::{Slot, State};

use super::{Inner, LONG, PAUSE, Sealed};
use crate::disk::WriteError;
use crate::os::monotonic_ms;
use crate::pool::Settings;
use crate::pool::choose::{self, SealedSlot};
use crate::pool::memory::Memory;
use crate::pool::writer::{Batch, Written};
use crate::seal::SealError;

pub(super) type Task = (u32, Slot, Arc<File>);

impl Inner {
    /// The slots to seal: filled in this attempt, or accepted when it ended.
    pub(super) fn accept(&mut self, settings: &Settings) -> Vec<Task> {
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
        messages.into_iter().for_each(|words| self.add_notice(words));
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
                    let sealed = Sealed { slot, manifest, writing: false, when: Instant::now() };
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
            let sealed =
                self.sealed.values().filter(|sealed| (sealed.slot.epoch, sealed.slot.step) == newest);
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
                let fits = slot.capacity >= memory.wanted;
                matches!(slot.state, State::Free | State::Filling | State::Damaged) && (fits || !waits)
            });
            if has_one || !(waits || all_have_saved) {
                continue;
            }
            let long = since.is_some_and(|since| since.elapsed() > LONG);
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
            let another = slot.capacity < memory.wanted || idle.is_none();
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
        let paused = self.trouble.as_ref().is_some_and(|(_, at)| finishing || at.elapsed() < PAUSE);
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
        self.batch = Some(Batch { shards, vouched: self.vouched.map(|at| at.1), among });
    }

    /// Records the result of a batch.
    pub(super) fn written(&mut self, batch: &Batch, written: Written) {
        self.writing = false;
        for (held, ..) in &batch.shards {
            if let Some(sealed) = self.sealed.get_mut(&(held.rank, held.index)) {
                sealed.writing = false;
            }
        }
        self.on_disk.extend(written.done.iter().map(|held| (held.at, held.rank)));
        match written.failed {
            None => {
                self.trouble = None;
                if let Some((held, ..)) = batch.shards.first() {
                    let sealed = self.sealed.get(&(held.rank, held.index));
                    // Its slot may have another step by now.
                    let sealed = sealed.filter(|sealed| (sealed.slot.epoch, sealed.slot.step) == held.at);
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
                let words = format!("step {} cannot be written to the disk: {error}", held.at.1);
                let reported = self.trouble.as_ref().is_some_and(|(before, _)| *before == error.to_string());
                self.trouble = Some((error.to_string(), Instant::now()));
                if !reported {
                    self.add_notice(format!("{words}; it stays in memory, and the next one is tried"));
                }
            }
        }
    }

    pub(super) fn withdraw(&mut self, held: SealedSlot) {
        let sealed = self.sealed.get(&(held.rank, held.index));
        if sealed.is_some_and(|sealed| (sealed.slot.epoch, sealed.slot.step) != held.at) {
            // The slot has another file and step by now.
            return;
        }
        self.sealed.remove(&(held.rank, held.index));
        let memory = self.ranks.iter().find(|memory| memory.rank == held.rank);
        if let Some(Ok(control)) = memory.map(Memory::control) {
            let slot = control.slot(held.index);
            _ = control.advance(&slot, State::Damaged);
        }
    }
}

//! Memory for slots: allocated when a rank requests it, enlarged when its state grows, replaced if its content cannot be trusted.

use std::fs;
use std::io;

use mainstay_checkpoint_format::control::{Answer, State};

use super::Shared;
use crate::pool::available;
use crate::pool::memory::{self, Memory};

impl Shared {
    /// Allocates the slots that ranks request. Files are created without the lock, so that a new attempt need not wait for them.
    pub(super) fn answer(&self) {
        let asked: Vec<(usize, u64, u64)> = {
            let inner = self.inner();
            let asked = inner.ranks.iter().enumerate().filter_map(|(place, memory)| {
                let (number, bytes) = memory.control().ok()?.asked()?;
                Some((place, number, bytes))
            });
            asked.collect()
        };
        for (place, number, bytes) in asked {
            let answer = self.reserve(place, bytes.max(1).next_multiple_of(2 << 20));
            let inner = self.inner();
            if let Some(Ok(control)) = inner.ranks.get(place).map(Memory::control) {
                control.give(number, answer);
            }
        }
    }

    pub(super) fn reserve(&self, place: usize, bytes: u64) -> Answer {
        let slots = match self.slots_for(place, bytes) {
            Ok(slots) => slots,
            Err(why) => {
                self.inner().add_notice(why);
                return Answer::NoRoom;
            }
        };
        if let Some(memory) = self.inner().ranks.get_mut(place) {
            memory.wanted = memory.wanted.max(bytes);
        }
        for index in 0..slots {
            if let Err(error) = self.grow(place, index, bytes) {
                self.inner().add_notice(format!(
                    "no memory for checkpoints of rank {place}: {error}; they are written to the disk in training"
                ));
                return if error.kind() == io::ErrorKind::StorageFull {
                    Answer::NoRoom
                } else {
                    Answer::Failed
                };
            }
        }
        Answer::Granted
    }

    /// The number of slots of `bytes` bytes that each rank may have if all of them want the same.
    pub(super) fn slots_for(&self, place: usize, bytes: u64) -> Result<usize, String> {
        let inner = self.inner();
        let held = |memory: &Memory| -> u64 {
            memory.control().map_or(0, |control| control.all().map(|slot| slot.capacity).sum())
        };
        let had: u64 = inner.ranks.iter().map(held).sum();
        let there = inner.ranks.get(place).and_then(|memory| memory.control().ok()).map_or(0, |c| c.slots());
        drop(inner);
        let free = available(&self.directory);
        let bound = self.settings.memory.unwrap_or_else(|| free.saturating_add(had) / 2);
        let all = bytes.saturating_mul(self.settings.ranks.len() as u64);
        let most = self.settings.slots.clamp(2, mainstay_checkpoint_format::control::MAX_SLOTS).max(there);
        let fits = |slots: &usize| {
            let wanted = all.saturating_mul(*slots as u64);
            wanted <= bound && wanted.saturating_sub(had) <= free
        };
        (2..=most).rev().find(fits).filter(|slots| *slots >= there).ok_or_else(|| {
            format!(
                "no memory for checkpoints: two of {} MiB for each of {} rank(s) are more than {} MiB, which is what may be \
                 taken; they are written to the disk in training. --checkpoint-memory sets the bound",
                bytes >> 20,
                self.settings.ranks.len(),
                bound.min(free.saturating_add(had)) >> 20
            )
        })
    }

    /// Gives a slot a file that is large enough, if it has none and its content is not needed.
    pub(super) fn grow(&self, place: usize, index: usize, bytes: u64) -> io::Result<()> {
        let mut inner = self.inner();
        let Some(memory) = inner.ranks.get_mut(place) else { return Ok(()) };
        let control = memory.control().map_err(io::Error::other)?;
        let is_new = index >= control.slots();
        let slot = control.slot(index);
        if !is_new {
            if slot.capacity >= bytes || slot.state != State::Free {
                return Ok(());
            }
            // Ranks do not see it while it changes; `renew` makes it available again.
            _ = control.advance(&slot, State::Damaged);
            drop(inner);
            return self.renew_one(place, index);
        }
        let (number, directory) = (memory.next_file(), memory.directory.clone());
        drop(inner);
        let file = memory::allocate(&memory::slot_path(&directory, index, number), bytes)?;
        let mut inner = self.inner();
        if let Some(memory) = inner.ranks.get_mut(place) {
            memory.install(index, number, file, bytes);
            if let Ok(control) = memory.control() {
                control.set_slots(index + 1);
            }
        }
        Ok(())
    }

    /// Gives new files to slots whose old file a process may still write to, or whose content cannot be trusted.
    pub(super) fn renew(&self) {
        let damaged: Vec<(usize, usize)> = {
            let inner = self.inner();
            let ranks = inner.ranks.iter().enumerate();
            let slots = ranks.filter_map(|(place, memory)| Some((place, memory.control().ok()?)));
            let all = slots.flat_map(|(place, control)| {
                control.all().map(move |slot| (place, slot)).collect::<Vec<_>>()
            });
            all.filter(|(_, slot)| slot.state == State::Damaged)
                .map(|(place, slot)| (place, slot.index))
                .collect()
        };
        for (place, index) in damaged {
            if let Err(error) = self.renew_one(place, index) {
                self.inner().add_notice(format!("a slot of rank {place} cannot be created again: {error}"));
            }
        }
    }

    pub(super) fn renew_one(&self, place: usize, index: usize) -> io::Result<()> {
        let mut inner = self.inner();
        let Some(memory) = inner.ranks.get_mut(place) else { return Ok(()) };
        let slot = memory.control().map_err(io::Error::other)?.slot(index);
        let (number, bytes, directory) =
            (memory.next_file(), slot.capacity.max(memory.wanted), memory.directory.clone());
        // Free the old memory first: there may not be enough for both.
        let _ = fs::remove_file(memory::slot_path(&directory, index, slot.file));
        drop(inner);
        let file = memory::allocate(&memory::slot_path(&directory, index, number), bytes)?;
        let mut inner = self.inner();
        if let Some(memory) = inner.ranks.get_mut(place) {
            memory.install(index, number, file, bytes);
            if let Ok(control) = memory.control() {
                let seen = control.slot(index);
                _ = control.advance(&seen, State::Free);
            }
        }
        Ok(())
    }
}

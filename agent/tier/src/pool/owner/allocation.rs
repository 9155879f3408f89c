//! Memory for slots: allocated when a rank requests it, enlarged when its state grows, replaced if
//! its content cannot be trusted.

use std::fs;
use std::io;

use mainstay_checkpoint_format::control::{Answer, Control, State};

use crate::pool::available;
use crate::pool::memory::{RankMemory, allocate, slot_path};
use crate::pool::owner::Shared;

impl Shared {
    /// Allocates the slots that ranks request. Files are created without the lock, so that a new attempt need not wait for them.
    pub(super) fn answer(&self) {
        let asked: Vec<(usize, u64, u64)> = {
            let content = self.content();
            let asked = content.ranks.iter().enumerate().filter_map(|(position, memory)| {
                let (number, bytes) = memory.control().ok()?.asked()?;
                Some((position, number, bytes))
            });
            asked.collect()
        };
        for (position, number, bytes) in asked {
            let answer = self.reserve(position, bytes.max(1).next_multiple_of(2 << 20));
            let content = self.content();
            if let Some(Ok(control)) = content.ranks.get(position).map(RankMemory::control) {
                control.give(number, answer);
            }
        }
    }

    /// The rank whose memory has this position: ranks of a host need not start at 0.
    fn rank_at(&self, position: usize) -> u64 {
        u64::from(self.settings.ranks.start) + position as u64
    }

    fn reserve(&self, position: usize, bytes: u64) -> Answer {
        let slots = match self.slots_for(position, bytes) {
            Ok(slots) => slots,
            Err(why) => {
                self.content().add_notice(why);
                return Answer::NoRoom;
            }
        };
        if let Some(memory) = self.content().ranks.get_mut(position) {
            memory.requested_bytes = memory.requested_bytes.max(bytes);
        }
        for index in 0..slots {
            if let Err(error) = self.grow(position, index, bytes) {
                let rank = self.rank_at(position);
                self.content().add_notice(format!(
                    "no memory for checkpoints of rank {rank}: {error}; they are written to the disk in training"
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
    fn slots_for(&self, position: usize, bytes: u64) -> Result<usize, String> {
        let content = self.content();
        let held = |memory: &RankMemory| -> u64 {
            memory.control().map_or(0, |control| control.all().map(|slot| slot.capacity).sum())
        };
        let had: u64 = content.ranks.iter().map(held).sum();
        let there =
            content.ranks.get(position).and_then(|memory| memory.control().ok()).map_or(0, |c| c.slots());
        drop(content);
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
    fn grow(&self, position: usize, index: usize, bytes: u64) -> io::Result<()> {
        {
            let content = self.content();
            let Some(memory) = content.ranks.get(position) else { return Ok(()) };
            let control = memory.control().map_err(io::Error::other)?;
            if index >= control.slots() {
                drop(content);
                return self.install_file(position, index, bytes, |control| control.set_slots(index + 1));
            }
            let slot = control.slot(index);
            if slot.capacity >= bytes || slot.state != State::Free {
                return Ok(());
            }
            // Ranks do not see it while it changes; `renew` makes it available again.
            _ = control.advance(&slot, State::Damaged);
        }
        self.renew_one(position, index)
    }

    /// Gives new files to slots whose old file a process may still write to, or whose content cannot be trusted.
    pub(super) fn renew(&self) {
        let damaged: Vec<(usize, usize)> = {
            let content = self.content();
            let ranks = content.ranks.iter().enumerate();
            let slots = ranks.filter_map(|(position, memory)| Some((position, memory.control().ok()?)));
            let all = slots.flat_map(|(position, control)| {
                control.all().map(move |slot| (position, slot)).collect::<Vec<_>>()
            });
            all.filter(|(_, slot)| slot.state == State::Damaged)
                .map(|(position, slot)| (position, slot.index))
                .collect()
        };
        for (position, index) in damaged {
            if let Err(error) = self.renew_one(position, index) {
                let rank = self.rank_at(position);
                self.content().add_notice(format!("a slot of rank {rank} cannot be created again: {error}"));
            }
        }
    }

    fn renew_one(&self, position: usize, index: usize) -> io::Result<()> {
        let bytes = {
            let content = self.content();
            let Some(memory) = content.ranks.get(position) else { return Ok(()) };
            let slot = memory.control().map_err(io::Error::other)?.slot(index);
            // Free the old memory first: there may not be enough for both.
            let _ = fs::remove_file(slot_path(&memory.directory, index, slot.file));
            slot.capacity.max(memory.requested_bytes)
        };
        self.install_file(position, index, bytes, |control| {
            _ = control.advance(&control.slot(index), State::Free);
        })
    }

    /// Allocates a file for a slot, without the lock, and installs it; `show` makes the slot available to its rank.
    fn install_file(
        &self,
        position: usize,
        index: usize,
        bytes: u64,
        show: impl FnOnce(&Control<'_>),
    ) -> io::Result<()> {
        let (number, path) = {
            let mut content = self.content();
            let Some(memory) = content.ranks.get_mut(position) else { return Ok(()) };
            let number = memory.next_file();
            (number, slot_path(&memory.directory, index, number))
        };
        let file = allocate(&path, bytes)?;
        if let Some(memory) = self.content().ranks.get_mut(position) {
            memory.install(index, number, file, bytes);
            if let Ok(control) = memory.control() {
                show(&control);
            }
        }
        Ok(())
    }
}

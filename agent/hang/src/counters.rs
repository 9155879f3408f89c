//! Collective counters of all ranks, in flat vectors: a scan of 131,072 ranks reads memory in order.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The counters of one communicator, from a rank's page, NCCL RAS or the flight recorder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    /// The communicator: the same number on all its ranks.
    pub comm: u64,
    /// Operations entered.
    pub entered: u64,
    /// Operations completed.
    pub completed: u64,
    /// Kind, type and size of the newest operation as one number; 0 if unknown.
    pub signature: u64,
}

/// A count with the row of its communicator instead of its name.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Entry {
    pub(crate) row: u32,
    pub(crate) count: Count,
}

impl Entry {
    /// Whether the rank waits in this communicator or has work in progress there.
    pub(crate) fn is_open(&self) -> bool {
        self.count.entered > self.count.completed
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct RankSlots {
    start: u32,
    used: u16,
    held: u16,
}

/// The counters of all ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counters {
    slots: Vec<RankSlots>,
    entries: Vec<Entry>,
    rows: BTreeMap<u64, u32>,
    names: Vec<u64>,
}

/// What changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Any counter.
    pub(crate) any: bool,
    /// A count of completed operations.
    pub(crate) completed: bool,
}

impl Counters {
    pub(crate) fn new(ranks: usize) -> Counters {
        Counters { slots: vec![RankSlots::default(); ranks], ..Counters::default() }
    }

    /// Whether no rank has counters.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Sets a rank's counters.
    pub(crate) fn set(&mut self, rank: usize, counts: &[Count]) -> Moved {
        let mut moved = Moved::default();
        let Some(slot) = self.slots.get(rank).copied() else { return moved };
        let slots = &mut self.entries[slot.start as usize..slot.start as usize + usize::from(slot.used)];
        let same = slots.len() == counts.len()
            && slots.iter().zip(counts).all(|(slot, count)| slot.count.comm == count.comm);
        if !same {
            self.replace(rank, slot, counts);
            return Moved { any: true, completed: true };
        }
        for (slot, count) in slots.iter_mut().zip(counts) {
            if slot.count != *count {
                moved.any = true;
                moved.completed |= slot.count.completed != count.completed;
                slot.count = *count;
            }
        }
        moved
    }

    fn replace(&mut self, rank: usize, slot: RankSlots, counts: &[Count]) {
        let counts = &counts[..counts.len().min(usize::from(u16::MAX))];
        let mut slot = slot;
        if usize::from(slot.held) < counts.len() {
            // A rank adds its communicators one by one as it creates them. Spare room avoids a move for each.
            let held = counts.len().next_power_of_two().max(4);
            slot = RankSlots {
                start: u32::try_from(self.entries.len()).unwrap_or(u32::MAX),
                used: 0,
                held: u16::try_from(held).unwrap_or(u16::MAX),
            };
            self.entries.resize(self.entries.len() + usize::from(slot.held), Entry::default());
        }
        for (index, count) in counts.iter().enumerate() {
            let row = self.row(count.comm);
            self.entries[slot.start as usize + index] = Entry { row, count: *count };
        }
        slot.used = u16::try_from(counts.len()).unwrap_or(u16::MAX);
        self.slots[rank] = slot;
    }

    fn row(&mut self, comm: u64) -> u32 {
        let next = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        *self.rows.entry(comm).or_insert_with(|| {
            self.names.push(comm);
            next
        })
    }

    pub(crate) fn entries_of(&self, rank: usize) -> &[Entry] {
        let slot = self.slots.get(rank).copied().unwrap_or_default();
        &self.entries[slot.start as usize..slot.start as usize + usize::from(slot.used)]
    }

    /// The memory that the counters use, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        // A B-tree node holds eleven entries and is two thirds full on average.
        self.slots.capacity() * size_of::<RankSlots>()
            + self.entries.capacity() * size_of::<Entry>()
            + self.names.capacity() * size_of::<u64>()
            + self.rows.len() * 2 * size_of::<(u64, u32)>()
    }

    pub(crate) fn communicators(&self) -> usize {
        self.names.len()
    }

    pub(crate) fn name(&self, row: u32) -> u64 {
        self.names.get(row as usize).copied().unwrap_or(0)
    }
}

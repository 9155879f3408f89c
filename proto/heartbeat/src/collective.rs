//! Collective counters: how many operations each communicator has entered and completed.

use std::sync::atomic::{Ordering, fence};

use crate::layout::*;
use crate::page::{ATTEMPTS, Page};
use crate::words::Words;

/// One communicator's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collective {
    /// The communicator, by a number of the client's choosing.
    pub comm: u64,
    /// Operations entered.
    pub entered: u64,
    /// Operations completed; never read as more than were entered, if the client counted truthfully.
    pub completed: u64,
    /// Kind, type and size of the operation entered last, as one number of the client's choosing that is the same for the
    /// same operation on all ranks; 0 if it is not told.
    pub signature: u64,
}

impl Page<'_> {
    /// The counters of every communicator that this claim has named, in order of appearance.
    #[must_use]
    pub fn collectives(&self) -> Vec<Collective> {
        for _ in 0..ATTEMPTS {
            let claims = self.words.load_acquire(CLAIMS);
            let count = (self.words.load_acquire(COLLECTIVE_COUNT) as usize).min(COLLECTIVE_ENTRIES);
            let found = (0..count).map(|index| read(self.words, index)).collect();
            fence(Ordering::Acquire);
            // A new claim clears the table: what was read across one belongs to nobody.
            if self.words.load(CLAIMS) == claims {
                return found;
            }
        }
        Vec::new()
    }
}

fn entry(index: usize) -> usize {
    COLLECTIVES + index * COLLECTIVE_BYTES
}

fn read(words: Words<'_>, index: usize) -> Collective {
    // In the opposite order of the stores, so that `completed` cannot overtake `entered`.
    let completed = words.load_acquire(entry(index) + collective::COMPLETED);
    let entered = words.load(entry(index) + collective::ENTERED);
    let signature = words.load(entry(index) + collective::SIGNATURE);
    Collective { comm: words.load(entry(index) + collective::ID), entered, completed, signature }
}

/// Whether the page's creator knows the word.
fn knows_signatures(words: Words<'_>) -> bool {
    words.load(MINOR_AT) >= 1
}

/// Sets a communicator's counters; false when the table has no room for it. The caller holds the page's lock.
pub(crate) fn write(words: Words<'_>, value: Collective) -> bool {
    let count = (words.load(COLLECTIVE_COUNT) as usize).min(COLLECTIVE_ENTRIES);
    let known = (0..count).find(|&index| words.load(entry(index) + collective::ID) == value.comm);
    let index = known.unwrap_or(count);
    if index == COLLECTIVE_ENTRIES {
        return false;
    }
    words.store(entry(index) + collective::ID, value.comm);
    if known.is_none() {
        words.store(entry(index) + collective::COMPLETED, 0);
    }
    if knows_signatures(words) {
        words.store(entry(index) + collective::SIGNATURE, value.signature);
    }
    words.store(entry(index) + collective::ENTERED, value.entered);
    words.store_release(entry(index) + collective::COMPLETED, value.completed);
    if known.is_none() {
        words.store_release(COLLECTIVE_COUNT, count as u64 + 1);
    }
    true
}

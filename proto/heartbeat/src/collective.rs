//! Collective counters: how many operations each communicator has entered and completed, and the oldest that is not
//! complete.

use std::sync::atomic::{Ordering, fence};

use crate::layout::*;
use crate::page::{ATTEMPTS, Page};
use crate::words::Words;

/// One communicator's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collective {
    /// The communicator, by a number that the client chooses.
    pub comm: u64,
    /// Operations entered.
    pub entered: u64,
    /// Operations completed; never read as more than were entered, if the client counted truthfully.
    pub completed: u64,
    /// Kind, type and size of the operation entered last, as one number that the client chooses and that is the
    /// same for the same operation on all ranks; 0 if it is unknown.
    pub signature: u64,
}

/// An operation, as this project's own clients report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Which operation.
    pub kind: OperationKind,
    /// Bytes of this rank's input; 0 if there is none or it is unknown. At most 2^56-1 are kept.
    pub bytes: u64,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $number:literal, $name:literal;)*) => {
        /// The kinds of operations between ranks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum OperationKind { $($(#[$doc])* $kind = $number,)* }

        impl OperationKind {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$kind,)*];

            /// Its name as the field writes it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)* }
            }
        }
    };
}

kinds! {
    /// One that has no number here.
    Other = 1, "other";
    /// All-reduce.
    AllReduce = 2, "all_reduce";
    /// All-gather.
    AllGather = 3, "all_gather";
    /// Reduce-scatter.
    ReduceScatter = 4, "reduce_scatter";
    /// Broadcast.
    Broadcast = 5, "broadcast";
    /// Reduce.
    Reduce = 6, "reduce";
    /// Gather.
    Gather = 7, "gather";
    /// Scatter.
    Scatter = 8, "scatter";
    /// All-to-all.
    AllToAll = 9, "all_to_all";
    /// Barrier.
    Barrier = 10, "barrier";
    /// Point-to-point send.
    Send = 11, "send";
    /// Point-to-point receive.
    Receive = 12, "recv";
}

impl OperationKind {
    /// The kind of this number in a page; numbers of later layouts are [`OperationKind::Other`].
    #[must_use]
    pub fn of(number: u8) -> Self {
        Self::ALL.iter().copied().find(|&kind| kind as u8 == number).unwrap_or(Self::Other)
    }

    /// The kind of this name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self::ALL.iter().copied().find(|kind| kind.name() == name).unwrap_or(Self::Other)
    }
}

impl Operation {
    /// As [`Collective::signature`]: the kind in bits 0-7, the bytes above.
    #[must_use]
    pub fn signature(self) -> u64 {
        self.bytes << 8 | u64::from(self.kind as u8)
    }

    /// Decodes a signature of our own clients; `None` if none was reported.
    #[must_use]
    pub fn of_signature(signature: u64) -> Option<Self> {
        let kind = (signature & 0xff) as u8;
        (kind != 0).then(|| Self { kind: OperationKind::of(kind), bytes: signature >> 8 })
    }
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
            // A new claim clears the table: counters that were read across it are discarded.
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
    // Reads in the opposite order of the stores, so that `completed` cannot overtake `entered`.
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

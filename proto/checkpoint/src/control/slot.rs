//! A slot of a rank's memory, and the word by which rank and keeper agree on its state.

/// The state of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Free: a rank may take it.
    Free,
    /// A rank copies into it.
    Filling,
    /// It holds a complete shard.
    Filled,
    /// The keeper has accepted it and computes its checksums.
    Sealing,
    /// It holds a shard, and its manifest is next to it.
    Sealed,
    /// Its content does not match the seal.
    Damaged,
}

impl State {
    pub(super) fn of(word: u64) -> State {
        match word & 0xff {
            1 => State::Filling,
            2 => State::Filled,
            3 => State::Sealing,
            4 => State::Sealed,
            0 => State::Free,
            // An invalid state: no process wrote it, so no process uses the slot.
            _ => State::Damaged,
        }
    }

    pub(super) fn number(self) -> u64 {
        match self {
            State::Free => 0,
            State::Filling => 1,
            State::Filled => 2,
            State::Sealing => 3,
            State::Sealed => 4,
            State::Damaged => 5,
        }
    }
}

/// A slot as it was read at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its index.
    pub index: usize,
    /// Its state.
    pub state: State,
    /// Its generation.
    pub generation: u64,
    /// The number of its file.
    pub file: u64,
    /// The capacity of the file in bytes.
    pub capacity: u64,
    /// The attempt that took it.
    pub epoch: u64,
    /// The step in it.
    pub step: u64,
    /// The size of the shard in bytes.
    pub used: u64,
    /// The number of shards of the step.
    pub world_size: u64,
}

/// The word of a slot with that generation and state.
pub(super) fn word(generation: u64, state: State) -> u64 {
    (generation << 8) | state.number()
}

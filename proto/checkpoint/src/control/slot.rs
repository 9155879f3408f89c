//! A slot of a rank's memory: what it is, and the word by which rank and keeper agree on that.

/// What a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nobody's: a rank may take it.
    Free,
    /// A rank copies into it.
    Filling,
    /// All of a shard is in it.
    Filled,
    /// The keeper has accepted it and takes its checksums.
    Sealing,
    /// It holds a shard, and its manifest lies beside it.
    Sealed,
    /// What it holds is not what was sealed.
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
            // What nobody wrote is offered to nobody.
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

/// A slot as it was seen at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its place.
    pub index: usize,
    /// What it is.
    pub state: State,
    /// Which of its lives this is.
    pub generation: u64,
    /// The number of its file.
    pub file: u64,
    /// Bytes that the file has room for.
    pub capacity: u64,
    /// The attempt that took it.
    pub epoch: u64,
    /// The step in it.
    pub step: u64,
    /// Bytes of the shard.
    pub used: u64,
    /// How many shards make the step.
    pub world_size: u64,
}

/// The word of a slot in that life and state.
pub(super) fn word(generation: u64, state: State) -> u64 {
    (generation << 8) | state.number()
}

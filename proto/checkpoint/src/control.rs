//! The control page of one rank's memory, by which the rank and the keeper agree on who may touch which slot.
//!
//! A slot goes FREE → FILLING → FILLED → SEALING → SEALED → FREE. The rank takes the first two steps, the keeper
//! the others. Each change is one exchange of one word that holds the state and the slot's generation, which grows
//! with every change. A late writer, such as a thread of an ended attempt, finds another generation and changes
//! nothing. A process may die between any two stores: the keeper takes back a slot that stays FILLING, with a new
//! file, so that a writer that is still alive writes into a file that no process reads.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the page.
pub const CONTROL_BYTES: usize = 4096;

/// The file's name in a rank's directory.
pub const CONTROL_NAME: &str = "control";

/// The socket by which a rank rings for its keeper, in the pool's directory: one datagram of any content.
pub const BELL_NAME: &str = "bell";

/// What names the pool, in the pool's directory: JSON with `directory`, `job` and `run`.
pub const POOL_NAME: &str = "pool.json";

/// The page's first eight bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"MSTYCKPT");

/// The page's version; a page of another version is not used.
pub const VERSION: u64 = 1;

/// The maximum number of slots in a page.
pub const MAX_SLOTS: usize = 8;

const WORDS: usize = CONTROL_BYTES / 8;

/// The page as words.
pub type ControlWords = [AtomicU64; WORDS];

// Offsets in words.
const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 1;
const AT_RANK: usize = 2;
const AT_WORLD_SIZE: usize = 3;
const AT_EPOCH: usize = 4;
const AT_KEEPER_PID: usize = 5;
const AT_KEEPER_BEAT: usize = 6;
const AT_WANTED: usize = 8;
const AT_ASKED: usize = 9;
const AT_ANSWERED: usize = 10;
const AT_ANSWER: usize = 11;
const AT_SLOTS: usize = 12;
const AT_WAITING: usize = 13;
const AT_VOUCHED: usize = 14;
const SLOTS: usize = 64;
const SLOT_WORDS: usize = 16;

// Within a slot.
const STATE: usize = 0;
const FILE: usize = 1;
const EPOCH: usize = 2;
const STEP: usize = 3;
const USED: usize = 4;
const SLOT_WORLD: usize = 5;
const CHECKED: usize = 6;
const CHECKING: usize = 7;
const CAPACITY: usize = 8;
const PINNED: usize = 9;

/// The longest time for which a reader may pin a slot at once.
const MAX_PIN_MS: u64 = 60_000;

/// The answer to a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Not answered yet.
    None,
    /// The slots exist.
    Granted,
    /// There is no room for them.
    NoRoom,
    /// The keeper could not create them and has logged the reason.
    Failed,
}

/// The result of a reader's check of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checked {
    /// No reader has checked it yet in this generation and attempt.
    No,
    /// All its bytes matched the seal.
    Good,
    /// Some bytes did not match.
    Bad,
}

/// A control page.
#[derive(Clone, Copy, Debug)]
pub struct Control<'m> {
    words: &'m ControlWords,
}

/// Why a page is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// It is not a control page.
    #[error("it is not a control page of a checkpoint pool")]
    Magic,
    /// Another version of Mainstay made it.
    #[error("it has version {0}, and this one speaks {VERSION}")]
    Version(u64),
    /// It is shorter than a page, or its address is not aligned.
    #[error("it is not a whole page")]
    Short,
}

impl<'m> Control<'m> {
    /// Initializes a new page in words that are all zero; no other process may see them yet.
    #[must_use]
    pub fn format(
        words: &'m ControlWords,
        rank: u32,
        world_size: u32,
        epoch: u64,
        pool_owner: u32,
    ) -> Control<'m> {
        let page = Control { words };
        page.put(AT_VERSION, VERSION);
        page.put(AT_RANK, u64::from(rank));
        page.put(AT_WORLD_SIZE, u64::from(world_size));
        page.put(AT_EPOCH, epoch);
        page.put(AT_KEEPER_PID, u64::from(pool_owner));
        page.put(AT_MAGIC, MAGIC);
        page
    }

    /// The page in these words.
    ///
    /// # Errors
    /// There is none of this version.
    pub fn new(words: &'m ControlWords) -> Result<Control<'m>, ControlError> {
        let page = Control { words };
        if page.get(AT_MAGIC) != MAGIC {
            return Err(ControlError::Magic);
        }
        match page.get(AT_VERSION) {
            VERSION => Ok(page),
            other => Err(ControlError::Version(other)),
        }
    }

    /// The page that is mapped at `start`.
    ///
    /// # Errors
    /// There is none of this version.
    ///
    /// # Safety
    /// `start` must point to `length` mapped, readable and writable bytes that stay mapped for `'m`, of a file that
    /// no process truncates; this process may touch them only through this type.
    pub unsafe fn from_raw(start: *mut u8, length: usize) -> Result<Control<'m>, ControlError> {
        // SAFETY: passed on to the caller.
        Control::new(unsafe { Self::words_at(start, length)? })
    }

    /// The words that are mapped at `start`.
    ///
    /// # Errors
    /// There are too few words, or their address is not aligned.
    ///
    /// # Safety
    /// As for [`Control::from_raw`].
    pub unsafe fn words_at(start: *mut u8, length: usize) -> Result<&'m ControlWords, ControlError> {
        if length < CONTROL_BYTES || start.is_null() || !start.cast::<AtomicU64>().is_aligned() {
            return Err(ControlError::Short);
        }
        // SAFETY: not null, aligned and long enough by the check above; mapped for 'm by the caller's promise. Atomics may be
        // changed by other processes at any time.
        Ok(unsafe { &*start.cast::<ControlWords>() })
    }

    fn get(&self, at: usize) -> u64 {
        u64::from_le(self.words[at % WORDS].load(Ordering::SeqCst))
    }

    fn put(&self, at: usize, value: u64) {
        self.words[at % WORDS].store(value.to_le(), Ordering::SeqCst);
    }

    fn swap(&self, at: usize, old: u64, new: u64) -> bool {
        let (old, new) = (old.to_le(), new.to_le());
        self.words[at % WORDS].compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The owner of the page.
    #[must_use]
    pub fn rank(&self) -> u64 {
        self.get(AT_RANK)
    }

    /// The attempt whose shards are accepted.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.get(AT_EPOCH)
    }

    /// Starts another attempt. Called by the keeper.
    pub fn set_epoch(&self, epoch: u64) {
        self.put(AT_EPOCH, epoch);
    }

    /// The keeper's process.
    #[must_use]
    pub fn pool_owner(&self) -> u64 {
        self.get(AT_KEEPER_PID)
    }

    /// Shows that the keeper is alive, by a number that grows.
    pub fn beat(&self) {
        self.words[AT_KEEPER_BEAT].fetch_add(1_u64.to_le(), Ordering::SeqCst);
    }

    /// The number that grows while the keeper is alive.
    #[must_use]
    pub fn beats(&self) -> u64 {
        self.get(AT_KEEPER_BEAT)
    }

    /// Requests slots of `bytes` each. Called by the rank; the returned number is for [`Control::answer`].
    pub fn ask(&self, bytes: u64) -> u64 {
        self.put(AT_WANTED, bytes);
        let number = self.get(AT_ASKED).wrapping_add(1);
        self.put(AT_ASKED, number);
        number
    }

    /// The pending request and its number. Called by the keeper.
    #[must_use]
    pub fn asked(&self) -> Option<(u64, u64)> {
        let number = self.get(AT_ASKED);
        (number != self.get(AT_ANSWERED)).then(|| (number, self.get(AT_WANTED)))
    }

    /// Answers a request. Called by the keeper.
    pub fn give(&self, number: u64, answer: Answer) {
        let word = match answer {
            Answer::None => 0,
            Answer::Granted => 1,
            Answer::NoRoom => 2,
            Answer::Failed => 3,
        };
        self.put(AT_ANSWER, word);
        self.put(AT_ANSWERED, number);
    }

    /// The answer to the request with that number.
    #[must_use]
    pub fn answer(&self, number: u64) -> Answer {
        if self.get(AT_ANSWERED) != number {
            return Answer::None;
        }
        match self.get(AT_ANSWER) {
            1 => Answer::Granted,
            2 => Answer::NoRoom,
            _ => Answer::Failed,
        }
    }

    /// How many slots there are.
    #[must_use]
    pub fn slots(&self) -> usize {
        usize::try_from(self.get(AT_SLOTS)).unwrap_or(0).min(MAX_SLOTS)
    }

    /// Sets the number of slots. Called by the keeper after it has created their files.
    pub fn set_slots(&self, slots: usize) {
        self.put(AT_SLOTS, slots.min(MAX_SLOTS) as u64);
    }

    /// Whether the rank waits for a slot.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.get(AT_WAITING) != 0
    }

    /// Sets whether the rank waits for a slot.
    pub fn set_waits(&self, waits: bool) {
        self.put(AT_WAITING, u64::from(waits));
    }

    /// The newest whole step that was saved before the replicas last agreed: the step to return to if they turn out
    /// to differ.
    #[must_use]
    pub fn vouched(&self) -> Option<u64> {
        self.get(AT_VOUCHED).checked_sub(1)
    }

    /// Sets that step. Called by the keeper.
    pub fn set_vouched(&self, step: u64) {
        self.put(AT_VOUCHED, step.saturating_add(1));
    }

    fn base(index: usize) -> usize {
        SLOTS + (index % MAX_SLOTS) * SLOT_WORDS
    }

    /// A slot as it is now. Its fields belong together: they are read under its state.
    #[must_use]
    pub fn slot(&self, index: usize) -> Slot {
        let base = Self::base(index);
        let mut tries = 0;
        loop {
            let word = self.get(base + STATE);
            let slot = Slot {
                index,
                state: State::of(word),
                generation: word >> 8,
                file: self.get(base + FILE),
                capacity: self.get(base + CAPACITY),
                epoch: self.get(base + EPOCH),
                step: self.get(base + STEP),
                used: self.get(base + USED),
                world_size: self.get(base + SLOT_WORLD),
            };
            tries += 1;
            // A state that changed meanwhile is read again, up to a bound.
            if self.get(base + STATE) == word || tries > 1000 {
                return slot;
            }
        }
    }

    /// All slots there are.
    pub fn all(&self) -> impl Iterator<Item = Slot> + '_ {
        (0..self.slots()).map(|index| self.slot(index))
    }

    /// Whether the slot still has that generation and state.
    #[must_use]
    pub fn is_still(&self, slot: &Slot) -> bool {
        self.get(Self::base(slot.index) + STATE) == word(slot.generation, slot.state)
    }

    /// The position in the page and the value that a reader writes to pin a sealed slot until then, in milliseconds
    /// of the monotonic clock.
    #[must_use]
    pub fn pin(slot: &Slot, until_ms: u64) -> (u64, [u8; 8]) {
        let at = (Self::base(slot.index) + PINNED) * 8;
        (at as u64, ((until_ms << 8) | (slot.generation & 0xff)).to_le_bytes())
    }

    /// Whether a reader pins the slot now. Called by the keeper, which may ignore it.
    #[must_use]
    pub fn is_pinned(&self, slot: &Slot, now_ms: u64) -> bool {
        let word = self.get(Self::base(slot.index) + PINNED);
        let until = word >> 8;
        word & 0xff == slot.generation & 0xff && until > now_ms && until.saturating_sub(now_ms) <= MAX_PIN_MS
    }

    /// Moves a slot from one state to the next if it has not changed since it was read. Returns the new slot.
    #[must_use]
    pub fn advance(&self, before: &Slot, to: State) -> Option<Slot> {
        let generation = before.generation.wrapping_add(1) & (u64::MAX >> 8);
        let at = Self::base(before.index) + STATE;
        let done = self.swap(at, word(before.generation, before.state), word(generation, to));
        done.then_some(Slot { state: to, generation, ..*before })
    }

    /// Takes a free slot for a shard of this many bytes. Called by the rank.
    #[must_use]
    pub fn take(&self, bytes: u64, epoch: u64, step: u64, world_size: u64) -> Option<Slot> {
        let fits = |slot: &Slot| slot.state == State::Free && slot.capacity >= bytes;
        // Prefers the same slots: their pages are in the caches and in the rank's page tables.
        let free = self.all().find(fits)?;
        let taken = self.advance(&free, State::Filling)?;
        let base = Self::base(free.index);
        self.put(base + EPOCH, epoch);
        self.put(base + STEP, step);
        self.put(base + SLOT_WORLD, world_size);
        self.put(base + USED, 0);
        Some(Slot { epoch, step, world_size, used: 0, ..taken })
    }

    /// Marks the slot as holding the complete shard. Called by the rank. Returns the new slot; none if the keeper
    /// took it back meanwhile.
    #[must_use]
    pub fn fill(&self, taken: &Slot, used: u64) -> Option<Slot> {
        if !self.is_still(taken) {
            return None;
        }
        self.put(Self::base(taken.index) + USED, used);
        self.advance(&Slot { used, ..*taken }, State::Filled)
    }

    /// Gives a slot another file. Called by the keeper while no rank may take the slot.
    pub fn set_file(&self, index: usize, number: u64, capacity: u64) {
        self.put(Self::base(index) + FILE, number);
        self.put(Self::base(index) + CAPACITY, capacity);
    }

    fn mark(slot: &Slot, epoch: u64, verdict: u64) -> u64 {
        (slot.generation << 24) | ((epoch & 0x3f_ffff) << 2) | verdict
    }

    /// The check results of this attempt's readers for a sealed slot.
    #[must_use]
    pub fn checked(&self, slot: &Slot, epoch: u64) -> Checked {
        let reported = self.get(Self::base(slot.index) + CHECKED);
        if reported == Self::mark(slot, epoch, 1) {
            Checked::Good
        } else if reported == Self::mark(slot, epoch, 2) {
            Checked::Bad
        } else {
            Checked::No
        }
    }

    /// Publishes a check result to the other readers. Bad stays bad.
    pub fn report_checked(&self, slot: &Slot, epoch: u64, good: bool) {
        let at = Self::base(slot.index) + CHECKED;
        if self.checked(slot, epoch) != Checked::Bad {
            self.put(at, Self::mark(slot, epoch, if good { 1 } else { 2 }));
        }
    }

    /// Claims the check of a slot; false if another reader of this attempt has claimed it.
    #[must_use]
    pub fn begin_check(&self, slot: &Slot, epoch: u64) -> bool {
        let at = Self::base(slot.index) + CHECKING;
        let (seen, mine) = (self.get(at), Self::mark(slot, epoch, 3));
        seen != mine && self.swap(at, seen, mine)
    }
}

#[cfg(test)]
mod tests;

// A slot of a rank's memory, and the word by which rank and keeper agree on its state.

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
    fn of(word: u64) -> State {
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

    fn number(self) -> u64 {
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
fn word(generation: u64, state: State) -> u64 {
    (generation << 8) | state.number()
}

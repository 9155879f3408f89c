//! The client's side: the one process that writes the page.
//!
//! All of the writer's state is in the page itself, under a lock word in the page. So a process may hold several
//! copies of the client library (one in a Python extension, one in a C library) that share one page, and a claimant
//! that takes over from a dead process finds its state.
//!
//! Nothing here blocks: a taken lock is retried a bounded number of times, and then the beat is dropped and
//! counted.

use crate::beat::{self, shown, stack_at};
use crate::collective::{self, Collective};
use crate::data;
use crate::error::LayoutError;
use crate::layout::*;
use crate::lifeline;
use crate::note::{self, Note};
use crate::page::{Page, check};
use crate::record::record_at;
use crate::role;
use crate::save;
use crate::section::{self, SectionId};
use crate::total_steps;
use crate::words::{PageWords, Words};

/// How often the lock is tried before a beat is dropped: some microseconds, a hundred times what a beat takes.
const TRIES: usize = 200;

/// A page to write.
#[derive(Clone, Copy)]
pub struct Writer<'m> {
    words: Words<'m>,
}

/// The process that claims a page, and its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claiming<'a> {
    /// Its process id, as it sees itself.
    pub pid: u32,
    /// Field 22 of `/proc/self/stat`, or 0.
    pub start_ticks: u64,
    /// The inode of `/proc/self/ns/pid`, or 0.
    pub pid_namespace: u64,
    /// A number that all code of one program image shares and the next image of the same process (after `execve`) does
    /// not: the first word at `AT_RANDOM`, or 0.
    pub image: u64,
    /// The client library's version; its first [`VERSION_BYTES`] are kept.
    pub version: &'a str,
    /// The client library's language; its first [`LANGUAGE_BYTES`] are kept.
    pub language: &'a str,
}

impl Claiming<'_> {
    /// A number that is unique to this program image within the page's life, and never 0. Process ids are reused,
    /// and a process that executes another program keeps its id and its start.
    #[must_use]
    pub fn key(&self) -> u64 {
        // Process ids have at most 22 bits on Linux (PID_MAX_LIMIT).
        ((self.start_ticks << 22 | u64::from(self.pid)) ^ self.image).max(1)
    }
}

/// The values that can be reported with a step.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Measures {
    /// The loss; NaN is a value, which shows that the run diverged.
    pub loss: Option<f64>,
    /// The gradient norm.
    pub grad_norm: Option<f64>,
    /// A digest of the parameters, to compare between replicas.
    pub digest: Option<u64>,
}

/// A page whose lock is held; everything it does is one beat. Dropping it releases the lock.
pub struct Writing<'m> {
    words: Words<'m>,
}

impl<'m> Writer<'m> {
    /// Writes into these words.
    ///
    /// # Errors
    /// When they do not hold a page of this major version.
    pub fn new(words: &'m PageWords) -> Result<Self, LayoutError> {
        check(Words(words))?;
        Ok(Self { words: Words(words) })
    }

    /// The same page, to read.
    #[must_use]
    pub fn page(&self) -> Page<'m> {
        Page { words: self.words }
    }

    /// Claims the page for this process, or joins this process's own claim.
    ///
    /// The caller has made sure that no other living process writes the page, so a lock held under another key is a
    /// dead process's and is taken over. Returns false, with nothing changed, if this process's own lock stays taken.
    #[must_use]
    pub fn claim(&self, now_ns: u64, who: &Claiming<'_>) -> bool {
        let Some(mut writing) = self.lock_for_claim(who.key()) else { return false };
        if !self.is_claimed_by(who) {
            writing.claim(now_ns, who);
        }
        true
    }

    /// Whether a lock may be set up as this claim's lifeline: there is room, and no copy of the client did so
    /// before.
    #[must_use]
    pub fn wants_lifeline(&self) -> bool {
        lifeline::has_room(self.words) && self.words.load(LIFELINE_WORD) == 0
    }

    /// Records the lifeline: the claimant's first thread holds the lock in the room at
    /// [`LIFELINE`](crate::layout::LIFELINE), whose word is at this offset in the page.
    pub fn lay_lifeline(&self, word_at: usize) {
        lifeline::lay(self.words, word_at);
    }

    /// Whether the page is claimed by exactly this process.
    fn is_claimed_by(&self, who: &Claiming<'_>) -> bool {
        self.words.load_acquire(CLAIM_STATE) == claim_state::CLAIMED && was_claimed_by(self.words, who)
    }

    fn lock_for_claim(&self, key: u64) -> Option<Writing<'m>> {
        let mut expected = 0;
        for _ in 0..TRIES {
            match self.words.exchange(LOCK, expected, key) {
                Ok(()) => return Some(Writing { words: self.words }),
                Err(held) if held == key => expected = 0,
                Err(held) => expected = held,
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Takes the page for one beat under the claimant's [key](Claiming::key); `None`, counted as skipped, if
    /// another thread holds it.
    #[inline]
    #[must_use]
    pub fn try_write(&self, key: u64) -> Option<Writing<'m>> {
        self.try_once(key).or_else(|| self.try_again(key))
    }

    /// Takes the page under the claimant's key if no other thread holds it at this instant; a failure is not
    /// counted.
    #[inline]
    #[must_use]
    pub fn try_once(&self, key: u64) -> Option<Writing<'m>> {
        self.words.exchange(LOCK, 0, key).is_ok().then(|| Writing { words: self.words })
    }

    #[cold]
    fn try_again(&self, key: u64) -> Option<Writing<'m>> {
        for _ in 0..TRIES {
            std::hint::spin_loop();
            if self.words.load(LOCK) == 0
                && let Some(writing) = self.try_once(key)
            {
                return Some(writing);
            }
        }
        self.words.count_one(SKIPPED);
        None
    }

    /// The id of a section's name if the page has it; takes no lock.
    #[must_use]
    pub fn find_section(&self, name: &str) -> Option<SectionId> {
        section::find(self.words, name)
    }

    /// Records that this rank polls for requests to save. Takes no lock.
    pub fn listen_for_saves(&self) {
        save::listen(self.words);
    }

    /// Records the rank's current position in its data. Takes no lock: it is one word.
    #[inline]
    pub fn data_at(&self, position: u64) {
        data::report(self.words, position);
    }

    /// Records the number of steps after which the program ends; 0 is unknown. Takes no lock: it is one word.
    pub fn total_steps(&self, steps: u64) {
        total_steps::report(self.words, steps);
    }

    /// Leaves an exit note, unless this claim has left one; returns whether it did. Takes no lock.
    pub fn exit_note(&self, now_ns: u64, note: &Note<'_>) -> bool {
        note::write(self.words, now_ns, note)
    }

    /// What the doorbell word should be set to next.
    #[must_use]
    pub fn next_ring(&self) -> u64 {
        self.words.load(DOORBELL).wrapping_add(1)
    }
}

/// Whether this process was the last to claim the page, even if it has closed it.
fn was_claimed_by(words: Words<'_>, who: &Claiming<'_>) -> bool {
    words.load(PID) == u64::from(who.pid)
        && words.load(START_TICKS) == who.start_ticks
        && words.load(PID_NAMESPACE) == who.pid_namespace
        && words.load(IMAGE) == who.image
}

impl Writing<'_> {
    fn claim(&mut self, now_ns: u64, who: &Claiming<'_>) {
        let words = self.words;
        let again = was_claimed_by(words, who);
        words.store(CLAIM_STATE, claim_state::CLAIMING);
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
        let claims = words.load(CLAIMS).wrapping_add(1);
        words.store(CLAIMS, claims);
        words.store(PID, who.pid.into());
        words.store(START_TICKS, who.start_ticks);
        words.store(PID_NAMESPACE, who.pid_namespace);
        words.store(IMAGE, who.image);
        words.store_padded(VERSION, VERSION_BYTES, who.version);
        words.store_padded(LANGUAGE, LANGUAGE_BYTES, who.language);
        if !again {
            lifeline::forget(words);
        }
        self.restart_page(now_ns, claims);
        words.store_release(CLAIM_STATE, claim_state::CLAIMED);
    }

    /// The claimant starts again in the same process with a new claim, as if it had just claimed the page: nothing
    /// reported before counts any more. Earlier steps stay in the ring under the previous claim.
    pub fn begin_round(&mut self, now_ns: u64) {
        let words = self.words;
        words.store(CLAIM_STATE, claim_state::CLAIMING);
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
        let claims = words.load(CLAIMS).wrapping_add(1);
        words.store(CLAIMS, claims);
        self.restart_page(now_ns, claims);
        words.store_release(CLAIM_STATE, claim_state::CLAIMED);
    }

    fn restart_page(&mut self, now_ns: u64, claims: u64) {
        let words = self.words;
        words.store(CLAIMED_NS, now_ns);
        words.store(CLOSED_NS, 0);
        for counter in [SKIPPED, UNMATCHED_LEAVES, NAMES_REFUSED, COLLECTIVES_REFUSED, COLLECTIVE_COUNT] {
            words.store(counter, 0);
        }
        // In a page of an older minor this word is reserved and zero.
        if words.load(SAVE_LISTENS) != 0 {
            words.store(SAVE_LISTENS, 0);
        }
        role::forget(words);
        data::forget(words);
        total_steps::forget(words);
        words.store(NOTE_STATE, note_state::NONE);
        for field in (0..SLOT_BYTES).step_by(WORD) {
            words.store(DRAFT + field, 0);
        }
        words.store(DRAFT + slot::CLAIM, claims);
        words.store(PUBLISHED, beat::newest_number(words));
        if words.load(RING_HEAD) > BEYOND_COUNTING {
            words.store(RING_HEAD, 0);
        }
        words.store(STEP_START_NS, now_ns);
        words.store(SPENT_COUNT, 0);
        words.store(SPENT_FLAGS, given::FIRST);
    }

    /// Alive; nothing else has changed.
    #[inline]
    pub fn beat(&mut self, now_ns: u64) {
        let words = self.words;
        words.store(DRAFT + slot::COUNT, words.load(DRAFT + slot::COUNT).wrapping_add(1));
        words.store(DRAFT + slot::BEAT_NS, now_ns);
        beat::publish(words);
    }

    /// Step `step` is complete.
    #[inline]
    pub fn step(&mut self, now_ns: u64, step: u64, measures: Measures) {
        self.complete(now_ns, step, measures, 0);
    }

    /// As [`step`](Self::step), for a step without a number from the trainer: a hook counts them, from 0 in each
    /// process.
    #[inline]
    pub fn counted_step(&mut self, now_ns: u64, step: u64, measures: Measures) {
        self.complete(now_ns, step, measures, given::COUNTED);
    }

    #[inline(always)]
    fn complete(&mut self, now_ns: u64, step: u64, measures: Measures, mark: u64) {
        let words = self.words;
        for level in 0..shown(words.load(DRAFT + slot::DEPTH)) {
            self.charge(level, now_ns);
        }
        self.record_step(now_ns, step, measures, mark);
        words.store(STEP_START_NS, now_ns);
        words.store(SPENT_COUNT, 0);
        words.store(SPENT_FLAGS, self.too_deep());

        let mut flags = words.load(DRAFT + slot::FLAGS) | given::STEP;
        words.store(DRAFT + slot::STEP, step);
        words.store(DRAFT + slot::STEP_NS, now_ns);
        if let Some(loss) = measures.loss {
            flags |= given::LOSS;
            words.store(DRAFT + slot::LOSS, loss.to_bits());
        }
        if let Some(grad_norm) = measures.grad_norm {
            flags |= given::GRAD_NORM;
            words.store(DRAFT + slot::GRAD_NORM, grad_norm.to_bits());
        }
        if let Some(digest) = measures.digest {
            flags |= given::DIGEST;
            words.store(DRAFT + slot::DIGEST, digest);
        }
        words.store(DRAFT + slot::FLAGS, flags);
        self.beat(now_ns);
    }

    #[inline]
    fn record_step(&mut self, now_ns: u64, step: u64, measures: Measures, mark: u64) {
        let words = self.words;
        let number = words.load(RING_HEAD).wrapping_add(1);
        let at = record_at(number);
        let listed = words.load(SPENT_COUNT).min(RECORD_SECTIONS as u64);
        let mut flags = words.load(SPENT_FLAGS) | mark | listed << 8 | words.load(DRAFT + slot::CLAIM) << 32;
        words.begin(at + record::SEQUENCE, number.wrapping_mul(2).wrapping_sub(1));
        words.store(at + record::STEP, step);
        words.store(at + record::START_NS, words.load(STEP_START_NS));
        words.store(at + record::END_NS, now_ns);
        if let Some(loss) = measures.loss {
            flags |= given::LOSS;
            words.store(at + record::LOSS, loss.to_bits());
        }
        if let Some(grad_norm) = measures.grad_norm {
            flags |= given::GRAD_NORM;
            words.store(at + record::GRAD_NORM, grad_norm.to_bits());
        }
        if let Some(digest) = measures.digest {
            flags |= given::DIGEST;
            words.store(at + record::DIGEST, digest);
        }
        words.store(at + record::FLAGS, flags);
        for index in 0..listed as usize {
            words.store(at + record::SECTIONS + index * WORD, words.load(SPENT + index * WORD));
        }
        words.store_release(at + record::SEQUENCE, number.wrapping_mul(2));
        words.store_release(RING_HEAD, number);
    }

    /// Section `id` starts.
    #[inline]
    pub fn enter(&mut self, now_ns: u64, id: SectionId) {
        let words = self.words;
        let depth = words.load(DRAFT + slot::DEPTH);
        if depth < SECTION_DEPTH as u64 {
            let (id_at, start_at) = stack_at(DRAFT, depth as usize);
            words.store(id_at, id.get().into());
            words.store(start_at, now_ns);
        }
        words.store(DRAFT + slot::DEPTH, depth.saturating_add(1));
        words.store(SPENT_FLAGS, words.load(SPENT_FLAGS) | self.too_deep());
        self.beat(now_ns);
    }

    /// Section `id` ends, and with it any sections that were entered after it and not left. An id that is not open
    /// is ignored and counted.
    #[inline]
    pub fn leave(&mut self, now_ns: u64, id: SectionId) {
        let words = self.words;
        let depth = words.load(DRAFT + slot::DEPTH);
        if depth > SECTION_DEPTH as u64 {
            // Too deep to have a name: assumed to be the innermost.
            words.store(DRAFT + slot::DEPTH, depth - 1);
            return self.beat(now_ns);
        }
        let level = (0..shown(depth)).rev().find(|&level| self.id_at(level) == u64::from(id.get()));
        if let Some(level) = level {
            for ended in (level..shown(depth)).rev() {
                self.charge(ended, now_ns);
            }
            words.store(DRAFT + slot::DEPTH, level as u64);
        } else {
            words.count_one(UNMATCHED_LEAVES);
        }
        self.beat(now_ns);
    }

    /// The id of a section's name, added if it is new; [`SectionId::OTHER`], and counted, when the table is full.
    pub fn intern(&mut self, name: &str) -> SectionId {
        section::add(self.words, name).unwrap_or_else(|| {
            self.words.count_one(NAMES_REFUSED);
            SectionId::OTHER
        })
    }

    /// No progress is expected before `until_ns`: 0 withdraws it, [`u64::MAX`] is an unlimited pause. Returns
    /// whether the page can hold it: a page of minor 0 cannot.
    pub fn quiet_until(&mut self, now_ns: u64, until_ns: u64) -> bool {
        if self.words.load(MINOR_AT) < 1 {
            return false;
        }
        self.words.store(DRAFT + slot::QUIET_UNTIL_NS, until_ns);
        self.beat(now_ns);
        true
    }

    /// Stores the role of this rank in its job. Not a beat. Returns whether the page can hold it: a page of a minor
    /// below 3 cannot.
    pub fn role(&mut self, name: &str, stage: Option<u32>) -> bool {
        role::write(self.words, name, stage)
    }

    /// A communicator has entered and completed this many operations. Not a beat: it may come from a thread that
    /// makes progress while the training loop does not.
    pub fn collective(&mut self, comm: u64, entered: u64, completed: u64) {
        self.collective_with(Collective { comm, entered, completed, signature: 0 });
    }

    /// As [`collective`](Self::collective), with a description of the operation entered last.
    pub fn collective_with(&mut self, value: Collective) {
        if !collective::write(self.words, value) {
            self.words.count_one(COLLECTIVES_REFUSED);
        }
    }

    /// Section `id` took `ns` more of the current step than its enter and leave calls show: time spent elsewhere,
    /// on a device. Not a beat.
    pub fn spend(&mut self, id: SectionId, ns: u64) {
        self.add_spent(id.get().into(), ns);
    }

    /// The client is done with the page.
    pub fn close(&mut self, now_ns: u64) {
        self.words.store(CLOSED_NS, now_ns);
        self.words.store_release(CLAIM_STATE, claim_state::CLOSED);
    }

    fn id_at(&self, level: usize) -> u64 {
        self.words.load(stack_at(DRAFT, level).0)
    }

    fn too_deep(&self) -> u64 {
        if self.words.load(DRAFT + slot::DEPTH) > SECTION_DEPTH as u64 { given::OVERFLOW } else { 0 }
    }

    /// Adds the time that the section at `level` took of the current step.
    fn charge(&mut self, level: usize, now_ns: u64) {
        let words = self.words;
        let (id_at, start_at) = stack_at(DRAFT, level);
        let id = words.load(id_at);
        // A section open inside itself is charged once, by its outermost entry.
        if (0..level).any(|outer| self.id_at(outer) == id) {
            return;
        }
        self.add_spent(id, now_ns.saturating_sub(words.load(start_at).max(words.load(STEP_START_NS))));
    }

    fn add_spent(&mut self, id: u64, ns: u64) {
        let words = self.words;
        let listed = words.load(SPENT_COUNT).min(RECORD_SECTIONS as u64) as usize;
        let known = (0..listed).map(|index| SPENT + index * WORD).find(|&at| words.load(at) >> 56 == id);
        if let Some(at) = known {
            let spent = (words.load(at) & SPENT_NS_MASK).saturating_add(ns).min(SPENT_NS_MASK);
            words.store(at, id << 56 | spent);
        } else if listed < RECORD_SECTIONS {
            words.store(SPENT + listed * WORD, id << 56 | ns.min(SPENT_NS_MASK));
            words.store(SPENT_COUNT, listed as u64 + 1);
        } else {
            words.store(SPENT_FLAGS, words.load(SPENT_FLAGS) | given::OVERFLOW);
        }
    }
}

impl Drop for Writing<'_> {
    #[inline]
    fn drop(&mut self) {
        self.words.store_release(LOCK, 0);
    }
}

impl std::fmt::Debug for Writer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Writing<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writing").finish_non_exhaustive()
    }
}

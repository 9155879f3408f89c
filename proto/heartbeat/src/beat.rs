//! The last beat: two slots, written in turn, each under its own sequence word.
//!
//! Beat number n goes into slot n mod 2. Its sequence is 2n-1 while it is being written and 2n once it is whole, so at
//! every instant at least one slot that was ever whole still is.

use crate::layout::*;
use crate::page::{ATTEMPTS, Page};
use crate::section::SectionId;
use crate::words::Words;

/// The newest whole beat.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Beat {
    /// Which claim it belongs to: compare with [`crate::Claimant::claims`].
    pub claim: u64,
    /// Beats of this claim so far, this one included; any call of the client that moves something is a beat.
    pub count: u64,
    /// When this beat was made, `CLOCK_MONOTONIC` in ns.
    pub mono_ns: u64,
    /// The step completed last, if this claim has completed one.
    pub step: Option<u64>,
    /// When that step was completed, `CLOCK_MONOTONIC` in ns.
    pub step_mono_ns: Option<u64>,
    /// The loss given last; it may be NaN, which is a fact about the run and not an absence.
    pub loss: Option<f64>,
    /// The gradient norm given last.
    pub grad_norm: Option<f64>,
    /// The parameter digest given last.
    pub digest: Option<u64>,
    /// Until when the rank expects to make no progress, `CLOCK_MONOTONIC` in ns: 0 for no such announcement,
    /// [`u64::MAX`] for an unlimited pause.
    pub quiet_until_ns: u64,
    /// How many sections are open; more than [`SECTION_DEPTH`] when some are nested too deep to be shown.
    pub depth: u64,
    open: [OpenSection; SECTION_DEPTH],
}

/// A section that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct OpenSection {
    /// The section.
    pub id: SectionId,
    /// When it was entered, `CLOCK_MONOTONIC` in ns.
    pub start_mono_ns: u64,
}

impl Beat {
    /// The open sections, outermost first.
    #[must_use]
    pub fn open_sections(&self) -> &[OpenSection] {
        &self.open[..shown(self.depth)]
    }
}

impl Page<'_> {
    /// The newest whole beat; `None` before the first one.
    ///
    /// A beat outlives its process, and stays until the next claimant's first one: compare [`Beat::claim`].
    #[must_use]
    pub fn beat(&self) -> Option<Beat> {
        for _ in 0..ATTEMPTS {
            let sequences = [0, 1].map(|index| self.words.load_acquire(slot_at(index) + slot::SEQUENCE));
            let newest = (0..SLOT_COUNT as u64)
                .filter(|&index| is_whole(sequences[index as usize]))
                .max_by_key(|&index| sequences[index as usize]);
            let Some(index) = newest else {
                if sequences == [0, 0] {
                    return None;
                }
                std::hint::spin_loop();
                continue;
            };
            let at = slot_at(index);
            let beat = self.words.read_under(at, sequences[index as usize], || read(self.words, at));
            if beat.is_some() {
                return beat;
            }
        }
        None
    }
}

fn is_whole(sequence: u64) -> bool {
    sequence != 0 && sequence.is_multiple_of(2)
}

fn read(words: Words<'_>, at: usize) -> Beat {
    let flags = words.load(at + slot::FLAGS);
    let given = |flag: u64, field: usize| (flags & flag != 0).then(|| words.load(at + field));
    let depth = words.load(at + slot::DEPTH);
    let mut open = [OpenSection::default(); SECTION_DEPTH];
    for (level, section) in open.iter_mut().enumerate().take(shown(depth)) {
        let (id, start) = stack_at(at, level);
        *section = OpenSection { id: SectionId::new(words.load(id)), start_mono_ns: words.load(start) };
    }
    Beat {
        claim: words.load(at + slot::CLAIM),
        count: words.load(at + slot::COUNT),
        mono_ns: words.load(at + slot::BEAT_NS),
        step: given(given::STEP, slot::STEP),
        step_mono_ns: given(given::STEP, slot::STEP_NS),
        loss: given(given::LOSS, slot::LOSS).map(f64::from_bits),
        grad_norm: given(given::GRAD_NORM, slot::GRAD_NORM).map(f64::from_bits),
        digest: given(given::DIGEST, slot::DIGEST),
        // A minor that does not know the word leaves it zero.
        quiet_until_ns: words.load(at + slot::QUIET_UNTIL_NS),
        depth,
        open,
    }
}

/// Publishes the draft as the next beat. The caller holds the page's lock.
#[inline]
pub(crate) fn publish(words: Words<'_>) {
    let number = words.load(PUBLISHED).wrapping_add(1);
    let at = slot_at(number);
    words.begin(at + slot::SEQUENCE, number.wrapping_mul(2).wrapping_sub(1));
    for field in (slot::CLAIM..=slot::QUIET_UNTIL_NS).step_by(WORD) {
        words.store(at + field, words.load(DRAFT + field));
    }
    for level in 0..shown(words.load(DRAFT + slot::DEPTH)) {
        let ((from_id, from_start), (to_id, to_start)) = (stack_at(DRAFT, level), stack_at(at, level));
        words.store(to_id, words.load(from_id));
        words.store(to_start, words.load(from_start));
    }
    words.store_release(at + slot::SEQUENCE, number.wrapping_mul(2));
    words.store(PUBLISHED, number);
}

/// The number of the newest whole beat. A new claimant continues from it, so that no number is used twice.
/// Impossibly large numbers are cleared, or the next ones would wrap and look old.
pub(crate) fn newest_number(words: Words<'_>) -> u64 {
    let mut newest = 0;
    for at in [0, 1].map(slot_at) {
        let sequence = words.load(at + slot::SEQUENCE);
        if sequence > BEYOND_COUNTING {
            words.store(at + slot::SEQUENCE, 0);
        } else if is_whole(sequence) {
            newest = newest.max(sequence / 2);
        }
    }
    newest
}

#[inline(always)]
fn slot_at(number: u64) -> usize {
    SLOTS + (number % SLOT_COUNT as u64) as usize * SLOT_BYTES
}

/// Where level `level` of the stack in the slot (or draft) at `at` keeps its id and its start.
#[inline(always)]
pub(crate) fn stack_at(at: usize, level: usize) -> (usize, usize) {
    let pair = at + slot::STACK + (level % SECTION_DEPTH) * 2 * WORD;
    (pair, pair + WORD)
}

/// How many of `depth` open sections the page can show.
#[inline(always)]
pub(crate) fn shown(depth: u64) -> usize {
    depth.min(SECTION_DEPTH as u64) as usize
}

//! The ring of step records: how long each of the last steps took, and where the time went.
//!
//! Record number k (from 1) goes into entry (k-1) mod 512, under its own sequence word as beats do; then the head
//! becomes k. A reader keeps the last number it has seen and learns which records it missed.

use crate::layout::*;
use crate::page::Page;
use crate::section::SectionId;
use crate::words::Words;

/// One completed step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepRecord {
    /// The record's number, from 1, over the page's whole life.
    pub number: u64,
    /// The claim it belongs to (its lower 32 bits).
    pub claim: u32,
    /// The step.
    pub step: u64,
    /// When it started: the end of the previous step, or the claim if it is the [`first`](Self::first).
    pub start_mono_ns: u64,
    /// When it was complete.
    pub end_mono_ns: u64,
    /// Whether it is the first of its claim, and so includes imports and setup.
    pub first: bool,
    /// Whether a hook counted it, from 0 in each process, because the trainer reports no number.
    pub counted: bool,
    /// Its loss, if given; NaN is a value.
    pub loss: Option<f64>,
    /// Its gradient norm, if given.
    pub grad_norm: Option<f64>,
    /// Its parameter digest, if given.
    pub digest: Option<u64>,
    /// Whether more sections took time than are listed.
    pub overflow: bool,
    listed: u8,
    spent: [SectionTime; RECORD_SECTIONS],
}

/// The time one section took within one step, sections nested in it included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SectionTime {
    /// The section.
    pub id: SectionId,
    /// Nanoseconds.
    pub ns: u64,
}

/// A reader's position after draining the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// What to pass next time.
    pub next_cursor: u64,
    /// Records that were overwritten before they could be read.
    pub missed: u64,
}

impl StepRecord {
    /// Where the time went, in order of first appearance.
    #[must_use]
    pub fn sections(&self) -> &[SectionTime] {
        &self.spent[..usize::from(self.listed).min(RECORD_SECTIONS)]
    }
}

impl Page<'_> {
    /// Appends the records after `cursor` (0 for all there are) to `out`, oldest first; at most 512.
    pub fn records_since(&self, cursor: u64, out: &mut Vec<StepRecord>) -> Drained {
        let head = self.words.load_acquire(RING_HEAD);
        if cursor >= head {
            return Drained { next_cursor: head, missed: 0 };
        }
        let first = (head.saturating_sub(RING_RECORDS as u64 - 1)).max(cursor + 1);
        let mut missed = first - (cursor + 1);
        // By count rather than by a range of numbers: a head of u64::MAX must not make the loop endless.
        for ahead in 0..=(head - first) {
            match read(self.words, first + ahead) {
                Some(record) => out.push(record),
                None => missed += 1,
            }
        }
        Drained { next_cursor: head, missed }
    }
}

fn read(words: Words<'_>, number: u64) -> Option<StepRecord> {
    let at = record_at(number);
    words.read_under(at + record::SEQUENCE, number.wrapping_mul(2), || {
        let flags = words.load(at + record::FLAGS);
        let given = |flag: u64, field: usize| (flags & flag != 0).then(|| words.load(at + field));
        let mut spent = [SectionTime::default(); RECORD_SECTIONS];
        for (index, section) in spent.iter_mut().enumerate() {
            let word = words.load(at + record::SECTIONS + index * WORD);
            *section = SectionTime { id: SectionId::new(word >> 56), ns: word & SPENT_NS_MASK };
        }
        StepRecord {
            number,
            claim: (flags >> 32) as u32,
            step: words.load(at + record::STEP),
            start_mono_ns: words.load(at + record::START_NS),
            end_mono_ns: words.load(at + record::END_NS),
            first: flags & given::FIRST != 0,
            counted: flags & given::COUNTED != 0,
            loss: given(given::LOSS, record::LOSS).map(f64::from_bits),
            grad_norm: given(given::GRAD_NORM, record::GRAD_NORM).map(f64::from_bits),
            digest: given(given::DIGEST, record::DIGEST),
            overflow: flags & given::OVERFLOW != 0,
            listed: (flags >> 8) as u8,
            spent,
        }
    })
}

#[inline(always)]
pub(crate) fn record_at(number: u64) -> usize {
    RING + (number.wrapping_sub(1) % RING_RECORDS as u64) as usize * RECORD_BYTES
}

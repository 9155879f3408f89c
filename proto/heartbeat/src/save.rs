//! The launcher's requests to save: "save now", because the ranks must end soon, and the step after which a save is
//! due by the costs of the job's saves and failures. The rank polls; no message is sent to it.

use std::io;

use crate::layout::*;
use crate::page::Page;
use crate::words::Words;

/// The first minor whose page can hold a request.
const SINCE_MINOR: u64 = 2;

/// The first minor whose page can hold the step after which a save is due.
const DUE_SINCE_MINOR: u64 = 5;

/// Writes into a page's file with `put`, which takes an offset and bytes, that a save is due after `step`.
///
/// # Errors
/// What `put` returns.
pub fn write_save_due(step: u64, mut put: impl FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
    // The step plus one, so that 0 means none. It is one word, so it is never half written.
    put(SAVE_DUE as u64, &step.saturating_add(1).to_le_bytes())
}

/// A request to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SaveRequest {
    /// The step after which all ranks save, so that they save the same step; none for as soon as they see the
    /// request.
    pub at_step: Option<u64>,
    /// When they are forced to end, `CLOCK_MONOTONIC` in ns.
    pub by_ns: u64,
}

impl SaveRequest {
    /// Writes the request into a page's file with `put`, which takes an offset and bytes: first its content, then
    /// the flag that there is one.
    ///
    /// # Errors
    /// What `put` returns.
    pub fn write(&self, mut put: impl FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
        // The step plus one, so that 0 means none.
        let step = self.at_step.map_or(0, |step| step.saturating_add(1));
        put(SAVE_AT_STEP as u64, &step.to_le_bytes())?;
        put(SAVE_BY_NS as u64, &self.by_ns.to_le_bytes())?;
        put(SAVE_REQUEST as u64, &1_u64.to_le_bytes())
    }
}

impl Page<'_> {
    /// The current request to the rank, if any.
    #[inline]
    #[must_use]
    pub fn save_request(&self) -> Option<SaveRequest> {
        if self.words.load_acquire(SAVE_REQUEST) == 0 || !knows_saves(self.words) {
            return None;
        }
        let step = self.words.load(SAVE_AT_STEP);
        Some(SaveRequest { at_step: step.checked_sub(1), by_ns: self.words.load(SAVE_BY_NS) })
    }

    /// The step after which the launcher last reported that a save is due.
    #[inline]
    #[must_use]
    pub fn save_due(&self) -> Option<u64> {
        if self.words.load(MINOR_AT) < DUE_SINCE_MINOR {
            return None;
        }
        self.words.load(SAVE_DUE).checked_sub(1)
    }

    /// Whether the rank polls for requests; if not, the launcher does not wait for it.
    #[must_use]
    pub fn listens_for_saves(&self) -> bool {
        self.words.load(SAVE_LISTENS) != 0
    }
}

/// Records that this rank polls for requests. Takes no lock: it is only ever set.
pub(crate) fn listen(words: Words<'_>) {
    if words.load(SAVE_LISTENS) == 0 && knows_saves(words) {
        words.store(SAVE_LISTENS, 1);
    }
}

fn knows_saves(words: Words<'_>) -> bool {
    words.load(MINOR_AT) >= SINCE_MINOR
}

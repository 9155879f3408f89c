//! The reader's side: a page as seen by everyone but its client.

use crate::error::LayoutError;
use crate::layout::*;
use crate::words::{PageWords, Words};

/// How often a read is retried while the writer changes the data. A beat takes the writer tens of nanoseconds, so a
/// few tries suffice; the bound is for corrupt pages.
pub(crate) const ATTEMPTS: usize = 1000;

/// A page to read. No method panics, waits, or allocates more than the page itself holds, even if the bytes are
/// corrupt.
#[derive(Clone, Copy)]
pub struct Page<'m> {
    pub(crate) words: Words<'m>,
}

/// Problems of this claim that the client counts and does not report, so as not to stop training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Beats dropped because another thread was writing.
    pub skipped: u64,
    /// Sections left that were not open.
    pub unmatched_leaves: u64,
    /// Names that found the table full; their sections are counted as `other`.
    pub names_refused: u64,
    /// Updates of communicators that found no room.
    pub collectives_refused: u64,
}

impl<'m> Page<'m> {
    /// Reads the page in these words.
    ///
    /// # Errors
    /// When they do not hold a page of this major version.
    pub fn new(words: &'m PageWords) -> Result<Self, LayoutError> {
        check(Words(words))?;
        Ok(Self { words: Words(words) })
    }

    /// The problems that the client has counted.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters {
            skipped: self.words.load(SKIPPED),
            unmatched_leaves: self.words.load(UNMATCHED_LEAVES),
            names_refused: self.words.load(NAMES_REFUSED),
            collectives_refused: self.words.load(COLLECTIVES_REFUSED),
        }
    }
}

impl std::fmt::Debug for Page<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Page").field("identity", &self.identity()).finish_non_exhaustive()
    }
}

/// The checks that must pass before any other field is used.
pub(crate) fn check(words: Words<'_>) -> Result<(), LayoutError> {
    let found = words.load_acquire(MAGIC_AT);
    if found != MAGIC {
        return Err(LayoutError::Magic { found });
    }
    let (major, minor) = (words.load(MAJOR_AT), words.load(MINOR_AT));
    if major != u64::from(MAJOR) {
        return Err(LayoutError::Major { major, minor });
    }
    let found = words.load(PAGE_BYTES_AT);
    if found != PAGE_BYTES as u64 {
        return Err(LayoutError::PageBytes { found });
    }
    Ok(())
}

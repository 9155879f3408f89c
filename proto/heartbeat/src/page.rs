//! The reader's side: a page as anyone but its client sees it.

use crate::error::LayoutError;
use crate::layout::*;
use crate::words::{PageWords, Words};

/// How often a read is tried again while the writer changes what is being read. A beat takes the writer tens of
/// nanoseconds, so a handful would do; the bound is there for pages whose content lies.
pub(crate) const ATTEMPTS: usize = 1000;

/// A page to read. Whatever its bytes are, no method panics, waits, or allocates more than the page itself holds.
#[derive(Clone, Copy)]
pub struct Page<'m> {
    pub(crate) words: Words<'m>,
}

/// What went wrong for this claim, quietly, rather than hold up training.
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

    /// What went wrong, quietly.
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

/// The checks that come before anything else is believed.
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

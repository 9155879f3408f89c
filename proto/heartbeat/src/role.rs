//! What a rank is in its job: ranks of one role and stage do the same work, and are compared with each other.

use crate::layout::*;
use crate::page::{ATTEMPTS, Page};
use crate::words::Words;

/// Since this minor the page can hold it.
const SINCE_MINOR: u64 = 3;

/// Set in the word of the stage once a role is told.
const TOLD: u64 = 1 << 63;

/// What a rank says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Role {
    /// Any text; empty if there is but one role. Its first [`ROLE_BYTES`] are kept.
    pub name: String,
    /// Its pipeline stage, where there are any.
    pub stage: Option<u32>,
}

impl Page<'_> {
    /// What the claimant said it is, if it did.
    #[must_use]
    pub fn role(&self) -> Option<Role> {
        for _ in 0..ATTEMPTS {
            let word = self.words.load_acquire(STAGE);
            if word & TOLD == 0 {
                return None;
            }
            let name = self.words.load_padded(ROLE, ROLE_BYTES);
            std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
            if self.words.load(STAGE) == word {
                return Some(Role { name, stage: (word as u32).checked_sub(1) });
            }
        }
        None
    }
}

/// Tells it; the caller holds the page's lock. Says whether the page can hold it.
pub(crate) fn write(words: Words<'_>, name: &str, stage: Option<u32>) -> bool {
    if words.load(MINOR_AT) < SINCE_MINOR {
        return false;
    }
    words.store(STAGE, 0);
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    words.store_padded(ROLE, ROLE_BYTES, name);
    // A stage of 2^32-1 has no number above it; nobody has so many.
    words.store_release(STAGE, TOLD | u64::from(stage.map_or(0, |stage| stage.saturating_add(1))));
    true
}

/// A new claimant has told nothing yet. In a page of an older minor the word is a reserved one, which is zero.
pub(crate) fn forget(words: Words<'_>) {
    if words.load(STAGE) != 0 {
        words.store(STAGE, 0);
    }
}

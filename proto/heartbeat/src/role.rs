//! The role of a rank in its job: ranks of one role and stage do the same work and are compared with each other.

use crate::layout::*;
use crate::page::{ATTEMPTS, Page};
use crate::words::Words;

/// The first minor with this field.
const SINCE_MINOR: u64 = 3;

/// Set in the word of the stage once a role is set.
const IS_SET: u64 = 1 << 63;

/// The role that a rank reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Role {
    /// Any text; empty if there is only one role. Its first [`ROLE_BYTES`] are kept.
    pub name: String,
    /// Its pipeline stage, where there are any.
    pub stage: Option<u32>,
}

impl Page<'_> {
    /// The role that the claimant reported, if it did.
    #[must_use]
    pub fn role(&self) -> Option<Role> {
        for _ in 0..ATTEMPTS {
            let word = self.words.load_acquire(STAGE);
            if word & IS_SET == 0 {
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

/// Stores the role; the caller holds the page's lock. Returns whether the page can hold it.
pub(crate) fn write(words: Words<'_>, name: &str, stage: Option<u32>) -> bool {
    if words.load(MINOR_AT) < SINCE_MINOR {
        return false;
    }
    words.store(STAGE, 0);
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    words.store_padded(ROLE, ROLE_BYTES, name);
    // Saturates: a stage of 2^32-1 has no number above it, and no job has so many.
    words.store_release(STAGE, IS_SET | u64::from(stage.map_or(0, |stage| stage.saturating_add(1))));
    true
}

/// Clears the role for a new claimant. In a page of an older minor the word is reserved and zero.
pub(crate) fn forget(words: Words<'_>) {
    if words.load(STAGE) != 0 {
        words.store(STAGE, 0);
    }
}

//! From a mapping to words: the only unsafe code in this crate.

use std::sync::atomic::AtomicU64;

use crate::error::LayoutError;
use crate::layout::PAGE_BYTES;
use crate::page::Page;
use crate::words::PageWords;
use crate::writer::Writer;

/// Sees a mapping as atomic words.
///
/// # Safety
/// `start` must point to `length` mapped, readable bytes that stay mapped for `'m`. Other threads and processes may
/// change them at any time, but this process may access them only atomically.
unsafe fn words<'m>(start: *const u8, length: usize) -> Result<&'m PageWords, LayoutError> {
    if length < PAGE_BYTES {
        return Err(LayoutError::TooShort { length, needed: PAGE_BYTES });
    }
    if start.is_null() || !start.cast::<AtomicU64>().is_aligned() {
        return Err(LayoutError::Misaligned);
    }
    // SAFETY: non-null, aligned and long enough by the checks above; mapped for 'm by the caller's promise. Atomics
    // may be shared and changed from outside; relaxed and acquire loads of them are sound on read-only memory too.
    Ok(unsafe { &*start.cast::<PageWords>() })
}

impl<'m> Page<'m> {
    /// Reads the page in a mapping, read-only or not.
    ///
    /// # Errors
    /// When the mapping is too short or unaligned, or does not hold a page of this major version.
    ///
    /// # Safety
    /// `start` must point to `length` mapped, readable bytes that stay mapped for `'m`, of a file that no process
    /// truncates; this process may access them only through this crate.
    pub unsafe fn from_raw(start: *const u8, length: usize) -> Result<Self, LayoutError> {
        // SAFETY: passed on to the caller.
        Page::new(unsafe { words(start, length)? })
    }
}

impl<'m> Writer<'m> {
    /// Writes into the page in a mapping.
    ///
    /// # Errors
    /// When the mapping is too short or unaligned, or does not hold a page of this major version.
    ///
    /// # Safety
    /// As for [`Page::from_raw`]; the mapping must be writable as well.
    pub unsafe fn from_raw(start: *mut u8, length: usize) -> Result<Self, LayoutError> {
        // SAFETY: passed on to the caller.
        Writer::new(unsafe { words(start, length)? })
    }
}

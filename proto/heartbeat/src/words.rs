//! The page as atomic words: the only way either side touches it.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::layout::{PAGE_WORDS, WORD};

/// Words of a page. A model of the memory orders has a few: all of them are tried in every order.
const COUNT: usize = if cfg!(all(test, loom)) { 8 } else { PAGE_WORDS };

/// The whole page, as the caller's mapping shows it.
pub type PageWords = [AtomicU64; COUNT];

/// Access by byte offset. Offsets wrap at the page's end rather than panic, so not even garbage read from the page can
/// make an access go wrong.
#[derive(Clone, Copy)]
pub(crate) struct Words<'m>(pub(crate) &'m PageWords);

impl<'m> Words<'m> {
    #[inline(always)]
    fn at(self, offset: usize) -> &'m AtomicU64 {
        // COUNT is a power of two: the mask proves the bound to the compiler.
        &self.0[(offset / WORD) & (COUNT - 1)]
    }

    #[inline(always)]
    pub(crate) fn load(self, offset: usize) -> u64 {
        u64::from_le(self.at(offset).load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub(crate) fn load_acquire(self, offset: usize) -> u64 {
        u64::from_le(self.at(offset).load(Ordering::Acquire))
    }

    #[inline(always)]
    pub(crate) fn store(self, offset: usize, value: u64) {
        #[cfg(all(test, not(loom)))]
        if crate::crash_tests::writer_is_dead() {
            return;
        }
        self.at(offset).store(value.to_le(), Ordering::Relaxed);
    }

    /// Publishes everything stored before it.
    #[inline(always)]
    pub(crate) fn store_release(self, offset: usize, value: u64) {
        #[cfg(all(test, not(loom)))]
        if crate::crash_tests::writer_is_dead() {
            return;
        }
        self.at(offset).store(value.to_le(), Ordering::Release);
    }

    /// Stores `value` if the word is still `expected`.
    #[inline(always)]
    pub(crate) fn exchange(self, offset: usize, expected: u64, value: u64) -> Result<(), u64> {
        #[cfg(all(test, not(loom)))]
        if crate::crash_tests::writer_is_dead() {
            return Ok(());
        }
        self.at(offset)
            .compare_exchange(expected.to_le(), value.to_le(), Ordering::Acquire, Ordering::Relaxed)
            .map(|_| ())
            .map_err(u64::from_le)
    }

    /// Adds one; lost only when another thread adds in the same instant on a big-endian machine.
    pub(crate) fn count_one(self, offset: usize) {
        #[cfg(all(test, not(loom)))]
        if crate::crash_tests::writer_is_dead() {
            return;
        }
        if cfg!(target_endian = "little") {
            self.at(offset).fetch_add(1, Ordering::Relaxed);
        } else {
            self.store(offset, self.load(offset).wrapping_add(1));
        }
    }

    /// Marks the following words as being rewritten: `sequence` turns odd before any change is visible.
    #[inline(always)]
    pub(crate) fn begin(self, sequence_at: usize, writing: u64) {
        self.store(sequence_at, writing);
        fence(Ordering::Release);
    }

    /// Reads the data under a sequence word, and returns it only if it was whole throughout.
    pub(crate) fn read_under<T>(
        self,
        sequence_at: usize,
        expected: u64,
        read: impl FnOnce() -> T,
    ) -> Option<T> {
        if self.load_acquire(sequence_at) != expected {
            return None;
        }
        let value = read();
        fence(Ordering::Acquire);
        (self.load(sequence_at) == expected).then_some(value)
    }

    /// Writes `bytes` and fills the last word with zeros; the caller has checked that they fit.
    pub(crate) fn store_bytes(self, offset: usize, bytes: &[u8]) {
        for (index, chunk) in bytes.chunks(WORD).enumerate() {
            let mut word = [0; WORD];
            word[..chunk.len()].copy_from_slice(chunk);
            self.store(offset + index * WORD, u64::from_le_bytes(word));
        }
    }

    /// Writes `text`, cut to `room` bytes at a character's boundary, and zeros after it.
    pub(crate) fn store_padded(self, offset: usize, room: usize, text: &str) {
        let kept = &text.as_bytes()[..text.floor_char_boundary(room)];
        self.store_bytes(offset, kept);
        for at in (kept.len().next_multiple_of(WORD)..room).step_by(WORD) {
            self.store(offset + at, 0);
        }
    }

    pub(crate) fn load_bytes(self, offset: usize, length: usize) -> Vec<u8> {
        let words = length.div_ceil(WORD);
        let mut bytes: Vec<u8> =
            (0..words).flat_map(|index| self.load(offset + index * WORD).to_le_bytes()).collect();
        bytes.truncate(length);
        bytes
    }

    /// Text of a stated length, limited to `room`; bytes that are not UTF-8 are replaced.
    pub(crate) fn load_text(self, offset: usize, length: u64, room: usize) -> String {
        let length = usize::try_from(length).map_or(room, |length| length.min(room));
        String::from_utf8_lossy(&self.load_bytes(offset, length)).into_owned()
    }

    /// Text that ends at its first zero byte.
    pub(crate) fn load_padded(self, offset: usize, room: usize) -> String {
        let bytes = self.load_bytes(offset, room);
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }
}

//! The lifeline in a heartbeat page: reports when the rank's process starts to end. A pidfd reports that much later
//! if the process has much memory or a device to release.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering};

use mainstay_heartbeat::PAGE_BYTES;
use rustix::thread::futex;

use crate::mapping::Mapping;

/// Bit 30 of the word: its owner died.
const OWNER_DIED: u32 = 0x4000_0000;

/// The bits that hold the owner's thread id.
const OWNER: u32 = 0x3fff_ffff;

/// A waiting thread needs almost no stack.
const STACK: usize = 64 * 1024;

/// Calls `dead` from a separate thread when the word at this offset of the page shows that its owner died. The
/// thread ends with the rank at the latest. `execve` looks the same: check whether the process is ending.
///
/// # Errors
/// The page cannot be mapped, or the thread cannot be started.
pub fn watch(page: &File, word_at: usize, dead: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let length = NonZeroUsize::new(PAGE_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
    let mapping = Mapping::map(page, length)?;
    if word_at + size_of::<u32>() > mapping.len() || !word_at.is_multiple_of(size_of::<u32>()) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let wait = move || {
        // SAFETY: within the mapping and aligned by the checks above; the mapping lives as long as this thread
        // needs it. Other processes change the word with atomic operations, and it is only read here.
        let word = unsafe { AtomicU32::from_ptr(mapping.as_ptr().add(word_at).cast_mut().cast()) };
        if owner_died(word) {
            dead();
        }
    };
    std::thread::Builder::new().name("lifeline".to_owned()).stack_size(STACK).spawn(wait).map(drop)
}

/// Waits until the word has no living owner any more. Returns whether the last one died.
fn owner_died(word: &AtomicU32) -> bool {
    loop {
        let now = word.load(Ordering::Acquire);
        if now & OWNER_DIED != 0 || now & OWNER == 0 {
            return now & OWNER_DIED != 0;
        }
        match futex::wait(word, futex::Flags::empty(), now, None) {
            Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            // This kernel cannot wait on read-only memory: the pidfd reports the death, later.
            Err(_) => return false,
        }
    }
}

//! A token that a fork invalidates.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// Enough for the one word; the kernel rounds up to its page size.
const TOKEN_BYTES: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
const OURS: u64 = 1;

/// Shows whether this process is the one that made the token.
///
/// The word is in private memory that the kernel zeroes in a forked child (`MADV_WIPEONFORK`, Linux 4.14), so the
/// check costs one load. If the kernel refuses, the process id is compared instead, which is a system call.
pub(crate) struct Token {
    word: &'static AtomicU64,
    made_by: Option<libc::pid_t>,
}

impl Token {
    pub(crate) fn new() -> Self {
        let wiped = wiped_on_fork();
        let made_by = wiped.is_none().then(|| nix::unistd::getpid().as_raw());
        let word = wiped.unwrap_or_else(|| Box::leak(Box::default()));
        word.store(OURS, Ordering::Relaxed);
        Self { word, made_by }
    }

    #[inline]
    pub(crate) fn is_ours(&self) -> bool {
        self.word.load(Ordering::Relaxed) == OURS
            && self.made_by.is_none_or(|pid| pid == nix::unistd::getpid().as_raw())
    }

    /// Invalidates the token for every process.
    pub(crate) fn give_up(&self) {
        self.word.store(0, Ordering::Relaxed);
    }
}

fn wiped_on_fork() -> Option<&'static AtomicU64> {
    // SAFETY: a new mapping at an address that the kernel chooses overlaps no other memory.
    let start = unsafe {
        mmap_anonymous(None, TOKEN_BYTES, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
    }
    .ok()?;
    // SAFETY: the range is the mapping just made, which nothing else refers to.
    let advised = unsafe { madvise(start, TOKEN_BYTES.get(), MmapAdvise::MADV_WIPEONFORK) };
    if advised.is_err() {
        // SAFETY: as above; no reference to it was made. A failure leaves 4 KiB mapped, which is harmless.
        let _ = unsafe { munmap(start, TOKEN_BYTES.get()) };
        return None;
    }
    // SAFETY: page-aligned, zeroed, and never unmapped after this point; only atomics refer to it.
    Some(unsafe { start.cast::<AtomicU64>().as_ref() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_valid_until_it_is_invalidated() {
        let token = Token::new();
        assert!(token.is_ours());
        token.give_up();
        assert!(!token.is_ours());
    }

    #[test]
    fn without_the_kernels_help_the_process_id_decides() {
        let word = || -> &'static AtomicU64 { Box::leak(Box::new(AtomicU64::new(OURS))) };
        let own = nix::unistd::getpid().as_raw();
        assert!(Token { word: word(), made_by: Some(own) }.is_ours());
        assert!(!Token { word: word(), made_by: Some(own + 1) }.is_ours());
    }
}

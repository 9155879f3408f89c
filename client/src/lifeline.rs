//! The lifeline: reports this process's death before the kernel has freed its memory.
//!
//! A robust mutex of the C library is in the page; the first thread takes it and keeps it. The library puts it on
//! the thread's list of robust locks, which the kernel processes as soon as the thread ends, however it ends.
//! Nothing here runs again after the page was opened, so it does not slow down beats.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

use mainstay_heartbeat::layout::{LIFELINE, LIFELINE_BYTES};
use nix::libc;

/// The offset of the word that the kernel marks in a mutex of the C library: `__lock` in glibc, `_m_lock` in musl.
const WORD_AT: usize = if cfg!(target_env = "musl") { 4 } else { 0 };

/// A process waits, or may wait: without this bit the kernel wakes no waiter.
const FUTEX_WAITERS: u32 = 0x8000_0000;

/// What the mutex holds while a thread has it: the thread's id.
const FUTEX_TID_MASK: u32 = 0x3fff_ffff;

/// Takes the lock in the page for this thread, for good. Returns the offset of its word in the page; none if this
/// is not possible, in which case a death is noticed when the process is gone.
///
/// # Safety
/// `page` must be mapped readable and writable, a whole page, and never unmapped; its lifeline must have no owner:
/// it must not contain a mutex of a living process.
pub(crate) unsafe fn hold(page: *mut u8) -> Option<usize> {
    if size_of::<libc::pthread_mutex_t>() > LIFELINE_BYTES || !is_first_thread() {
        return None;
    }
    // SAFETY: within the page by the layout, whose test holds that fields do not overlap.
    let place = unsafe { page.add(LIFELINE) };
    let mutex = place.cast::<libc::pthread_mutex_t>();
    if !mutex.is_aligned() {
        return None;
    }
    let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
    let attributes = attributes.as_mut_ptr();
    // SAFETY: the attributes are initialized by the first call before the others use them; `mutex` points to room for one,
    // in memory that stays mapped, and nothing else refers to it by the caller's promise.
    let taken = unsafe {
        libc::pthread_mutexattr_init(attributes) == 0
            && libc::pthread_mutexattr_setpshared(attributes, libc::PTHREAD_PROCESS_SHARED) == 0
            && libc::pthread_mutexattr_setrobust(attributes, libc::PTHREAD_MUTEX_ROBUST) == 0
            && libc::pthread_mutex_init(mutex, attributes) == 0
            && libc::pthread_mutex_trylock(mutex) == 0
    };
    if !taken {
        return None;
    }
    // SAFETY: inside the mutex, aligned; the C library and the kernel change this word by atomic operations only.
    let word = unsafe { AtomicU32::from_ptr(place.add(WORD_AT).cast()) };
    let held_by = word.fetch_or(FUTEX_WAITERS, Ordering::Relaxed) & FUTEX_TID_MASK;
    // If a C library keeps its word at another offset, no process must wait for this one.
    (held_by == std::process::id()).then_some(LIFELINE + WORD_AT)
}

/// The end of another thread would not mean that the process has ended.
fn is_first_thread() -> bool {
    // SAFETY: gettid has no preconditions.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) };
    thread == libc::c_long::from(std::process::id() as i32)
}

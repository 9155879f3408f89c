//! Guarded mappings of files that another process may truncate. An access beyond the new end raises SIGBUS, which
//! ends a process by default. The handler here maps zeros in that place, and the reader detects that it is no
//! longer a valid page. A rank that truncates its page ends only itself, not its launcher.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, OnceLock, PoisonError};

use nix::libc;

/// Maximum number of guarded mappings: two for each rank of a host. Further ones are not guarded.
const MAX_MAPPINGS: usize = 4096;

#[derive(Debug)]
struct Range {
    start: AtomicUsize,
    /// 0 for a free slot.
    length: AtomicUsize,
}

static RANGES: [Range; MAX_MAPPINGS] =
    [const { Range { start: AtomicUsize::new(0), length: AtomicUsize::new(0) } }; MAX_MAPPINGS];

/// How often a mapping was truncated.
static TRUNCATIONS: AtomicUsize = AtomicUsize::new(0);

/// Slots are assigned one at a time. The handler takes no lock.
static SLOT_ASSIGNMENT: Mutex<()> = Mutex::new(());

/// The previous action for SIGBUS, for faults outside our mappings.
static PREVIOUS_HANDLER: OnceLock<libc::sigaction> = OnceLock::new();

/// A mapping that is guarded until this is dropped.
#[derive(Debug)]
pub struct Guard(Option<usize>);

impl Guard {
    /// Guards `length` bytes from `start`. They must be whole pages that stay mapped for as long as the guard lives
    /// and that are only accessed with atomics.
    pub fn new(start: usize, length: usize) -> Guard {
        install();
        let _giving = SLOT_ASSIGNMENT.lock().unwrap_or_else(PoisonError::into_inner);
        let place = RANGES.iter().position(|range| range.length.load(Ordering::Relaxed) == 0);
        if let Some(range) = place.and_then(|place| RANGES.get(place)) {
            range.start.store(start, Ordering::Relaxed);
            range.length.store(length, Ordering::Release);
        }
        Guard(place)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(range) = self.0.and_then(|place| RANGES.get(place)) {
            range.length.store(0, Ordering::Release);
        }
    }
}

/// How many mappings of this process were truncated since it started.
pub fn cut_short() -> usize {
    TRUNCATIONS.load(Ordering::Relaxed)
}

fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: both are plain kernel structures, for which zeros are a value; the handler has the signature that
        // SA_SIGINFO requires, and calls only async-signal-safe functions.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before);
            let _ = PREVIOUS_HANDLER.set(before);
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = cut;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        }
    });
}

extern "C" fn cut(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid pointer to a handler with SA_SIGINFO.
    let at = unsafe { (*info).si_addr() } as usize;
    let of = |range: &Range| {
        let length = range.length.load(Ordering::Acquire);
        let start = range.start.load(Ordering::Relaxed);
        (length > 0 && (start..start.saturating_add(length)).contains(&at)).then_some((start, length))
    };
    if let Some((start, length)) = RANGES.iter().find_map(of) {
        // SAFETY: errno belongs to this thread, and is restored for the interrupted code.
        let errno = unsafe { *libc::__errno_location() };
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the range is a mapping of ours that is only accessed with atomics, which are also valid for
        // zeros; mmap is a plain system call.
        let put = unsafe { libc::mmap(start as *mut libc::c_void, length, both, flags, -1, 0) };
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = errno };
        if put != libc::MAP_FAILED {
            TRUNCATIONS.fetch_add(1, Ordering::Relaxed);
            return;
        }
    }
    pass_on(signal, info, context);
}

/// A fault outside our mappings is handled as it would be without this module.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = PREVIOUS_HANDLER.get();
    if let Some(before) = before
        && before.sa_flags & libc::SA_SIGINFO != 0
        && before.sa_sigaction > libc::SIG_IGN
    {
        // SAFETY: it was installed as a handler with this signature.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(before.sa_sigaction) };
        handler(signal, info, context);
        return;
    }
    // SAFETY: restores the default; the instruction is retried when this returns, and ends the process.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}

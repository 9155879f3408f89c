//! The few things for which Linux has to be asked directly. All unsafe code of this crate is here.

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use mainstay_checkpoint::control::{CONTROL_BYTES, Control, ControlError, ControlWords};
use mainstay_core::checkpoint::backoff::Signs;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A control page that is mapped for as long as this value lives.
#[derive(Debug)]
pub struct ControlPage {
    start: NonNull<std::ffi::c_void>,
    length: NonZeroUsize,
}

// SAFETY: the mapping is plain memory, valid until drop and bound to no thread; it is touched as atomics only.
unsafe impl Send for ControlPage {}
// SAFETY: as above.
unsafe impl Sync for ControlPage {}

impl ControlPage {
    /// Maps the page in `file`, which must be as long as one.
    ///
    /// # Errors
    /// It is shorter, or the kernel refused.
    pub fn of(file: &File) -> io::Result<ControlPage> {
        let length = NonZeroUsize::new(CONTROL_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        if file.metadata()?.len() < length.get() as u64 {
            // Touching what lies beyond a file's end would end this process.
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is shorter than a control page"));
        }
        let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses overlaps nothing of ours.
        let start = unsafe { mmap(None, length, both, MapFlags::MAP_SHARED, file, 0)? };
        Ok(ControlPage { start, length })
    }

    /// Its words, before it is formatted.
    ///
    /// # Errors
    /// None that can happen: the mapping is a page.
    pub fn words(&self) -> Result<&ControlWords, ControlError> {
        // SAFETY: the mapping lives as long as `self`; the file is in a directory that only this user may write, and nobody of us
        // truncates it; this process touches it only through Control.
        unsafe { Control::words_at(self.start.as_ptr().cast(), self.length.get()) }
    }

    /// The page.
    ///
    /// # Errors
    /// It is none of this version.
    pub fn control(&self) -> Result<Control<'_>, ControlError> {
        Control::new(self.words()?)
    }
}

impl Drop for ControlPage {
    fn drop(&mut self) {
        // SAFETY: start and length are those of our mapping, which nothing refers to any more.
        let _ = unsafe { munmap(self.start, self.length.get()) };
    }
}

/// Milliseconds on the clock that all processes of this host share.
#[must_use]
pub fn monotonic_ms() -> u64 {
    let mut now = nix::libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec of ours, which the call writes and of which it keeps no pointer. Refused, it stays zero.
    unsafe { nix::libc::clock_gettime(nix::libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000
}

/// What a connection shows of its path; none where the kernel does not tell.
#[must_use]
pub fn signs(stream: &TcpStream) -> Option<Signs> {
    // Where tcpi_rtt and tcpi_total_retrans lie in `struct tcp_info` of linux/tcp.h, which only grows at its end.
    const ROUND_TRIP: usize = 68;
    const SENT_AGAIN: usize = 100;
    let mut info = [0_u8; 104];
    let mut length = nix::libc::socklen_t::try_from(info.len()).ok()?;
    // SAFETY: the descriptor is open for as long as `stream` lives; the kernel writes at most `length` bytes into `info`, and how many
    // into `length`. Neither nix nor rustix has this option.
    let done = unsafe {
        nix::libc::getsockopt(
            stream.as_raw_fd(),
            nix::libc::IPPROTO_TCP,
            nix::libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    let told = done == 0 && usize::try_from(length).is_ok_and(|length| length >= info.len());
    let word = |at: usize| info.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    let round_trip_us = told.then(|| word(ROUND_TRIP)).flatten()?;
    Some(Signs { round_trip_us, sent_again: word(SENT_AGAIN)? })
}

/// Makes this thread stand back behind training: for the processor, and if `idle` for the disk too. What the kernel refuses is no
/// harm.
pub fn stand_back(nice: i32, idle: bool) {
    const OF_A_PROCESS: nix::libc::c_long = 1;
    const IDLE: nix::libc::c_long = 3 << 13;
    // SAFETY: both calls take numbers only; 0 is the calling thread.
    unsafe {
        nix::libc::setpriority(nix::libc::PRIO_PROCESS, 0, nice);
        if idle {
            nix::libc::syscall(nix::libc::SYS_ioprio_set, OF_A_PROCESS, 0, IDLE);
        }
    }
}

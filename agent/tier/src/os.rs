//! System calls without a safe wrapper. All unsafe code of this crate is here.

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::UNIX_EPOCH;

use mainstay_checkpoint::backoff::ConnectionSample;
use mainstay_checkpoint_format::control::{CONTROL_BYTES, Control, ControlError, ControlWords};
use mainstay_sys::guarded::Guard;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use crate::lock;

/// A control page, mapped as long as this value lives.
#[derive(Debug)]
pub struct ControlPage {
    // Dropped before the mapping: the next mapping at this address belongs to other code.
    _guard: Guard,
    mapping: Mapping,
}

impl ControlPage {
    /// Maps the page in `file`, which must be at least as long as a page.
    pub fn of(file: &File) -> io::Result<ControlPage> {
        let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let mapping = Mapping::new(file, CONTROL_BYTES as u64, both, MapFlags::empty())?;
        let guard = Guard::new(mapping.start.as_ptr() as usize, mapping.length.get());
        Ok(ControlPage { _guard: guard, mapping })
    }

    /// The words of the page, before it is formatted.
    pub fn words(&self) -> Result<&ControlWords, ControlError> {
        // SAFETY: the mapping lives as long as `self`, also if the file is truncated (`guarded`); this process accesses it only through
        // Control.
        unsafe { Control::words_at(self.mapping.start.as_ptr(), self.mapping.length.get()) }
    }

    /// The page.
    pub fn control(&self) -> Result<Control<'_>, ControlError> {
        Control::new(self.words()?)
    }
}

/// A part of a file in this process's address space, as long as this value lives.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    length: NonZeroUsize,
}

// SAFETY: the mapping is valid until drop and bound to no thread; its owners control access to the bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &File, bytes: u64, protection: ProtFlags, flags: MapFlags) -> io::Result<Mapping> {
        let length =
            usize::try_from(bytes).ok().and_then(NonZeroUsize::new).ok_or(io::ErrorKind::InvalidInput)?;
        if file.metadata()?.len() < bytes {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "it is shorter than what is to be mapped: access beyond its end would end this process",
            ));
        }
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no other memory of this process.
        let start = unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED | flags, file, 0)? };
        Ok(Mapping { start: start.cast(), length })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: start and length are those of our mapping. No reference is left: every user holds this value.
        let _ = unsafe { munmap(self.start.cast(), self.length.get()) };
    }
}

/// A file's memory that is sent but not read by this process. The kernel reads it and returns an error if the pages are gone, so the
/// file may belong to a user who truncates it.
#[derive(Clone, Debug)]
pub struct SendMapping(Arc<Mapping>);

impl SendMapping {
    /// Maps the first `bytes` of `file`.
    ///
    /// # Errors
    /// The file is shorter, or the kernel refuses the mapping.
    pub fn new(file: &File, bytes: u64) -> io::Result<SendMapping> {
        let mapping = Mapping::new(file, bytes, ProtFlags::PROT_READ, MapFlags::empty())?;
        Ok(SendMapping(Arc::new(mapping)))
    }

    /// Number of mapped bytes.
    pub fn length(&self) -> u64 {
        self.0.length.get() as u64
    }

    /// Sends bytes from `offset` on. Returns how many the socket accepted.
    ///
    /// # Errors
    /// They are not all mapped, the file was truncated, or the socket returns an error.
    pub fn send(&self, stream: &TcpStream, offset: u64, length: usize) -> io::Result<usize> {
        let begin = usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        if begin.checked_add(length).is_none_or(|end| end > self.0.length.get()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the range is within the mapping, which lives as long as `self`; the kernel only reads it, and returns EFAULT for missing
        // pages. The descriptor is open as long as `stream` lives.
        let sent = unsafe {
            let from = self.0.start.as_ptr().add(begin);
            nix::libc::send(stream.as_raw_fd(), from.cast(), length, nix::libc::MSG_NOSIGNAL)
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}

/// A file that is mapped for writing as long as this value lives. Its memory is lent in ranges that do not overlap.
#[derive(Debug)]
pub struct MappedFile {
    mapping: Arc<Mapping>,
    lent: Mutex<Vec<Range<usize>>>,
}

/// A part of a mapped file to which no other code of this process has access.
#[derive(Debug)]
pub struct MappedRange<'m> {
    file: &'m MappedFile,
    range: Range<usize>,
}

impl MappedFile {
    /// Maps the first `bytes` of `file` and populates all pages. The file must not become shorter while it is mapped: access beyond
    /// its end would end this process. So only files in this process's own directories may be mapped.
    pub fn new(file: &File, bytes: u64) -> io::Result<MappedFile> {
        let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let mapping = Mapping::new(file, bytes, both, MapFlags::MAP_POPULATE)?;
        Ok(MappedFile { mapping: Arc::new(mapping), lent: Mutex::default() })
    }

    /// Number of mapped bytes.
    pub fn length(&self) -> u64 {
        self.mapping.length.get() as u64
    }

    /// The same memory, for sending.
    pub fn outgoing(&self) -> SendMapping {
        SendMapping(Arc::clone(&self.mapping))
    }

    /// Lends a part; none if it is not completely mapped or overlaps a lent range.
    pub fn lend(&self, offset: u64, length: u32) -> Option<MappedRange<'_>> {
        let begin = usize::try_from(offset).ok()?;
        let range = begin..begin.checked_add(length as usize)?;
        let mut lent = self.lent();
        let taken = lent.iter().any(|other| range.start < other.end && other.start < range.end);
        if range.end > self.mapping.length.get() || taken {
            return None;
        }
        lent.push(range.clone());
        Some(MappedRange { file: self, range })
    }

    fn lent(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        lock(&self.lent)
    }
}

impl MappedRange<'_> {
    /// The memory.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the range is within the mapping, which lives as long as `of`; no other code was lent any of it, and `self` is borrowed
        // as long as the slice lives. All bytes of a mapped file are initialized.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.file.mapping.start.as_ptr().add(self.range.start),
                self.range.len(),
            )
        }
    }
}

impl Drop for MappedRange<'_> {
    fn drop(&mut self) {
        let mut lent = self.file.lent();
        if let Some(at) = lent.iter().position(|range| *range == self.range) {
            lent.swap_remove(at);
        }
    }
}

/// Milliseconds on CLOCK_MONOTONIC, which all processes of this host share.
pub fn monotonic_ms() -> u64 {
    mainstay_sys::clock::mono().0 / 1_000_000
}

/// Starts a thread that ends by itself.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

/// Seconds since 1970.
pub(crate) fn now_unix_s() -> u64 {
    UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

/// Round-trip time and retransmissions of a connection; none if the kernel does not report them.
pub fn signs(stream: &TcpStream) -> Option<ConnectionSample> {
    // Offsets of tcpi_rtt, tcpi_rttvar and tcpi_total_retrans in `struct tcp_info` of linux/tcp.h, which only grows at its end.
    const ROUND_TRIP: usize = 68;
    const DEVIATION: usize = 72;
    const SENT_AGAIN: usize = 100;
    let mut info = [0_u8; 104];
    let mut length = nix::libc::socklen_t::try_from(info.len()).ok()?;
    // SAFETY: the descriptor is open as long as `stream` lives; the kernel writes at most `length` bytes into `info`, and their number
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
    let is_complete = done == 0 && usize::try_from(length).is_ok_and(|length| length >= info.len());
    let field = |at: usize| info.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    let round_trip_us = is_complete.then(|| field(ROUND_TRIP)).flatten()?;
    Some(ConnectionSample { round_trip_us, deviation_us: field(DEVIATION)?, sent_again: field(SENT_AGAIN)? })
}

/// Lowers the priority of this thread below training: for the CPU, and if `idle` also for the disk. Errors are ignored: a refusal is
/// harmless.
pub fn lower_priority(nice: i32, idle: bool) {
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn mapped(bytes: usize) -> (testing::TempDir, File, MappedFile) {
        let dir = testing::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.write_all(&vec![7; bytes]).unwrap();
        let mapped = MappedFile::new(&file, bytes as u64).unwrap();
        (dir, file, mapped)
    }

    #[test]
    fn bytes_written_into_lent_memory_are_in_the_file() {
        let (_dir, file, mapped) = mapped(10_000);
        mapped.lend(5000, 3).unwrap().bytes().copy_from_slice(b"abc");
        let mut found = [0; 5];
        file.read_exact_at(&mut found, 4999).unwrap();
        assert_eq!(&found, b"\x07abc\x07");
    }

    #[test]
    fn a_file_that_is_sent_may_be_truncated_by_its_owner() {
        use std::io::Read;
        use std::net::TcpListener;

        let (_dir, mut file, mapped) = mapped(10_000);
        mapped.lend(9_000, 3).unwrap().bytes().copy_from_slice(b"abc");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut other = listener.accept().unwrap().0;
        for outgoing in [mapped.outgoing(), SendMapping::new(&file, 10_000).unwrap()] {
            assert_eq!(outgoing.send(&stream, 8_999, 5).unwrap(), 5);
            let mut came = [0; 5];
            other.read_exact(&mut came).unwrap();
            assert_eq!(&came, b"\x07abc\x07");
            assert!(outgoing.send(&stream, 9_996, 5).is_err());
            assert!(outgoing.send(&stream, u64::MAX, 5).is_err());
        }
        drop(mapped);
        let outgoing = SendMapping::new(&file, 10_000).unwrap();
        file.set_len(0).unwrap();
        let refused = outgoing.send(&stream, 8_192, 5).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(nix::libc::EFAULT));
        // After the file has grown again, its bytes are sent again.
        file.write_all(&[1; 1]).unwrap();
        file.set_len(10_000).unwrap();
        assert_eq!(outgoing.send(&stream, 8_192, 5).unwrap(), 5);
    }

    #[test]
    fn no_range_is_lent_twice_or_beyond_the_end() {
        let (_dir, file, mapped) = mapped(100);
        let middle = mapped.lend(40, 20).unwrap();
        for (offset, length) in [(40, 20), (30, 11), (59, 5), (0, 100), (45, 1)] {
            assert!(mapped.lend(offset, length).is_none(), "{offset} {length}");
        }
        assert!(mapped.lend(20, 20).is_some() && mapped.lend(60, 40).is_some());
        for (offset, length) in [(60, 41), (100, 1), (u64::MAX, 2)] {
            assert!(mapped.lend(offset, length).is_none(), "{offset} {length}");
        }
        drop(middle);
        assert!(mapped.lend(0, 100).is_some());
        assert!(MappedFile::new(&file, 101).is_err());
    }

    #[test]
    fn a_truncated_page_is_an_error_and_other_pages_stay_valid() {
        let page = |file: &File| {
            file.set_len(CONTROL_BYTES as u64).unwrap();
            let page = ControlPage::of(file).unwrap();
            let _ = Control::format(page.words().unwrap(), 3, 8, 0, 1);
            page
        };
        let (cut, whole) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let (of_cut, of_whole) = (page(&cut), page(&whole));
        assert_eq!(of_cut.control().unwrap().rank(), 3);
        let before = mainstay_sys::guarded::cut_short();
        cut.set_len(0).unwrap();
        // Without the guard this ends the test's process.
        assert!(of_cut.control().is_err());
        assert!(mainstay_sys::guarded::cut_short() > before);
        assert_eq!(of_whole.control().unwrap().rank(), 3);
        drop(of_cut);
        let again = page(&cut);
        assert_eq!(again.control().unwrap().rank(), 3, "what is mapped later is another mapping");
    }
}

//! Copies many byte ranges with several threads. All of it is unsafe by nature: the addresses come from Python.

use std::fs::File;
use std::hash::Hasher;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::mman::{MmapAdvise, madvise};
use twox_hash::XxHash3_64;

/// A range of bytes to copy from one address to another.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub to: usize,
    pub from: usize,
    pub length: usize,
}

/// The bytes that a thread takes at a time.
const SHARE_BYTES: usize = 8 << 20;

/// Small enough to stay in the second-level cache between reading and checking.
const READ_BYTES: usize = 256 << 10;

/// Tensors of this size use huge pages: one page fault for two megabytes instead of 512.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The smallest page size of the supported processors: with larger pages the kernel refuses a range that is rounded
/// to it, and each page is populated when it is touched.
const PAGE_BYTES: usize = 4096;

/// Copies all pieces.
///
/// # Safety
/// Every piece's source must be readable and its destination writable for its length, during the call; no destination may
/// overlap anything else.
pub unsafe fn copy(pieces: &[Piece], threads: usize) {
    let mut shares = Vec::new();
    for piece in pieces {
        let mut done = 0;
        while done < piece.length {
            let length = SHARE_BYTES.min(piece.length - done);
            shares.push(Piece { to: piece.to + done, from: piece.from + done, length });
            done += length;
        }
    }
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(share) = shares.get(next.fetch_add(1, Ordering::Relaxed)) {
            // SAFETY: by the caller's promise; shares are parts of pieces, and each is taken by one thread.
            unsafe {
                std::ptr::copy_nonoverlapping(share.from as *const u8, share.to as *mut u8, share.length)
            };
        }
    };
    together(threads.min(shares.len()), &work);
}

/// The source of a sealed file's bytes.
pub enum Source<'a> {
    /// System calls: a read failure is an error, not a signal.
    File(&'a File),
    /// A mapping of the file, which must stay mapped and readable: about twice as fast as system calls.
    Mapped { start: usize, populate: bool },
}

/// A part of a sealed file to load into memory.
#[derive(Clone, Copy, Debug)]
pub struct Destination {
    pub offset: u64,
    pub length: u64,
    pub address: usize,
    /// Whether no page of it may have been touched yet.
    pub is_new: bool,
}

impl Destination {
    fn end(&self) -> u64 {
        self.offset + self.length
    }
}

/// A sealed file: its size and the checksums of its chunks.
pub struct Sealed<'a> {
    pub size: u64,
    pub chunk: u64,
    pub sums: &'a [u64],
}

/// Reads chunks of a sealed file; see [`crate::pool`].
///
/// # Safety
/// The source must be readable for the size of the file, and the destinations writable for their lengths, during the call; they
/// must be in order and overlap nothing.
pub unsafe fn read_verified(
    source: &Source<'_>,
    sealed: &Sealed<'_>,
    chunks: std::ops::Range<usize>,
    pieces: &[Destination],
    threads: usize,
) -> io::Result<Option<usize>> {
    for piece in pieces.iter().filter(|piece| piece.is_new) {
        advise_huge(piece.address, piece.length);
    }
    let next = AtomicUsize::new(chunks.start);
    let bad = AtomicUsize::new(usize::MAX);
    let failed = std::sync::Mutex::new(None);
    let work = || {
        let mut scratch = vec![0; READ_BYTES];
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(expected) = sealed.sums.get(index).filter(|_| index < chunks.end) else { return };
            let from = index as u64 * sealed.chunk;
            let end = (from + sealed.chunk).min(sealed.size);
            // SAFETY: by the caller's promise; chunks do not overlap, and each is taken by one thread.
            match unsafe { read_chunk(source, from, end, pieces, &mut scratch) } {
                Ok(sum) if sum == *expected => {}
                Ok(_) => {
                    bad.fetch_min(index, Ordering::Relaxed);
                }
                Err(error) => {
                    if let Ok(mut failed) = failed.lock() {
                        failed.get_or_insert(error);
                    }
                    return;
                }
            }
        }
    };
    together(threads.min(chunks.len()), &work);
    if let Some(error) = failed.into_inner().ok().flatten() {
        return Err(error);
    }
    let bad = bad.into_inner();
    Ok((bad != usize::MAX).then_some(bad))
}

/// Reads one chunk to the addresses of its parts, and returns the checksum of the bytes now stored there.
///
/// # Safety
/// As for [`read_verified`].
unsafe fn read_chunk(
    source: &Source<'_>,
    from: u64,
    end: u64,
    pieces: &[Destination],
    scratch: &mut [u8],
) -> io::Result<u64> {
    if let &Source::Mapped { start, populate: true } = source {
        populate(start + from as usize, (end - from) as usize, MmapAdvise::MADV_POPULATE_READ)?;
    }
    let mut sum = XxHash3_64::new();
    let mut at = from;
    let mut place = pieces.partition_point(|piece| piece.end() <= at);
    let mut populated = usize::MAX;
    while at < end {
        while pieces.get(place).is_some_and(|piece| piece.end() <= at) {
            place += 1;
        }
        let (until, address) = match pieces.get(place) {
            Some(piece) if piece.offset <= at => {
                // Inside a piece, hence less than its length, which is a length in memory.
                let address = piece.address + (at - piece.offset) as usize;
                let until = end.min(piece.end());
                if piece.is_new && populated != place {
                    // Pages are cleared just before they are written, while they are in the processor's cache. If
                    // the kernel cannot do it at once, each page is populated when it is touched.
                    let _ = populate(address, (until - at) as usize, MmapAdvise::MADV_POPULATE_WRITE);
                    populated = place;
                }
                (until, Some(address))
            }
            Some(piece) => (end.min(piece.offset), None),
            None => (end, None),
        };
        let length = usize::try_from(until - at).map_or(READ_BYTES, |left| left.min(READ_BYTES));
        let buffer = match address {
            // SAFETY: `length` bytes from here on are within the piece, which is writable by the caller's promise.
            Some(address) => unsafe { std::slice::from_raw_parts_mut(address as *mut u8, length) },
            None => &mut scratch[..length],
        };
        match source {
            Source::File(file) => file.read_exact_at(buffer, at)?,
            Source::Mapped { start, .. } => {
                let from = (start + at as usize) as *const u8;
                // SAFETY: readable for the file's size by the caller's promise; the buffer overlaps nothing.
                unsafe { std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), length) };
            }
        }
        sum.write(buffer);
        at += length as u64;
    }
    Ok(sum.finish())
}

/// Asks the kernel to map all pages of a range at once. An error means that some of them are not available; a
/// kernel before Linux 5.14, which does not know the advice, maps each when it is touched.
fn populate(address: usize, length: usize, advice: MmapAdvise) -> io::Result<()> {
    let start = address / PAGE_BYTES * PAGE_BYTES;
    let end = address.saturating_add(length).next_multiple_of(PAGE_BYTES);
    let Some(place) = NonNull::new(start as *mut std::ffi::c_void) else { return Ok(()) };
    // SAFETY: the range is that of the caller's source or destination and the rest of their first and last pages; the advices given
    // here change nothing that pages hold.
    match unsafe { madvise(place, end - start, advice) } {
        Ok(()) | Err(nix::errno::Errno::EINVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn advise_huge(address: usize, length: u64) {
    let Ok(length) = usize::try_from(length) else { return };
    let start = address.next_multiple_of(HUGE_PAGE_BYTES);
    let end = address.saturating_add(length) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if let (true, Some(start)) = (end > start, NonNull::new(start as *mut std::ffi::c_void)) {
        // SAFETY: the range is within a destination of the caller's; the advice changes nothing in it. If it is
        // refused, the pages are small ones.
        let _ = unsafe { madvise(start, end - start.as_ptr() as usize, MmapAdvise::MADV_HUGEPAGE) };
    }
}

/// Runs the work in this thread and in as many others as make `threads`.
fn together(threads: usize, work: &(impl Fn() + Sync)) {
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // If no thread can be started, this one does more.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}

//! Many bytes from many places to many places, by several threads. All of it unsafe by nature: addresses come from Python.

use std::fs::File;
use std::hash::Hasher;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use twox_hash::XxHash3_64;

/// Bytes that go from one address to another.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub to: usize,
    pub from: usize,
    pub length: usize,
}

/// A thread takes so many bytes at a time.
const SHARE: usize = 8 << 20;

/// Small enough to stay in the second-level cache between reading and checking.
const READ: usize = 256 << 10;

/// Tensors of this size are asked for in huge pages: one page fault for two megabytes instead of 512.
const HUGE: usize = 2 << 20;

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
            let length = SHARE.min(piece.length - done);
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

/// Reads a sealed file; see [`crate::pool`].
///
/// # Safety
/// `descriptor` must be open, and the destinations `(offset, length, address)` writable for their lengths, during the call; they
/// must be in order and overlap nothing.
pub unsafe fn read_verified(
    descriptor: i32,
    size: u64,
    chunk: u64,
    sums: &[u64],
    chunks: std::ops::Range<usize>,
    pieces: &[(u64, u64, usize)],
    threads: usize,
) -> io::Result<Option<usize>> {
    // SAFETY: the descriptor is the caller's and stays open during the call; ManuallyDrop leaves it open after it.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) });
    for &(_, length, address) in pieces {
        advise_huge(address, length);
    }
    let next = AtomicUsize::new(chunks.start);
    let bad = AtomicUsize::new(usize::MAX);
    let failed = std::sync::Mutex::new(None);
    let work = || {
        let mut scratch = vec![0; READ];
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(expected) = sums.get(index).filter(|_| index < chunks.end) else { return };
            let (from, end) = (index as u64 * chunk, ((index as u64 + 1) * chunk).min(size));
            // SAFETY: by the caller's promise; chunks do not overlap, and each is taken by one thread.
            match unsafe { read_chunk(&file, from, end, pieces, &mut scratch) } {
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

/// Reads one chunk to where its parts belong, and returns the checksum of what then lies there.
///
/// # Safety
/// As for [`read_verified`].
unsafe fn read_chunk(
    file: &File,
    from: u64,
    end: u64,
    pieces: &[(u64, u64, usize)],
    scratch: &mut [u8],
) -> io::Result<u64> {
    let mut sum = XxHash3_64::new();
    let mut at = from;
    let mut place = pieces.partition_point(|(offset, length, _)| offset + length <= at);
    while at < end {
        while pieces.get(place).is_some_and(|(offset, length, _)| offset + length <= at) {
            place += 1;
        }
        let (until, address) = match pieces.get(place) {
            Some(&(offset, length, address)) if offset <= at => {
                // Inside a piece, hence less than its length, which is a length in memory.
                (end.min(offset + length), Some(address + (at - offset) as usize))
            }
            Some(&(offset, ..)) => (end.min(offset), None),
            None => (end, None),
        };
        let length = usize::try_from(until - at).map_or(READ, |left| left.min(READ));
        let buffer = match address {
            // SAFETY: `length` bytes from here on are within the piece, which is writable by the caller's promise.
            Some(address) => unsafe { std::slice::from_raw_parts_mut(address as *mut u8, length) },
            None => &mut scratch[..length],
        };
        file.read_exact_at(buffer, at)?;
        sum.write(buffer);
        at += length as u64;
    }
    Ok(sum.finish())
}

fn advise_huge(address: usize, length: u64) {
    let Ok(length) = usize::try_from(length) else { return };
    let start = address.next_multiple_of(HUGE);
    let end = address.saturating_add(length) / HUGE * HUGE;
    if let (true, Some(start)) = (end > start, std::ptr::NonNull::new(start as *mut std::ffi::c_void)) {
        // SAFETY: the range lies within a destination of the caller's; the advice changes nothing that it holds. Refused, the pages
        // are small ones.
        let _ = unsafe {
            nix::sys::mman::madvise(
                start,
                end - start.as_ptr() as usize,
                nix::sys::mman::MmapAdvise::MADV_HUGEPAGE,
            )
        };
    }
}

/// Runs the work in this thread and in as many others as make `threads`.
fn together(threads: usize, work: &(impl Fn() + Sync)) {
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Where no thread can be had, this one does more.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}

//! Maps the page's file permanently.

use std::fs::File;
use std::num::NonZeroUsize;

use mainstay_heartbeat::{LayoutError, PAGE_BYTES, Writer};
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap};

const PAGE_LENGTH: NonZeroUsize = NonZeroUsize::new(PAGE_BYTES).unwrap();

/// Maps a page for writing, and returns its address. The mapping is never undone, so no handle can ever point to
/// unmapped memory; a process opens one page, or a few.
///
/// The caller has checked that the file is at least a page long, and allocated.
pub(crate) fn writer(page: &File) -> Result<Result<(Writer<'static>, *mut u8), LayoutError>, Errno> {
    // Populated at once, so that no beat causes a page fault.
    let flags = MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE;
    // SAFETY: a new mapping at an address that the kernel chooses overlaps no other memory.
    let start =
        unsafe { mmap(None, PAGE_LENGTH, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags, page, 0)? };
    // SAFETY: mapped readable and writable just now, LENGTH bytes, never unmapped; this process touches it only
    // through the Writer. Page files are never truncated: that is part of the page's contract.
    let writer = unsafe { Writer::from_raw(start.as_ptr().cast(), PAGE_BYTES) };
    Ok(writer.map(|writer| (writer, start.as_ptr().cast())))
}

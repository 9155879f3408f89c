//! Read-only shared mappings of files that we created.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::guarded::Guard;
use mainstay_heartbeat::{Claim, LayoutError, PAGE_BYTES, Page, PageWords};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// The smallest page of Linux; a mapping ends with one.
const PAGE: usize = 4096;

/// A file mapped for reading for as long as this value lives. Others may write to it at the same time, so its
/// contents must only be read with atomics.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<std::ffi::c_void>,
    length: NonZeroUsize,
    /// Its rank may truncate the file at any time.
    guard: Option<Guard>,
}

// SAFETY: the mapping is plain memory, read only, valid until drop, and bound to no thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; a mapping is meant for concurrent reads.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `length` bytes of `file`.
    ///
    /// # Errors
    /// The file is shorter (reading beyond its end would kill the process), or the kernel refused.
    pub fn map(file: &File, length: NonZeroUsize) -> io::Result<Mapping> {
        if file.metadata()?.len() < length.get() as u64 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is shorter than its layout"));
        }
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing of ours.
        let start = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, file, 0)? };
        let guard = Some(Guard::new(start.as_ptr() as usize, length.get().next_multiple_of(PAGE)));
        Ok(Mapping { start, length, guard })
    }

    /// Its start.
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr().cast()
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.length.get()
    }

    /// Mappings are never empty.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The guard goes first: the next mapping at this address is not ours.
        self.guard = None;
        // SAFETY: start and length are those of our mapping, which nothing refers to any more.
        let _ = unsafe { munmap(self.start, self.length.get()) };
    }
}

/// A heartbeat page that we created, mapped for reading.
#[derive(Debug)]
pub struct MappedPage {
    mapping: Mapping,
    substitute: Option<Arc<PageWords>>,
}

impl MappedPage {
    /// Maps the page in `file`.
    ///
    /// # Errors
    /// The file cannot be mapped, or does not hold a page of this version.
    pub fn map(file: &File) -> io::Result<MappedPage> {
        let length = NonZeroUsize::new(PAGE_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        let mapped = MappedPage { mapping: Mapping::map(file, length)?, substitute: None };
        mapped.page().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(mapped)
    }

    /// The same, with a page in our own memory that is shown until a client has claimed the mapped one.
    #[must_use]
    pub fn with_substitute(self, substitute: Option<Arc<PageWords>>) -> MappedPage {
        MappedPage { substitute, ..self }
    }

    /// The page.
    ///
    /// # Errors
    /// What is mapped does not hold a page of this version (any more).
    pub fn page(&self) -> Result<Page<'_>, LayoutError> {
        // SAFETY: the mapping lives as long as `self`, hence as the page; the file is ours, in a directory that
        // only the job's user may write, and is never truncated by us; nothing else in this process reads it.
        let page = unsafe { Page::from_raw(self.mapping.as_ptr(), self.mapping.len()) }?;
        match &self.substitute {
            Some(words) if page.claim() == Claim::Unclaimed => {
                let substitute = Page::new(words)?;
                Ok(if substitute.claim() == Claim::Unclaimed { page } else { substitute })
            }
            _ => Ok(page),
        }
    }
}

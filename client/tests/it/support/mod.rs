//! A real page in a real file, and a reader's mapping of it.
#![allow(dead_code, reason = "each test file uses what it needs")]

use std::fs::File;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use mainstay_heartbeat::{PAGE_BYTES, Page, PageSpec, format};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use testing::TempDir;

/// A fresh page of rank 3 in its own directory, on tmpfs where there is one.
pub struct TestPage {
    pub directory: TempDir,
    pub path: PathBuf,
    pub page: Page<'static>,
}

impl TestPage {
    pub fn new() -> Self {
        let directory = scratch();
        let path = directory.path().join("rank-3.page");
        std::fs::write(&path, fresh()).unwrap();
        let page = map(&path);
        Self { directory, path, page }
    }
}

pub fn scratch() -> TempDir {
    let shm = testing::memory();
    if shm.is_dir() { TempDir::new_in(shm).unwrap() } else { TempDir::new().unwrap() }
}

pub fn fresh() -> Vec<u8> {
    format(&PageSpec {
        job: "char-lm",
        rank: 3,
        local_rank: 1,
        world_size: 8,
        attempt: 2,
        boot_id: [7; 16],
        creator_pid: std::process::id(),
        created_mono_ns: 5,
    })
}

pub fn map(path: &Path) -> Page<'static> {
    let file = File::open(path).unwrap();
    let length = NonZeroUsize::new(PAGE_BYTES).unwrap();
    // SAFETY: a new mapping at an address of the kernel's choosing.
    let start = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, &file, 0) }.unwrap();
    // SAFETY: mapped just now, never unmapped, and the file is never truncated.
    unsafe { Page::from_raw(start.as_ptr().cast(), PAGE_BYTES) }.unwrap()
}

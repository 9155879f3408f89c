//! Files in the store's memory whose pages are already allocated: of dropped replicas, or created in advance. A shard that is received into
//! one needs no new pages. The pages of an abandoned shard are kept too: otherwise a slow peer would need new pages each time
//! and become even slower.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use crate::os::MappedFile;

/// Maximum number of kept files: the shards of a host with eight devices.
const SPARES: usize = 8;

/// Bytes that are allocated at a time; in between, the caller is asked whether they are still wanted.
const AHEAD: u64 = 32 << 20;

/// An unused file.
#[derive(Debug)]
pub(super) struct Spare {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    /// Its memory, if mapped.
    pub(super) memory: Option<Arc<MappedFile>>,
    /// As long as this can be upgraded, connections may still write the abandoned shard into it.
    pub(super) writers: Weak<()>,
}

/// All spare files.
#[derive(Debug, Default)]
pub(super) struct Spares {
    kept: Vec<Spare>,
    bytes: u64,
}

impl Spares {
    /// Bytes that they occupy.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Sizes of the mapped ones.
    pub(super) fn mapped(&self) -> Vec<u64> {
        self.kept.iter().filter(|spare| spare.memory.is_some()).map(|spare| spare.bytes).collect()
    }

    /// Whether one more can be kept.
    pub(super) fn has_room(&self) -> bool {
        self.kept.len() < SPARES
    }

    pub(super) fn keep(&mut self, spare: Spare) {
        self.bytes += spare.bytes;
        self.kept.push(spare);
    }

    /// Takes the one with the nearest size; of equal ones a mapped one.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Spare> {
        self.take_best(|spare| Some((spare.bytes.abs_diff(bytes), spare.memory.is_none())))
    }

    /// Takes the smallest mapped one with room for `bytes` bytes, if it is not much larger.
    pub(super) fn take_mapped(&mut self, bytes: u64) -> Option<Spare> {
        self.take_best(|spare| {
            let mapped = spare.memory.as_ref()?.length();
            (mapped >= bytes && serves(spare.bytes, bytes)).then_some((spare.bytes, false))
        })
    }

    fn take_best(&mut self, by: impl Fn(&Spare) -> Option<(u64, bool)>) -> Option<Spare> {
        let all = self.kept.iter().enumerate().filter(|(_, spare)| spare.writers.strong_count() == 0);
        let (_, index) = all.filter_map(|(index, spare)| Some((by(spare)?, index))).min()?;
        let spare = self.kept.swap_remove(index);
        self.bytes -= spare.bytes;
        Some(spare)
    }

    /// Deletes one of them to free space.
    pub(super) fn give_up_one(&mut self) -> bool {
        let Some(spare) = self.kept.pop() else { return false };
        self.bytes -= spare.bytes;
        let _ = fs::remove_file(spare.path);
        true
    }
}

/// Whether to use a file of `have` bytes for `bytes` bytes: it has all the pages and not many more.
pub(super) fn serves(have: u64, bytes: u64) -> bool {
    have >= bytes && have - bytes <= bytes / 4 + AHEAD
}

/// Creates a file of this size at `path`, with all pages allocated and mapped. Stops and removes it when it is no longer `wanted`.
pub(super) fn make(path: &Path, bytes: u64, wanted: &dyn Fn() -> bool) -> io::Result<Option<Spare>> {
    let made = fill(path, bytes, wanted);
    if !matches!(made, Ok(Some(_))) {
        let _ = fs::remove_file(path);
    }
    let memory = made?;
    let spare =
        |memory| Spare { path: path.to_owned(), bytes, memory: Some(Arc::new(memory)), writers: Weak::new() };
    Ok(memory.map(spare))
}

fn fill(path: &Path, bytes: u64, wanted: &dyn Fn() -> bool) -> io::Result<Option<MappedFile>> {
    let file: File = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    let mut at = 0;
    while at < bytes {
        if !wanted() {
            return Ok(None);
        }
        let piece = AHEAD.min(bytes - at);
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), at, piece)?;
        at += piece;
    }
    let memory = MappedFile::of(&file, bytes)?;
    // Also touch the mapped pages: under some hypervisors that takes most of the time.
    let mut at = 0;
    while at < bytes {
        let piece = u32::try_from(AHEAD.min(bytes - at)).unwrap_or(u32::MAX);
        if !wanted() {
            return Ok(None);
        }
        if let Some(mut lent) = memory.lend(at, piece) {
            lent.bytes().fill(0);
        }
        at += u64::from(piece);
    }
    Ok(Some(memory))
}

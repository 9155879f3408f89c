//! Files in the store's memory that have their pages already: of replicas that were dropped, or made ahead of what is expected. What is
//! received into one pays for no new page. The pages of an abandoned shard are kept too: else a peer that cannot keep up would pay for new
//! pages each time, and be slower still.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use crate::os::MappedFile;

/// Files that are kept: the shards of a host with eight devices.
const SPARES: usize = 8;

/// Bytes that are made ahead at a time: between two it is seen whether they are still wanted.
const AHEAD: u64 = 32 << 20;

/// A file that nobody uses now.
#[derive(Debug)]
pub(super) struct Spare {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    /// Its memory, where it is mapped.
    pub(super) memory: Option<Arc<MappedFile>>,
    /// As long as this can be upgraded, connections may still write the abandoned shard into it.
    pub(super) writers: Weak<()>,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Spares {
    kept: Vec<Spare>,
    bytes: u64,
}

impl Spares {
    /// Bytes that they take.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Their sizes, of those that are mapped.
    pub(super) fn mapped(&self) -> Vec<u64> {
        self.kept.iter().filter(|spare| spare.memory.is_some()).map(|spare| spare.bytes).collect()
    }

    /// Whether one more is kept.
    pub(super) fn has_room(&self) -> bool {
        self.kept.len() < SPARES
    }

    pub(super) fn keep(&mut self, spare: Spare) {
        self.bytes += spare.bytes;
        self.kept.push(spare);
    }

    /// The one whose size is nearest; of equal ones one that is mapped.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Spare> {
        self.take_best(|spare| Some((spare.bytes.abs_diff(bytes), spare.memory.is_none())))
    }

    /// The smallest in whose mapped memory so many bytes find room, if that is not much more than they need.
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

    /// Gives one of them up, for room that is needed.
    pub(super) fn give_up_one(&mut self) -> bool {
        let Some(spare) = self.kept.pop() else { return false };
        self.bytes -= spare.bytes;
        let _ = fs::remove_file(spare.path);
        true
    }
}

/// Whether a file of `have` bytes is to be used for so many: all their pages are there, and not many more.
pub(super) fn serves(have: u64, bytes: u64) -> bool {
    have >= bytes && have - bytes <= bytes / 4 + AHEAD
}

/// Makes a file of that size at `path`, with all its pages and mapped. Stops, and leaves nothing, when it is not `wanted` any more.
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
    // Mapped pages are touched too: under some hypervisors that is where the time goes.
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

//! Memory of the store with allocated pages for shards that arrive at this host: created in advance and lent.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use mainstay_checkpoint::inventory::Medium;
use rustix::fs::{AtFlags, CWD, renameat, unlinkat};

use crate::os::{MappedFile, MappedRange, spawn};
use crate::peer::store::Store;
use crate::pool::available;

/// A file of the store with allocated pages. It returns to the store when it is dropped, or is given to a user.
#[derive(Debug)]
pub(crate) struct PreparedMemory<'s> {
    store: &'s Store,
    spare: Option<Spare>,
    pub(crate) file: File,
    memory: Arc<MappedFile>,
}

impl Store {
    /// Lends memory for a shard whose final place is `directory`, not the store; none if files cannot be moved there or none is ready.
    pub(crate) fn lend(&self, bytes: u64, directory: &File) -> Option<PreparedMemory<'_>> {
        if bytes == 0 || self.medium != Medium::Memory || !self.reaches(directory) {
            return None;
        }
        let mut spare = {
            let mut inner = self.inner();
            let spare = inner.spares.take_mapped(bytes)?;
            inner.lent += bytes;
            spare
        };
        let lent = self.root.join("incoming").join(self.name("lent"));
        let taken = fs::rename(&spare.path, &lent).and_then(|()| {
            let file = OpenOptions::new().read(true).write(true).open(&lent)?;
            // The part beyond the end is removed.
            file.set_len(bytes)?;
            Ok(file)
        });
        (spare.path, spare.bytes) = (lent, bytes);
        let (Ok(file), Some(memory)) = (taken, spare.memory.clone()) else {
            self.inner().lent -= bytes;
            return None;
        };
        Some(PreparedMemory { store: self, spare: Some(spare), file, memory })
    }

    /// Whether a file of the store can be moved into that directory: not to another file system or mount.
    fn reaches(&self, directory: &File) -> bool {
        let name = self.name(".mainstay-probe");
        let probe = self.root.join("incoming").join(&name);
        let moved =
            File::create_new(&probe).and_then(|_| Ok(renameat(CWD, &probe, directory, name.as_str())?));
        match moved {
            Ok(()) => unlinkat(directory, name.as_str(), AtFlags::empty()).is_ok(),
            Err(_) => {
                let _ = fs::remove_file(&probe);
                false
            }
        }
    }

    /// Prepares memory with allocated pages for shards of these sizes, as far as the quota and the host allow, so that they need no new
    /// pages when they arrive. Stops when it is no longer `wanted`.
    pub(crate) fn prepare(&self, sizes: &[u64], wanted: &dyn Fn() -> bool) {
        if self.medium != Medium::Memory {
            return;
        }
        let mut there = self.inner().spares.mapped();
        for bytes in sizes.iter().copied().filter(|bytes| *bytes > 0) {
            if let Some(at) = there.iter().position(|have| serves(*have, bytes)) {
                there.swap_remove(at);
                continue;
            }
            // A little more: the next step may be larger.
            let bytes = (bytes + bytes / 64).next_multiple_of(1 << 20);
            let fits = {
                let inner = self.inner();
                let taken = inner.used().saturating_add(inner.spares.bytes());
                inner.spares.has_room() && taken.saturating_add(bytes) <= self.quota
            };
            // Never use memory that other processes may soon need.
            if !fits || bytes > available(&self.root) / 2 {
                return;
            }
            match make(&self.root.join("spare").join(self.name("ahead")), bytes, wanted) {
                Ok(Some(spare)) => self.inner().spares.keep(spare),
                Ok(None) => return,
                Err(error) => return tracing::debug!(%error, bytes, "no memory was made ready"),
            }
        }
    }

    /// Bytes of memory that are ready for shards.
    pub(crate) fn ready(&self) -> u64 {
        self.inner().spares.mapped().iter().sum()
    }

    pub(super) fn name(&self, what: &str) -> String {
        format!("{what}-{}", self.numbers.fetch_add(1, Ordering::Relaxed))
    }
}

impl PreparedMemory<'_> {
    /// The memory for a chunk.
    pub(crate) fn memory(&self, offset: u64, length: u32) -> Option<MappedRange<'_>> {
        self.memory.lend(offset, length)
    }

    /// Gives the file away: moves it to this name in that directory. This agent no longer accesses it.
    pub(crate) fn give(mut self, directory: &File, name: &str) -> io::Result<()> {
        let Some(path) = self.spare.as_ref().map(|spare| &spare.path) else { return Ok(()) };
        renameat(CWD, path, directory, name)?;
        let Some(spare) = self.spare.take() else { return Ok(()) };
        self.store.inner().lent -= spare.bytes;
        // Unmap in the background: it takes a while, and the shard need not wait for it.
        let memory = (spare.memory, Arc::clone(&self.memory));
        let _ = spawn("ckpt-unmap", move || drop(memory));
        Ok(())
    }
}

impl Drop for PreparedMemory<'_> {
    fn drop(&mut self) {
        let Some(mut spare) = self.spare.take() else { return };
        let mut inner = self.store.inner();
        inner.lent -= spare.bytes;
        let kept = self.store.root.join("spare").join(spare.path.file_name().unwrap_or_default());
        if fs::rename(&spare.path, &kept).is_ok() {
            spare.path = kept;
            inner.spares.keep(spare);
        }
    }
}

// Files in the store's memory whose pages are already allocated: of dropped replicas, or created in advance. A shard that is received into
// one needs no new pages. The pages of an abandoned shard are kept too: otherwise a slow peer would need new pages each time
// and become even slower.

/// Maximum number of kept files: the shards of a host with eight devices.
const MAX_SPARES: usize = 8;

/// Bytes that are allocated at a time; in between, the caller is asked whether they are still wanted.
const ALLOCATION_BYTES: u64 = 32 << 20;

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
        self.kept.len() < MAX_SPARES
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
    have >= bytes && have - bytes <= bytes / 4 + ALLOCATION_BYTES
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
        let piece = ALLOCATION_BYTES.min(bytes - at);
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), at, piece)?;
        at += piece;
    }
    let memory = MappedFile::new(&file, bytes)?;
    // Also touch the mapped pages: under some hypervisors that takes most of the time.
    let mut at = 0;
    while at < bytes {
        let piece = u32::try_from(ALLOCATION_BYTES.min(bytes - at)).unwrap_or(u32::MAX);
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

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::path::Path;

    use testing::TempDir;

    use super::*;

    const MEBIBYTE: u64 = 1 << 20;

    fn store(quota: u64) -> (TempDir, Store) {
        let home = TempDir::new_in("/dev/shm").unwrap();
        let store = Store::open(home.path(), quota).unwrap();
        (home, store)
    }

    fn files(home: &Path) -> usize {
        ["incoming", "spare"].map(|name| fs::read_dir(home.join(name)).unwrap().count()).iter().sum()
    }

    #[test]
    fn memory_is_created_once_for_each_shard_and_within_the_quota() {
        let (home, store) = store(5 * MEBIBYTE);
        store.prepare(&[MEBIBYTE, MEBIBYTE / 2], &|| true);
        assert_eq!(store.ready(), 3 * MEBIBYTE, "a little more than they need, in whole mebibytes");
        store.prepare(&[MEBIBYTE, MEBIBYTE / 2], &|| true);
        assert_eq!((store.ready(), files(home.path())), (3 * MEBIBYTE, 2), "it is there already");
        store.prepare(&[MEBIBYTE / 2, MEBIBYTE / 2, 2 * MEBIBYTE], &|| true);
        assert_eq!(store.ready(), 3 * MEBIBYTE, "there is no room for it");
    }

    #[test]
    fn memory_that_is_no_longer_wanted_leaves_nothing() {
        let (home, store) = store(1 << 30);
        store.prepare(&[MEBIBYTE], &|| false);
        assert_eq!((store.ready(), files(home.path())), (0, 0));
    }

    #[test]
    fn lent_memory_returns_or_goes_to_its_user_whole_and_no_longer_than_the_shard() {
        let (home, store) = store(1 << 30);
        store.prepare(&[MEBIBYTE], &|| true);
        let theirs = TempDir::new_in("/dev/shm").unwrap();
        let directory = File::open(theirs.path()).unwrap();
        let lent = store.lend(MEBIBYTE, &directory).expect("it was made ready");
        lent.memory(0, 9).unwrap().bytes().copy_from_slice(b"another's");
        assert!(store.lend(MEBIBYTE, &directory).is_none(), "there is no second one");
        assert_eq!(store.usage().0, MEBIBYTE, "it counts while it is lent");
        drop(lent);
        assert_eq!((store.usage().0, store.ready()), (0, MEBIBYTE));
        let lent = store.lend(100, &directory).expect("it came back");
        lent.memory(0, 100).unwrap().bytes().fill(7);
        lent.give(&directory, "state").unwrap();
        let mut found = Vec::new();
        File::open(theirs.path().join("state")).unwrap().read_to_end(&mut found).unwrap();
        assert!(found == [7; 100], "nothing of the other shard is in it");
        assert_eq!((store.ready(), store.usage().0, files(home.path())), (0, 0, 0));
        assert_eq!(fs::read_dir(theirs.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn a_file_that_cannot_move_there_is_not_lent() {
        let (home, store) = store(1 << 30);
        store.prepare(&[MEBIBYTE], &|| true);
        // These files are on a separate file system.
        let elsewhere = File::open("/proc/self").unwrap();
        assert!(store.lend(MEBIBYTE, &elsewhere).is_none());
        assert_eq!((files(home.path()), store.usage().0), (1, 0));
    }
}

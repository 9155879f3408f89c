//! A shard that is being received into the store, and the right to write one of its chunks.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::os::{Lent, MappedFile};
use crate::peer::sealed::Sealed;
use crate::peer::withdrawal::WithdrawalLock;

/// A shard that is being received into the store. Several connections may send its chunks.
#[derive(Debug)]
pub struct Upload {
    /// The expected shard.
    pub sealed: Arc<Sealed>,
    /// The lock against deletion.
    pub(super) lock: Option<WithdrawalLock>,
    pub(super) file: File,
    pub(super) path: PathBuf,
    /// The file's memory, if it was used before.
    pub(super) memory: Option<Arc<MappedFile>>,
    /// Dropped with the upload: until then a connection may write into the file.
    pub(super) writers: Arc<()>,
    progress: Mutex<Progress>,
    /// Whether local copies of chunks were searched.
    searched: AtomicBool,
    /// Whether it became a replica; none before its commit. Locked while a connection commits it.
    pub(super) stored: Mutex<Option<bool>>,
}

#[derive(Debug)]
struct Progress {
    missing: BTreeSet<u32>,
    /// Chunks that a connection is sending now: no other connection writes them.
    coming: BTreeSet<u32>,
    /// Time of the last progress.
    moved: Instant,
}

/// The right to write one chunk of an upload. It is released when it is dropped.
#[derive(Debug)]
pub struct Claim<'u> {
    upload: &'u Upload,
    chunk: u32,
}

impl Upload {
    /// Creates an upload without any chunk.
    pub(super) fn new(
        (sealed, lock): (Sealed, Option<WithdrawalLock>),
        file: File,
        path: PathBuf,
        memory: Option<Arc<MappedFile>>,
    ) -> Upload {
        let missing = (0..sealed.chunks()).collect();
        Upload {
            sealed: Arc::new(sealed),
            lock,
            file,
            path,
            memory,
            writers: Arc::default(),
            progress: Mutex::new(Progress { missing, coming: BTreeSet::new(), moved: Instant::now() }),
            searched: AtomicBool::new(false),
            stored: Mutex::new(None),
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The numbers of the missing chunks.
    pub fn missing(&self) -> Vec<u32> {
        let progress = self.progress();
        progress.missing.union(&progress.coming).copied().collect()
    }

    /// The right to write a chunk; none if it is already stored, or another connection is sending it.
    pub fn claim(&self, chunk: u32) -> Option<Claim<'_>> {
        let mut progress = self.progress();
        progress.moved = Instant::now();
        if !progress.missing.remove(&chunk) {
            return None;
        }
        progress.coming.insert(chunk);
        Some(Claim { upload: self, chunk })
    }

    /// Whether to search for local copies of chunks now. Only the first connection does, because it requests the rest
    /// afterwards. A later search would claim chunks that the first connection is sending.
    pub fn search_begins(&self) -> bool {
        !self.searched.swap(true, Ordering::SeqCst)
    }

    /// Time since the last progress.
    pub fn idle(&self) -> Duration {
        self.progress().moved.elapsed()
    }
}

impl Claim<'_> {
    /// Writes a part of the chunk.
    ///
    /// # Errors
    /// The disk fails.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.upload.file.write_all_at(bytes, offset)
    }

    /// The memory for the chunk, if the file is mapped; otherwise it must be written.
    pub fn memory(&self, offset: u64, length: u32) -> Option<Lent<'_>> {
        self.upload.memory.as_ref()?.lend(offset, length)
    }

    /// Records that the whole chunk is verified and written.
    pub fn done(self) {
        self.upload.progress().coming.remove(&self.chunk);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut progress = self.upload.progress();
        progress.moved = Instant::now();
        if progress.coming.remove(&self.chunk) {
            progress.missing.insert(self.chunk);
        }
    }
}

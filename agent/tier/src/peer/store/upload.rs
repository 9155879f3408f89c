//! A shard on its way into the store, and the right to write one of its chunks.

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

/// A shard on its way into the store. Several connections may bring its chunks.
#[derive(Debug)]
pub struct Upload {
    /// What it must become.
    pub sealed: Arc<Sealed>,
    /// Who may have it deleted.
    pub(super) lock: Option<WithdrawalLock>,
    pub(super) file: File,
    pub(super) path: PathBuf,
    /// The file's memory, where it was used before.
    pub(super) memory: Option<Arc<MappedFile>>,
    /// Dropped with the upload: until then a connection may write into the file.
    pub(super) writers: Arc<()>,
    progress: Mutex<Progress>,
    /// Whether chunks that lie here already were looked for.
    searched: AtomicBool,
    /// Whether it became a replica; none before its commit. Held while a connection commits it.
    pub(super) stored: Mutex<Option<bool>>,
}

#[derive(Debug)]
struct Progress {
    missing: BTreeSet<u32>,
    /// Chunks that a connection is bringing now: nobody else writes them.
    coming: BTreeSet<u32>,
    /// When something last happened.
    moved: Instant,
}

/// The right to write one chunk of an upload. It is given back when it is dropped.
#[derive(Debug)]
pub struct Claim<'u> {
    upload: &'u Upload,
    chunk: u32,
}

impl Upload {
    /// One of which nothing has come.
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

    /// The numbers of the chunks that have not come.
    pub fn missing(&self) -> Vec<u32> {
        let progress = self.progress();
        progress.missing.union(&progress.coming).copied().collect()
    }

    /// The right to write a chunk; none if it lies there already, or another connection is bringing it.
    pub fn claim(&self, chunk: u32) -> Option<Claim<'_>> {
        let mut progress = self.progress();
        progress.moved = Instant::now();
        if !progress.missing.remove(&chunk) {
            return None;
        }
        progress.coming.insert(chunk);
        Some(Claim { upload: self, chunk })
    }

    /// Whether chunks that lie here already are to be looked for now: only the first connection does, for it asks for the rest
    /// afterwards. Another one that came later would hold back chunks that the first is bringing.
    pub fn search_begins(&self) -> bool {
        !self.searched.swap(true, Ordering::SeqCst)
    }

    /// How long nothing has happened.
    pub fn idle(&self) -> Duration {
        self.progress().moved.elapsed()
    }
}

impl Claim<'_> {
    /// Writes a piece of the chunk.
    ///
    /// # Errors
    /// The disk fails.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.upload.file.write_all_at(bytes, offset)
    }

    /// The memory in which the chunk is to lie, where the file is mapped; else it is to be written.
    pub fn memory(&self, offset: u64, length: u32) -> Option<Lent<'_>> {
        self.upload.memory.as_ref()?.lend(offset, length)
    }

    /// The whole chunk was verified and written.
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

//! What is kept for others: replicas in a directory of this agent's own, on a tmpfs or a disk, within a quota.
//!
//! ```text
//! <store>/replicas/<16 hex digits>/step-000000000010.3/rank-00001/{shard,manifest.json}
//!                                                  rank-00001.2/…   piece number 2 of one
//!         incoming/<root>      a shard on its way
//!         spare/<name>         files of dropped replicas, used again, and others made ahead: their pages are there already, and in memory stay mapped
//! ```
//!
//! The digits are a hash of job and run; nothing that a peer sends becomes part of a path but numbers. A replica is there
//! when its manifest is, which appears last and at once. What is found at a start is read and compared before it is offered.

pub mod place;
mod ready;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mainstay_core::checkpoint::inventory::{Medium, Shard, StepKey};

use self::place::Private;
use super::sealed::{Sealed, open_plainly};
use super::spare::{Spare, Spares};
use crate::os::{Lent, MappedFile, Outgoing};
pub(crate) use ready::Ready;

/// The file's name in the store, whatever its owner called it.
const DATA: &str = "shard";

/// Replicas, within a quota.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    quota: u64,
    medium: Medium,
    inner: Mutex<Inner>,
    /// Tells files apart that have no root.
    numbers: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    replicas: BTreeMap<String, Replica>,
    uploads: BTreeMap<String, Arc<Upload>>,
    spares: Spares,
    /// Bytes of memory that is lent.
    lent: u64,
}

#[derive(Clone, Debug)]
struct Replica {
    sealed: Arc<Sealed>,
    directory: PathBuf,
    /// Since when it is here, as far as this process knows.
    since: Instant,
    verified: bool,
    memory: Option<Arc<MappedFile>>,
}

/// A shard on its way into the store. Several connections may bring its chunks.
#[derive(Debug)]
pub struct Upload {
    /// What it must become.
    pub sealed: Arc<Sealed>,
    file: File,
    path: PathBuf,
    /// The file's memory, where it was used before.
    memory: Option<Arc<MappedFile>>,
    progress: Mutex<Progress>,
    /// Whether chunks that lie here already were looked for.
    searched: AtomicBool,
    /// Whether it became a replica; none before its commit. Held while a connection commits it.
    stored: Mutex<Option<bool>>,
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

/// Why a shard is not taken.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no room.
    #[error("the store is full: {wanted} bytes are wanted and {free} of {quota} are free")]
    Full {
        /// Bytes of the shard.
        wanted: u64,
        /// Bytes that are free.
        free: u64,
        /// The quota.
        quota: u64,
    },
    /// Chunks have not come.
    #[error("{0} chunk(s) have not come")]
    Missing(usize),
    /// The disk.
    #[error("{what}: {source}")]
    Disk {
        /// What was done.
        what: String,
        /// What came of it.
        source: io::Error,
    },
}

/// What becomes of an offer.
#[derive(Debug)]
pub enum Offer {
    /// It lies here already.
    Here,
    /// It is wanted.
    Wanted(Arc<Upload>),
}

fn disk(what: &str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let what = format!("{what} {}", path.display());
    move |source| StoreError::Disk { what, source }
}

impl Store {
    /// Opens the store at `root`, and makes it where it is not there yet.
    ///
    /// # Errors
    /// The directory cannot be made or read.
    pub fn open(root: &Path, quota: u64) -> Result<Store, StoreError> {
        for name in ["replicas", "incoming", "spare"] {
            make_private(&root.join(name))?;
        }
        // What is stored is on the disk only when the directory is that it is stored in.
        sync_directory(root).map_err(disk("bringing to the disk", root))?;
        // Half of a shard is worth nothing to a process that does not know which half.
        for name in ["incoming", "spare"] {
            for entry in fs::read_dir(root.join(name)).map_err(disk("reading", root))?.flatten() {
                let _ = fs::remove_file(entry.path());
            }
        }
        let medium = match rustix::fs::statfs(root) {
            Ok(of) if of.f_type == 0x0102_1994 => Medium::Memory,
            _ => Medium::Disk,
        };
        let mut inner = Inner::default();
        for (directory, sealed) in place::found(&Private, &root.join("replicas")) {
            // One without a good manifest is not there; its bytes go.
            match sealed {
                Some(sealed) => {
                    let replica = Replica {
                        sealed: Arc::new(sealed),
                        directory,
                        since: Instant::now(),
                        verified: false,
                        memory: None,
                    };
                    inner.replicas.insert(replica.sealed.shard.root.clone(), replica);
                }
                None => drop(fs::remove_dir_all(directory)),
            }
        }
        Ok(Store {
            root: root.to_owned(),
            quota,
            medium,
            inner: Mutex::new(inner),
            numbers: AtomicU64::new(0),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compares everything that was found at the start with its manifest; what is not as it was is deleted. Tells of each.
    pub fn verify_all(&self, mut damaged: impl FnMut(&Shard)) {
        let open: Vec<Replica> =
            self.inner().replicas.values().filter(|replica| !replica.verified).cloned().collect();
        for replica in open {
            let shard = &replica.sealed.shard;
            if place::is_whole(&Private, &replica.directory, &replica.sealed) {
                if let Some(held) = self.inner().replicas.get_mut(&shard.root) {
                    held.verified = true;
                }
            } else {
                damaged(shard);
                self.remove(&shard.root);
            }
        }
    }

    /// What lies here: each with where it lies and whether it was compared with its manifest since the start.
    pub fn list(&self) -> Vec<(Shard, Medium, bool)> {
        let inner = self.inner();
        inner.replicas.values().map(|of| (of.sealed.shard.clone(), self.medium, of.verified)).collect()
    }

    /// Bytes that are used, and the quota.
    pub fn usage(&self) -> (u64, u64) {
        (self.inner().used(), self.quota)
    }

    /// A replica by its root: what it is, its file, and the file's memory where that is mapped.
    pub fn open_replica(&self, root: &str) -> Option<(Arc<Sealed>, File, Option<Outgoing>)> {
        let replica = self.inner().replicas.get(root).cloned()?;
        let file = open_plainly(&replica.directory.join(DATA)).ok()?;
        let bytes = replica.sealed.shard.bytes;
        let memory = replica.memory.filter(|memory| memory.length() >= bytes);
        Some((replica.sealed, file, memory.map(|memory| memory.outgoing())))
    }

    /// Takes up a shard that is offered, if there is room once `deletable` steps are gone.
    ///
    /// # Errors
    /// There is no room, or the disk fails.
    pub fn offer(&self, sealed: Sealed, deletable: &[StepKey]) -> Result<Offer, StoreError> {
        let root = sealed.shard.root.clone();
        {
            let mut inner = self.inner();
            if inner.replicas.get(&root).is_some_and(|replica| replica.verified) {
                return Ok(Offer::Here);
            }
            if let Some(upload) = inner.uploads.get(&root) {
                return Ok(Offer::Wanted(Arc::clone(upload)));
            }
            self.make_room(&mut inner, sealed.shard.bytes, deletable)?;
        }
        self.begin(sealed)
    }

    fn begin(&self, sealed: Sealed) -> Result<Offer, StoreError> {
        let root = sealed.shard.root.clone();
        let path = self.root.join("incoming").join(&root);
        let bytes = sealed.shard.bytes;
        let spare = self.inner().spares.take(bytes);
        if let Some(spare) = &spare {
            fs::rename(&spare.path, &path).map_err(disk("using again", &spare.path))?;
        }
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = open.map_err(disk("making", &path))?;
        let was = spare.as_ref().map(|spare| spare.bytes);
        // Memory that is too short goes before its file gets another length.
        let mut memory = spare
            .and_then(|spare| spare.memory)
            .filter(|memory| memory.length() >= bytes || same_pages(memory.length(), bytes));
        file.set_len(bytes).map_err(disk("sizing", &path))?;
        if bytes > 0 && (memory.is_none() || was.is_none_or(|was| was < bytes)) {
            // Room is had now or not at all: no shard fails in its middle for want of it.
            let all = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes);
            if let Err(error) = all {
                let _ = fs::remove_file(&path);
                return Err(disk("making room for", &path)(error.into()));
            }
            // A file that is used again will be so once more: bytes then go from the socket to where they stay.
            if memory.is_none() && was.is_some() && self.medium == Medium::Memory {
                memory = MappedFile::of(&file, bytes).ok().map(Arc::new);
            }
        }
        let missing = (0..sealed.chunks()).collect();
        let progress = Mutex::new(Progress { missing, coming: BTreeSet::new(), moved: Instant::now() });
        let upload = Arc::new(Upload {
            sealed: Arc::new(sealed),
            file,
            path,
            memory,
            progress,
            searched: AtomicBool::new(false),
            stored: Mutex::new(None),
        });
        self.inner().uploads.insert(root, Arc::clone(&upload));
        Ok(Offer::Wanted(upload))
    }

    fn make_room(&self, inner: &mut Inner, wanted: u64, deletable: &[StepKey]) -> Result<(), StoreError> {
        let fits = |inner: &Inner| inner.used().saturating_add(wanted) <= self.quota;
        if fits(inner) {
            return Ok(());
        }
        for step in deletable {
            let roots: Vec<String> = inner
                .replicas
                .values()
                .filter(|replica| replica.sealed.shard.of == *step)
                .map(|replica| replica.sealed.shard.root.clone())
                .collect();
            roots.iter().for_each(|root| self.drop_replica(inner, root));
        }
        // A spare of the right size is used; all others go if that is what it takes.
        while inner.used().saturating_add(inner.spares.bytes()).saturating_add(wanted) > self.quota {
            if !inner.spares.give_up_one() {
                break;
            }
        }
        if fits(inner) {
            return Ok(());
        }
        Err(StoreError::Full { wanted, free: self.quota.saturating_sub(inner.used()), quota: self.quota })
    }

    /// Makes an upload a replica: bytes on the disk first, then its place, then its manifest. A second connection that
    /// commits the same upload waits, and gets the outcome of the first.
    ///
    /// # Errors
    /// Chunks are missing, or the disk fails.
    pub fn commit(&self, upload: &Upload) -> Result<(), StoreError> {
        let missing = upload.missing().len();
        if missing > 0 {
            return Err(StoreError::Missing(missing));
        }
        let sealed = &upload.sealed;
        let directory = place::home(&self.root.join("replicas"), &sealed.shard);
        let mut stored = upload.stored.lock().unwrap_or_else(PoisonError::into_inner);
        match *stored {
            Some(true) => return Ok(()),
            Some(false) => {
                return Err(disk("storing", &directory)(io::Error::other("an earlier commit failed")));
            }
            None => {}
        }
        let sync = || upload.file.sync_data();
        let put = place::put(&Private, &upload.path, &directory, &sealed.manifest, &sync);
        *stored = Some(put.is_ok());
        let mut inner = self.inner();
        inner.uploads.remove(&sealed.shard.root);
        if let Err(error) = put {
            drop(inner);
            // Pages that could not be written may look clean from now on: nothing of this file is believed again, and nothing is left of it.
            let _ = fs::remove_file(&upload.path);
            self.look_after_failure(&directory);
            return Err(disk("storing", &directory)(error));
        }
        inner.replicas.retain(|_, replica| replica.directory != directory);
        let memory = upload.memory.clone();
        let replica =
            Replica { sealed: Arc::clone(sealed), directory, since: Instant::now(), verified: true, memory };
        inner.replicas.insert(sealed.shard.root.clone(), replica);
        Ok(())
    }

    /// After a commit that failed: what was in its place before is still a replica, or it is none.
    fn look_after_failure(&self, directory: &Path) {
        let manifest = fs::symlink_metadata(directory.join(mainstay_checkpoint::MANIFEST_NAME));
        if manifest.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            self.inner().replicas.retain(|_, replica| replica.directory != directory);
            place::take_down(&Private, directory, None);
        }
    }

    /// A file without a name for so many bytes, which is gone when it is closed: it does not count within the quota.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn scratch(&self, bytes: u64) -> io::Result<File> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let path = self.root.join("incoming").join(format!("scratch.{number}"));
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        fs::remove_file(&path)?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes.max(1))?;
        file.set_len(bytes)?;
        Ok(file)
    }

    /// Abandons an upload, unless a connection commits it or has committed it.
    pub fn abandon(&self, upload: &Upload) {
        let Ok(mut stored) = upload.stored.try_lock() else { return };
        stored.get_or_insert(false);
        if self.inner().uploads.remove(&upload.sealed.shard.root).is_some() {
            let _ = fs::remove_file(&upload.path);
        }
    }

    /// Gives up what nobody has brought anything of for `patience`: its owner is gone.
    pub fn sweep(&self, patience: Duration) {
        let idle: Vec<Arc<Upload>> =
            self.inner().uploads.values().filter(|upload| upload.idle() > patience).cloned().collect();
        idle.iter().for_each(|upload| self.abandon(upload));
    }

    /// Deletes a replica; whether it was there.
    pub fn remove(&self, root: &str) -> bool {
        let mut inner = self.inner();
        let there = inner.replicas.contains_key(root);
        self.drop_replica(&mut inner, root);
        there
    }

    /// Since when a replica is here.
    pub(crate) fn since(&self, root: &str) -> Option<Instant> {
        self.inner().replicas.get(root).map(|replica| replica.since)
    }

    /// The same, and what has come of one that is on its way is given up.
    pub fn forget(&self, root: &str) -> bool {
        let coming = self.inner().uploads.get(root).cloned();
        coming.iter().for_each(|upload| self.abandon(upload));
        self.remove(root)
    }

    /// Its manifest goes first, so that it is either there or not; its file is kept to be used again.
    fn drop_replica(&self, inner: &mut Inner, root: &str) {
        let Some(replica) = inner.replicas.remove(root) else { return };
        let path = self.root.join("spare").join(root);
        let bytes = replica.sealed.shard.bytes;
        let spare = inner.spares.has_room().then_some(path.as_path());
        if place::take_down(&Private, &replica.directory, spare) {
            inner.spares.keep(Spare { path, bytes, memory: replica.memory });
        }
    }
}

impl Inner {
    /// Bytes of replicas and of what is on its way. Spares do not count: they go when room is needed.
    fn used(&self) -> u64 {
        let held = self.replicas.values().map(|replica| replica.sealed.shard.bytes);
        let coming = self.uploads.values().map(|upload| upload.sealed.shard.bytes);
        held.chain(coming).fold(self.lent, u64::saturating_add)
    }
}

impl Upload {
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

/// Whether files of these sizes have as many pages.
fn same_pages(one: u64, other: u64) -> bool {
    // Pages are larger on some machines; these sizes then count as different more often than they need.
    const PAGE: u64 = 4096;
    one.div_ceil(PAGE) == other.div_ceil(PAGE)
}

fn make_private(directory: &Path) -> Result<(), StoreError> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(directory).map_err(disk("making", directory))
}

/// Writes a small file so that it is there whole or not at all, also after a crash of the host.
pub(crate) fn write_at_once(directory: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let aside = directory.join(format!(".{name}.tmp"));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&aside, directory.join(name))?;
    sync_directory(directory)
}

pub(crate) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

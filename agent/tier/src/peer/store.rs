//! Replicas for other hosts, in a directory of this agent on a tmpfs or a disk, within a quota.
//!
//! ```text
//! <store>/replicas/<16 hex digits>/step-000000000010.3/rank-00001/{shard,manifest.json,lock.…}
//!                                                  rank-00001.2/…   piece number 2 of one
//!         incoming/<root>      a shard that is being received
//!         spare/<name>         files to use again: of dropped replicas and abandoned uploads, or created in advance, with allocated pages
//! ```
//!
//! The digits are a hash of job and run. Of what a peer sends, only numbers become part of a path. A replica exists
//! when its manifest does, which appears last and atomically. Replicas found at a start are verified in
//! the background. Until then only a restore uses them, which verifies the bytes itself.

mod prepared_memory;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use mainstay_checkpoint::inventory::{Medium, Shard, StepKey};
use mainstay_checkpoint::owner::owner;
use mainstay_checkpoint_format::{MANIFEST_NAME, MAX_MANIFEST_BYTES};
pub(crate) use prepared_memory::PreparedMemory;

use crate::aside::sync_directory;
use crate::disk::{FileSink, Sink, Volume, remove_tree};
use crate::lock;
use crate::os::{MappedFile, MappedRange, SendMapping};
use crate::peer::store::prepared_memory::{Spare, Spares};
use crate::peer::withdrawal::{WithdrawalKey, WithdrawalLock};
use crate::seal::{ReadAt, SealedShard, open_plainly};

/// Name of the file in the store, regardless of its name at the owner.
const DATA_NAME: &str = "shard";

/// A store of replicas with a quota.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    quota: u64,
    medium: Medium,
    withdrawal_key: WithdrawalKey,
    inner: Mutex<Inner>,
    /// Numbers for files without a root.
    numbers: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    replicas: BTreeMap<String, Replica>,
    uploads: BTreeMap<String, Arc<IncomingShard>>,
    spares: Spares,
    /// Bytes of lent memory.
    lent: u64,
}

#[derive(Clone, Debug)]
struct Replica {
    sealed: Arc<SealedShard>,
    directory: PathBuf,
    /// Time since which it is here, as far as this process knows.
    since: Instant,
    verified: bool,
    memory: Option<Arc<MappedFile>>,
    /// The lock against deletion; none if the sending agent uses no locks.
    lock: Option<WithdrawalLock>,
}

/// The result of an offer.
#[derive(Debug)]
pub enum Offer {
    /// The shard is already stored.
    Here,
    /// The shard is wanted.
    Missing(Arc<IncomingShard>),
}

impl Store {
    /// Opens the store at `root`; creates it if it does not exist.
    pub fn open(root: &Path, quota: u64) -> Result<Store, StoreError> {
        for name in ["replicas", "incoming", "spare"] {
            make_private(&root.join(name))?;
        }
        // Replicas are durable only if the entry of their directory is.
        sync_directory(root).map_err(disk("bringing to the disk", root))?;
        // A partial shard is useless to a process that does not know which parts it has.
        for name in ["incoming", "spare"] {
            for entry in fs::read_dir(root.join(name)).map_err(disk("reading", root))?.flatten() {
                let _ = fs::remove_file(entry.path());
            }
        }
        let medium = match rustix::fs::statfs(root) {
            Ok(found) if found.f_type == 0x0102_1994 => Medium::Memory,
            _ => Medium::Disk,
        };
        let withdrawal_key =
            WithdrawalKey::at(root).map_err(disk("reading or making the withdrawal key in", root))?;
        let mut inner = Inner::default();
        for (directory, sealed) in stored_replicas(&PrivateVolume, &root.join("replicas")) {
            // A replica without a valid manifest does not count; its files are deleted.
            match sealed {
                Some(sealed) => {
                    let replica = Replica {
                        lock: lock_of(&PrivateVolume, &directory, &sealed),
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
            withdrawal_key,
            inner: Mutex::new(inner),
            numbers: AtomicU64::new(0),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Verifies all replicas that were found at the start; reports and deletes damaged ones.
    pub fn verify_all(&self, mut damaged: impl FnMut(&Shard)) {
        let open: Vec<Replica> =
            self.inner().replicas.values().filter(|replica| !replica.verified).cloned().collect();
        for replica in open {
            let shard = &replica.sealed.shard;
            if is_whole(&PrivateVolume, &replica.directory, &replica.sealed) {
                if let Some(held) = self.inner().replicas.get_mut(&shard.root) {
                    held.verified = true;
                }
            } else {
                damaged(shard);
                self.remove(&shard.root);
            }
        }
    }

    /// The replicas, each with its medium and whether it was verified since the start.
    pub fn list(&self) -> Vec<(Shard, Medium, bool)> {
        let inner = self.inner();
        inner
            .replicas
            .values()
            .map(|shard| (shard.sealed.shard.clone(), self.medium, shard.verified))
            .collect()
    }

    /// Used bytes, and the quota.
    pub fn usage(&self) -> (u64, u64) {
        (self.inner().used(), self.quota)
    }

    /// Opens a replica by its root: its identity, its file, and the file's memory if mapped.
    pub fn open_replica(&self, root: &str) -> Option<(Arc<SealedShard>, File, Option<SendMapping>)> {
        let replica = self.inner().replicas.get(root).cloned()?;
        let file = open_plainly(&replica.directory.join(DATA_NAME)).ok()?;
        let bytes = replica.sealed.shard.bytes;
        let memory = replica.memory.filter(|memory| memory.length() >= bytes);
        Some((replica.sealed, file, memory.map(|memory| memory.outgoing())))
    }

    /// Accepts an offered shard if there is room after deleting `deletable` steps. The secret for `lock` allows its deletion; a shard that
    /// is stored or being received keeps its lock.
    pub fn offer(
        &self,
        sealed: SealedShard,
        deletable: &[StepKey],
        lock: Option<WithdrawalLock>,
    ) -> Result<Offer, StoreError> {
        let root = sealed.shard.root.clone();
        {
            let mut inner = self.inner();
            if inner.replicas.get(&root).is_some_and(|replica| replica.verified) {
                return Ok(Offer::Here);
            }
            if let Some(upload) = inner.uploads.get(&root) {
                return Ok(Offer::Missing(Arc::clone(upload)));
            }
            self.make_room(&mut inner, &sealed.shard, deletable)?;
        }
        self.begin(sealed, lock)
    }

    fn begin(&self, sealed: SealedShard, lock: Option<WithdrawalLock>) -> Result<Offer, StoreError> {
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
        // Drop memory that is too short before its file gets another length.
        let mut memory = spare
            .and_then(|spare| spare.memory)
            .filter(|memory| memory.length() >= bytes || same_pages(memory.length(), bytes));
        file.set_len(bytes).map_err(disk("sizing", &path))?;
        if bytes > 0 && (memory.is_none() || was.is_none_or(|was| was < bytes)) {
            // Reserve the room now, so that no shard fails halfway.
            let all = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes);
            if let Err(error) = all {
                let _ = fs::remove_file(&path);
                return Err(disk("making room for", &path)(error.into()));
            }
            // A reused file is likely to be reused again: map it, so that bytes go directly from the socket into its memory.
            if memory.is_none() && was.is_some() && self.medium == Medium::Memory {
                memory = MappedFile::new(&file, bytes).ok().map(Arc::new);
            }
        }
        let upload = Arc::new(IncomingShard::new((sealed, lock), file, path, memory));
        self.inner().uploads.insert(root, Arc::clone(&upload));
        Ok(Offer::Missing(upload))
    }

    /// Turns an upload into a replica: syncs its bytes first, then moves it into place, then writes its manifest. A second connection that
    /// commits the same upload waits for the result of the first.
    ///
    /// # Errors
    /// Chunks are missing, or the disk fails.
    pub fn commit(&self, upload: &IncomingShard) -> Result<(), StoreError> {
        let missing = upload.missing().len();
        if missing > 0 {
            return Err(StoreError::Missing(missing));
        }
        let sealed = &upload.sealed;
        let directory = home(&self.root.join("replicas"), &sealed.shard);
        let mut stored = lock(&upload.stored);
        match *stored {
            Some(true) => return Ok(()),
            Some(false) => {
                return Err(disk("storing", &directory)(io::Error::other("an earlier commit failed")));
            }
            None => {}
        }
        let sync = || upload.file.sync_data();
        let lock = upload.lock.map(|lock| lock.file_name(sealed.key));
        let put = put(&PrivateVolume, &upload.path, &directory, &sealed.manifest, lock.as_deref(), &sync);
        *stored = Some(put.is_ok());
        let mut inner = self.inner();
        inner.uploads.remove(&sealed.shard.root);
        if let Err(error) = put {
            drop(inner);
            // Pages that could not be written may look clean from now on: do not trust or keep this file.
            let _ = fs::remove_file(&upload.path);
            self.look_after_failure(&directory);
            return Err(disk("storing", &directory)(error));
        }
        inner.replicas.retain(|_, replica| replica.directory != directory);
        let memory = upload.memory.clone();
        let replica = Replica {
            sealed: Arc::clone(sealed),
            directory,
            since: Instant::now(),
            verified: true,
            memory,
            lock: upload.lock,
        };
        inner.replicas.insert(sealed.shard.root.clone(), replica);
        Ok(())
    }

    /// After a failed commit: drops a previous replica in the same place if its manifest is gone.
    fn look_after_failure(&self, directory: &Path) {
        let manifest = fs::symlink_metadata(directory.join(mainstay_checkpoint_format::MANIFEST_NAME));
        if manifest.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            self.inner().replicas.retain(|_, replica| replica.directory != directory);
            take_down(&PrivateVolume, directory, None);
        }
    }

    /// An unnamed file for `bytes` bytes, which is deleted when it is closed. It does not count towards the quota.
    pub(crate) fn scratch(&self, bytes: u64) -> io::Result<File> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let path = self.root.join("incoming").join(format!("scratch.{number}"));
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        fs::remove_file(&path)?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes.max(1))?;
        file.set_len(bytes)?;
        Ok(file)
    }

    /// Abandons an upload, unless a connection is committing or has committed it. Its file is kept for reuse when no connection holds
    /// the upload.
    pub fn abandon(&self, upload: &IncomingShard) {
        let Ok(mut stored) = upload.stored.try_lock() else { return };
        stored.get_or_insert(false);
        let mut inner = self.inner();
        let root = &upload.sealed.shard.root;
        if !inner.uploads.get(root).is_some_and(|coming| std::ptr::eq(Arc::as_ptr(coming), upload)) {
            return;
        }
        inner.uploads.remove(root);
        let path = self.root.join("spare").join(self.name("abandoned"));
        if !inner.spares.has_room() || fs::rename(&upload.path, &path).is_err() {
            let _ = fs::remove_file(&upload.path);
            return;
        }
        let (bytes, memory) = (upload.sealed.shard.bytes, upload.memory.clone());
        inner.spares.keep(Spare { path, bytes, memory, writers: Arc::downgrade(&upload.writers) });
    }

    /// Abandons uploads without a new chunk for `patience`: their owner is gone.
    pub fn sweep(&self, patience: Duration) {
        let idle: Vec<Arc<IncomingShard>> =
            self.inner().uploads.values().filter(|upload| upload.idle() > patience).cloned().collect();
        idle.iter().for_each(|upload| self.abandon(upload));
    }

    /// Deletes a replica. Returns whether it existed.
    pub fn remove(&self, root: &str) -> bool {
        let mut inner = self.inner();
        let there = inner.replicas.contains_key(root);
        self.drop_replica(&mut inner, root);
        there
    }

    /// Deletes a replica or a partial upload for a peer, if the peer presents the secret for its lock or there is no lock.
    pub fn withdraw(&self, root: &str, secret: Option<&str>) -> WithdrawalResult {
        let lock = {
            let inner = self.inner();
            let of_upload = inner.uploads.get(root).map(|upload| upload.lock);
            inner.replicas.get(root).map(|replica| replica.lock).or(of_upload)
        };
        match lock {
            None => WithdrawalResult::NotHere,
            Some(Some(lock)) if !secret.is_some_and(|secret| lock.is_opened_by(secret)) => {
                WithdrawalResult::Refused
            }
            Some(_) if self.forget(root) => WithdrawalResult::Deleted,
            Some(_) => WithdrawalResult::NotHere,
        }
    }

    /// The key for the secrets of this agent.
    pub(crate) fn withdrawal_key(&self) -> &WithdrawalKey {
        &self.withdrawal_key
    }

    /// The lock of a replica, which is passed on to other holders.
    pub(crate) fn lock_of(&self, root: &str) -> Option<WithdrawalLock> {
        self.inner().replicas.get(root)?.lock
    }

    /// Whether a newer step of this shard's rank is being received, with a chunk within the last `patience`.
    pub(crate) fn newer_is_coming(&self, shard: &Shard, patience: Duration) -> bool {
        let age = |key: &StepKey| (key.attempt, key.step);
        let is_newer = |other: &Shard| {
            other.key.run == shard.key.run && other.rank == shard.rank && age(&other.key) > age(&shard.key)
        };
        self.inner().uploads.values().any(|upload| is_newer(&upload.sealed.shard) && upload.idle() < patience)
    }

    /// The steps of which a shard is being received.
    pub(crate) fn coming(&self) -> BTreeSet<StepKey> {
        self.inner().uploads.values().map(|upload| upload.sealed.shard.key.clone()).collect()
    }

    /// The time since which a replica is here.
    pub(crate) fn since(&self, root: &str) -> Option<Instant> {
        self.inner().replicas.get(root).map(|replica| replica.since)
    }

    /// Same as [`Store::remove`], and abandons an upload of the shard.
    pub fn forget(&self, root: &str) -> bool {
        let coming = self.inner().uploads.get(root).cloned();
        coming.iter().for_each(|upload| self.abandon(upload));
        self.remove(root)
    }

    /// Removes the manifest first, so that the replica exists completely or not at all; keeps its file for reuse.
    fn drop_replica(&self, inner: &mut Inner, root: &str) {
        let Some(replica) = inner.replicas.remove(root) else { return };
        let path = self.root.join("spare").join(root);
        let bytes = replica.sealed.shard.bytes;
        let spare = inner.spares.has_room().then_some(path.as_path());
        if take_down(&PrivateVolume, &replica.directory, spare) {
            inner.spares.keep(Spare { path, bytes, memory: replica.memory, writers: Weak::new() });
        }
    }
}

/// Whether files of these sizes have the same number of pages.
fn same_pages(one: u64, other: u64) -> bool {
    // Pages are larger on some machines: then sizes count as different more often than necessary.
    const PAGE_BYTES: u64 = 4096;
    one.div_ceil(PAGE_BYTES) == other.div_ceil(PAGE_BYTES)
}

/// The result of a withdrawal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithdrawalResult {
    /// It was deleted.
    Deleted,
    /// It was not here.
    NotHere,
    /// Another host sent it.
    Refused,
}

fn make_private(directory: &Path) -> Result<(), StoreError> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(directory).map_err(disk("making", directory))
}

// A shard that is being received into the store, and the right to write one of its chunks.

/// A shard that is being received into the store. Several connections may send its chunks.
#[derive(Debug)]
pub struct IncomingShard {
    /// The expected shard.
    pub sealed: Arc<SealedShard>,
    /// The lock against deletion.
    lock: Option<WithdrawalLock>,
    file: File,
    path: PathBuf,
    /// The file's memory, if it was used before.
    memory: Option<Arc<MappedFile>>,
    /// Dropped with the upload: until then a connection may write into the file.
    writers: Arc<()>,
    progress: Mutex<ReceiveState>,
    /// Whether local copies of chunks were searched.
    searched: AtomicBool,
    /// Whether it became a replica; none before its commit. Locked while a connection commits it.
    stored: Mutex<Option<bool>>,
}

#[derive(Debug)]
struct ReceiveState {
    missing: BTreeSet<u32>,
    /// Chunks that a connection is sending now: no other connection writes them.
    coming: BTreeSet<u32>,
    /// Time of the last progress.
    moved: Instant,
}

/// The right to write one chunk of an upload. It is released when it is dropped.
#[derive(Debug)]
pub struct ChunkClaim<'u> {
    upload: &'u IncomingShard,
    chunk: u32,
}

impl IncomingShard {
    /// Creates an upload without any chunk.
    fn new(
        (sealed, lock): (SealedShard, Option<WithdrawalLock>),
        file: File,
        path: PathBuf,
        memory: Option<Arc<MappedFile>>,
    ) -> IncomingShard {
        let missing = (0..sealed.chunks()).collect();
        IncomingShard {
            sealed: Arc::new(sealed),
            lock,
            file,
            path,
            memory,
            writers: Arc::default(),
            progress: Mutex::new(ReceiveState { missing, coming: BTreeSet::new(), moved: Instant::now() }),
            searched: AtomicBool::new(false),
            stored: Mutex::new(None),
        }
    }

    fn progress(&self) -> MutexGuard<'_, ReceiveState> {
        lock(&self.progress)
    }

    /// The numbers of the missing chunks.
    pub fn missing(&self) -> Vec<u32> {
        let progress = self.progress();
        progress.missing.union(&progress.coming).copied().collect()
    }

    /// The right to write a chunk; none if it is already stored, or another connection is sending it.
    pub fn claim(&self, chunk: u32) -> Option<ChunkClaim<'_>> {
        let mut progress = self.progress();
        progress.moved = Instant::now();
        if !progress.missing.remove(&chunk) {
            return None;
        }
        progress.coming.insert(chunk);
        Some(ChunkClaim { upload: self, chunk })
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

impl ChunkClaim<'_> {
    /// Writes a part of the chunk.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.upload.file.write_all_at(bytes, offset)
    }

    /// The memory for the chunk, if the file is mapped; otherwise it must be written.
    pub fn memory(&self, offset: u64, length: u32) -> Option<MappedRange<'_>> {
        self.upload.memory.as_ref()?.lend(offset, length)
    }

    /// Records that the whole chunk is verified and written.
    pub fn done(self) {
        self.upload.progress().coming.remove(&self.chunk);
    }
}

impl Drop for ChunkClaim<'_> {
    fn drop(&mut self) {
        let mut progress = self.upload.progress();
        progress.moved = Instant::now();
        if progress.coming.remove(&self.chunk) {
            progress.missing.insert(self.chunk);
        }
    }
}

// Shares of users in a store.
//
// One user may fill it. As soon as another user needs room, each has an equal part: the oldest replicas of the user with more are
// deleted first. Runs of the agents themselves count as one more user.

/// A user of a store by uid; none for the agents' own runs.
type OwnerUid = Option<u32>;

impl Store {
    /// Makes room for a shard: deletes `deletable` steps first, then what other users have beyond their part. Also deletes spare files
    /// that are in the way.
    fn make_room(&self, inner: &mut Inner, shard: &Shard, deletable: &[StepKey]) -> Result<(), StoreError> {
        let (wanted, quota) = (shard.bytes, self.quota);
        let fits = |inner: &Inner| inner.used().saturating_add(wanted) <= quota;
        if fits(inner) {
            return Ok(());
        }
        for step in deletable {
            let of_step = inner.replicas.values().filter(|replica| replica.sealed.shard.key == *step);
            let roots: Vec<String> = of_step.map(|replica| replica.sealed.shard.root.clone()).collect();
            roots.iter().for_each(|root| self.drop_replica(inner, root));
        }
        let user = owner_of(shard);
        let has = inner.used_by_users();
        let users = has.keys().chain([&user]).collect::<BTreeSet<_>>().len() as u64;
        let part = quota / users.max(1);
        let of_user = has.get(&user).copied().unwrap_or(0);
        if of_user.saturating_add(wanted) <= part {
            while !fits(inner) {
                let Some(root) = inner.oldest_beyond(part) else { break };
                self.drop_replica(inner, &root);
            }
        }
        // A spare of the right size is used; all others are deleted if necessary.
        while inner.used().saturating_add(inner.spares.bytes()).saturating_add(wanted) > quota {
            if !inner.spares.give_up_one() {
                break;
            }
        }
        let free = quota.saturating_sub(inner.used());
        match fits(inner) {
            true => Ok(()),
            false if users > 1 => Err(StoreError::Part { wanted, free, quota, of_user, part, users }),
            false => Err(StoreError::Full { wanted, free, quota }),
        }
    }
}

impl Inner {
    /// Bytes of replicas and uploads. Spares do not count: they are deleted when room is needed.
    fn used(&self) -> u64 {
        self.shards().map(|shard| shard.bytes).fold(self.lent, u64::saturating_add)
    }

    fn shards(&self) -> impl Iterator<Item = &Shard> {
        let held = self.replicas.values().map(|replica| &replica.sealed.shard);
        held.chain(self.uploads.values().map(|upload| &upload.sealed.shard))
    }

    /// Same as [`Inner::used`], by user and without lent memory.
    fn used_by_users(&self) -> BTreeMap<OwnerUid, u64> {
        let mut has: BTreeMap<OwnerUid, u64> = BTreeMap::new();
        for shard in self.shards() {
            let bytes = has.entry(owner_of(shard)).or_default();
            *bytes = bytes.saturating_add(shard.bytes);
        }
        has
    }

    /// The oldest replica of the user with the most bytes, if that is more than a part.
    fn oldest_beyond(&self, part: u64) -> Option<String> {
        let has = self.used_by_users();
        let (most, bytes) = has.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        if bytes <= part {
            return None;
        }
        let of_user = self.replicas.values().filter(|replica| owner_of(&replica.sealed.shard) == most);
        // All replicas that were found at a start count as equally old.
        let age = |replica: &&Replica| (replica.since, replica.sealed.shard.key.step);
        of_user.min_by_key(age).map(|replica| replica.sealed.shard.root.clone())
    }
}

fn owner_of(shard: &Shard) -> OwnerUid {
    owner(shard.key.run_id())
}

// Why a store does not accept a shard.

/// Why a shard is not accepted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum StoreError {
    #[error("the store is full: {wanted} bytes are wanted and {free} of {quota} are free")]
    Full { wanted: u64, free: u64, quota: u64 },
    #[error(
        "the store is full: {wanted} bytes are wanted and {free} of {quota} are free; {users} users share it, each has a part of \
         {part} bytes while it is full, and this one uses {of_user}"
    )]
    Part { wanted: u64, free: u64, quota: u64, of_user: u64, part: u64, users: u64 },
    #[error("{0} chunk(s) have not come")]
    Missing(usize),
    #[error("{what}: {source}")]
    Disk { what: String, source: io::Error },
}

/// The error of an operation on a path.
fn disk(what: &str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let what = format!("{what} {}", path.display());
    move |source| StoreError::Disk { what, source }
}

// Moves replicas into their places in the store and removes them. Each operation goes through a [`Volume`], so that a test can
// cut the power between any two of them.

/// The real disk, with files and directories that no other user may read.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrivateVolume;

impl Volume for PrivateVolume {
    fn make_directory(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o700).create(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink + '_>> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Box::new(FileSink(file)))
    }

    fn open(&self, path: &Path) -> io::Result<(Box<dyn ReadAt + '_>, u64)> {
        let file = open_plainly(path)?;
        let length = file.metadata()?.len();
        Ok((Box::new(file), length))
    }
}

/// Path of a shard's directory below `replicas`.
pub fn home(replicas: &Path, shard: &Shard) -> PathBuf {
    let StepKey { step, job, run, attempt, world } = &shard.key;
    let mut hasher = blake3::Hasher::new();
    for text in [job, run] {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    let of_run = &hasher.update(&world.to_le_bytes()).finalize().to_hex()[..16];
    let piece = shard.piece.as_ref().map_or_else(String::new, |piece| format!(".{}", piece.index));
    let of_step = replicas.join(of_run).join(format!("step-{step:012}.{attempt}"));
    of_step.join(format!("rank-{:05}{piece}", shard.rank))
}

/// Turns the complete bytes in the file `from` into a replica in `home`: first `sync` syncs them to disk, then they are moved into place,
/// then their manifest. `lock`, the name of the lock file, is next to them before they are a replica.
///
/// # Errors
/// An I/O error. A previous replica in `home` may be lost then.
pub fn put(
    volume: &dyn Volume,
    from: &Path,
    home: &Path,
    manifest: &[u8],
    lock: Option<&str>,
    sync: &dyn Fn() -> io::Result<()>,
) -> io::Result<()> {
    sync()?;
    make_all(volume, home)?;
    // Operations that need space come first: on a full disk the previous replica stays intact.
    let aside = home.join(format!(".{MANIFEST_NAME}.tmp"));
    remove_if_there(volume, &aside)?;
    let mut sink = volume.create(&aside)?;
    sink.write(manifest)?;
    sink.sync()?;
    drop(sink);
    if let Some(lock) = lock
        && !volume.list(home)?.iter().any(|name| name == lock)
    {
        drop(volume.create(&home.join(lock))?);
    }
    // A shard of the same rank that was sealed earlier: without its manifest it does not count.
    remove_if_there(volume, &home.join(MANIFEST_NAME))?;
    volume.sync_directory(home)?;
    // No shard needs the other locks any more.
    for (name, ..) in locks(volume, home).filter(|(name, ..)| Some(name.as_str()) != lock) {
        remove_if_there(volume, &home.join(name))?;
    }
    volume.rename(from, &home.join(DATA_NAME))?;
    volume.rename(&aside, &home.join(MANIFEST_NAME))?;
    volume.sync_directory(home)
}

/// Removes a replica, its manifest first, so that it exists completely or not at all. Moves its file to `spare`, if given; returns whether.
pub fn take_down(volume: &dyn Volume, home: &Path, spare: Option<&Path>) -> bool {
    let manifest = home.join(MANIFEST_NAME);
    let _ = volume.remove_file(&manifest).and_then(|()| volume.sync_directory(home));
    let moved = spare.is_some_and(|spare| volume.rename(&home.join(DATA_NAME), spare).is_ok());
    remove_tree(volume, home);
    // The directories of the step and of the run, if empty.
    for above in home.ancestors().skip(1).take(2) {
        let _ = volume.remove_directory(above);
    }
    moved
}

/// The lock of a replica, if it has one.
pub fn lock_of(volume: &dyn Volume, home: &Path, sealed: &SealedShard) -> Option<WithdrawalLock> {
    locks(volume, home).find(|(_, key, _)| *key == sealed.key).map(|(.., lock)| lock)
}

/// All locks next to a replica by file name, each with the key of its shard.
fn locks(volume: &dyn Volume, home: &Path) -> impl Iterator<Item = (String, u64, WithdrawalLock)> {
    let names = volume.list(home).unwrap_or_default().into_iter();
    names.filter_map(|name| WithdrawalLock::from_file_name(&name).map(|(key, lock)| (name, key, lock)))
}

/// All directories of replicas, each with its manifest; none if the manifest is not valid.
pub fn stored_replicas(volume: &dyn Volume, replicas: &Path) -> Vec<(PathBuf, Option<SealedShard>)> {
    let below = |directory: &PathBuf| -> Vec<PathBuf> {
        let names = volume.list(directory).unwrap_or_default();
        names.into_iter().map(|name| directory.join(name)).collect()
    };
    let steps: Vec<PathBuf> = below(&replicas.to_owned()).iter().flat_map(below).collect();
    let homes = steps.iter().flat_map(below);
    homes.map(|home| (home.clone(), replica_manifest(volume, &home))).collect()
}

fn replica_manifest(volume: &dyn Volume, home: &Path) -> Option<SealedShard> {
    let (file, length) = volume.open(&home.join(MANIFEST_NAME)).ok()?;
    let length = usize::try_from(length).ok().filter(|length| *length <= MAX_MANIFEST_BYTES)?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0).ok()?;
    SealedShard::of(bytes).ok()
}

/// Whether every byte of a replica matches its manifest. Reads all of it.
pub fn is_whole(volume: &dyn Volume, home: &Path, sealed: &SealedShard) -> bool {
    let Ok((file, length)) = volume.open(&home.join(DATA_NAME)) else { return false };
    length == sealed.shard.bytes && matches!(sealed.first_bad_from_start(&*file), Ok(None))
}

/// Creates a replica's directory and the two above it, and syncs their names to disk.
fn make_all(volume: &dyn Volume, home: &Path) -> io::Result<()> {
    let above: Vec<&Path> = home.ancestors().skip(1).take(3).collect();
    for directory in above.iter().rev().skip(1).copied().chain([home]) {
        match volume.make_directory(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    above.into_iter().try_for_each(|directory| volume.sync_directory(directory))
}

fn remove_if_there(volume: &dyn Volume, path: &Path) -> io::Result<()> {
    match volume.remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

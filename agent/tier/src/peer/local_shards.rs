//! Shards of this host's ranks: the checkpoint directories of its jobs, read with the rights of their users.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use mainstay_checkpoint::inventory::{Medium, Shard, StepKey};
use mainstay_checkpoint::owner::owner;
use mainstay_checkpoint_format::MANIFEST_NAME;
use mainstay_checkpoint_format::control::{CONTROL_BYTES, CONTROL_NAME, Control, ControlWords, Slot, State};
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use crate::beneath::{Beneath, medium_at};
use crate::files::Pack;
use crate::files::tree::FileVersion;
use crate::lock;
use crate::os::{SendMapping, monotonic_ms, spawn};
use crate::peer::user::{Access, User, Users};
use crate::seal::{Bytes, SealedShard};

/// Maximum number of watched directories of one user.
const MAX_WATCHED_EACH: usize = 64;

/// A checkpoint directory of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchedDirectory {
    /// The run id of the job; with its owner (`core::checkpoint::owner`) if a user requested it.
    pub run: String,
    /// The directory of its steps.
    pub directory: PathBuf,
    /// The owner of the files; files of other users are ignored.
    pub user: User,
    /// The memory of its launcher, which holds a step before it is on disk.
    #[serde(default)]
    pub pool: Option<PathBuf>,
}

/// The shards in all watched directories.
#[derive(Debug, Default)]
pub struct LocalShards {
    users: Arc<Users>,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    watched: Vec<WatchedDirectory>,
    shards: BTreeMap<String, LocalShard>,
    /// Shards in launchers' memory, by root: preferred to the copy on disk.
    pooled: BTreeMap<String, PooledShard>,
    /// Sealed steps of trainers' files, by watched directory and run.
    packs: BTreeMap<(PathBuf, String), Vec<Arc<Pack>>>,
    /// Manifests that were read, by user and path, with a mark that shows whether they changed.
    read: KnownManifests,
    /// Running checks, by user and directory.
    turns: BTreeMap<(u32, PathBuf), Arc<CheckTurn>>,
    /// Mapped memory of sent slots, by file, with device, inode and length to detect another file.
    mapped: BTreeMap<PathBuf, ((u64, u64, u64), SendMapping)>,
    /// Shards on disk whose files stay open until their replicas are stored, by root.
    held: BTreeMap<String, PinnedShard>,
    /// The step that is being sent. Its files are opened as soon as they are on disk.
    sending: Option<StepKey>,
    /// Shards whose bytes differ from their seal.
    bad: BTreeSet<String>,
}

#[derive(Clone, Debug)]
struct LocalShard {
    sealed: Arc<SealedShard>,
    /// The watched directory.
    root: PathBuf,
    /// The shard's directory below it.
    below: PathBuf,
    access: Access,
    medium: Medium,
}

impl LocalShards {
    /// The shards of these users.
    pub(crate) fn new(users: Arc<Users>) -> LocalShards {
        LocalShards { users, inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Starts to watch a directory.
    pub fn watch(&self, watched: WatchedDirectory) {
        let mut inner = self.inner();
        // A watch of another user for the same directory does not replace this one.
        inner.watched.retain(|other| {
            other.directory != watched.directory
                || other.user.uid != watched.user.uid
                || owner(&other.run) != owner(&watched.run)
        });
        let uid = watched.user.uid;
        inner.watched.push(watched);
        // A user with too many watches loses the oldest one.
        let of_user = inner.watched.iter().filter(|other| other.user.uid == uid).count();
        if of_user > MAX_WATCHED_EACH
            && let Some(oldest) = inner.watched.iter().position(|other| other.user.uid == uid)
        {
            inner.watched.remove(oldest);
        }
    }

    /// All watched directories.
    pub fn watched(&self) -> Vec<WatchedDirectory> {
        self.inner().watched.clone()
    }

    /// Checks all directories. Returns whether there is anything new.
    pub fn look(&self) -> bool {
        let (watched, were_read, known) = {
            let mut inner = self.inner();
            let known: Vec<PooledShard> = inner.pooled.values().cloned().collect();
            (inner.watched.clone(), std::mem::take(&mut inner.read), known)
        };
        let (were_read, known) = (Arc::new(were_read), Arc::new(known));
        let mut pooled: BTreeMap<String, PooledShard> = BTreeMap::new();
        let mut looked = BTreeMap::new();
        let mut shards = BTreeMap::new();
        for directory in &watched {
            match self.look_aside(directory, &were_read, &known) {
                Some(seen) => {
                    pooled.extend(
                        seen.pooled.into_iter().map(|found| (found.sealed.shard.root.clone(), found)),
                    );
                    looked.extend(seen.looked);
                    shards.extend(seen.shards);
                }
                // Its file system does not answer: keep the last known shards, and continue with the other directories.
                None => {
                    let inner = self.inner();
                    let is_there = |found: &LocalShard| {
                        found.root == directory.directory && found.access.user().uid == directory.user.uid
                    };
                    let before = inner.shards.iter().filter(|(_, found)| is_there(found));
                    shards.extend(before.map(|(root, found)| (root.clone(), found.clone())));
                    let is_read = |(uid, path): &(u32, PathBuf)| {
                        *uid == directory.user.uid && path.starts_with(&directory.directory)
                    };
                    let before = were_read.iter().filter(|(at, _)| is_read(at));
                    looked.extend(before.map(|(at, read)| (at.clone(), read.clone())));
                }
            }
        }
        let mut inner = self.inner();
        inner.read = looked;
        let packed: BTreeSet<String> =
            inner.packs.values().flatten().map(|pack| pack.sealed.shard.root.clone()).collect();
        let Inner { bad, held, watched, .. } = &mut *inner;
        held.retain(|_, shard| watched.iter().any(|directory| shard.is_of(directory)));
        bad.retain(|root| {
            shards.contains_key(root)
                || pooled.contains_key(root)
                || packed.contains(root)
                || held.contains_key(root)
        });
        let is_new = |root: &String| !inner.shards.contains_key(root) && !inner.pooled.contains_key(root);
        let news = shards.keys().chain(pooled.keys()).any(is_new);
        // The kernel frees memory that a launcher released only when no process has it mapped.
        inner.mapped.retain(|directory, (was, _)| is_still(directory, was));
        (inner.shards, inner.pooled) = (shards, pooled);
        let sending = inner.sending.clone();
        drop(inner);
        sending.iter().for_each(|step| self.hold(step));
        news
    }

    /// A number that changes when something is sealed or released in launchers' memory. Much cheaper than a full check.
    pub(crate) fn stamp_of_memory(&self) -> u64 {
        let watched = self.watched();
        let pools = watched
            .iter()
            .filter_map(|directory| Some((directory.pool.as_ref()?, self.users.access(directory.user))));
        pools.fold(0, |sum: u64, (pool, access)| sum.rotate_left(7) ^ stamp_of_pool(pool, &access))
    }

    /// For each rank of this host, the memory that its launcher reserves for a shard.
    pub(crate) fn reserved(&self) -> Vec<u64> {
        let watched = self.watched();
        let pools = watched.iter().filter_map(|directory| Some((directory.pool.as_ref()?, directory.user)));
        pools.flat_map(|(pool, user)| reserved_in_pool(pool, &self.users.access(user))).collect()
    }

    /// Whether any watched job has a launcher's memory.
    pub(crate) fn has_memory(&self) -> bool {
        self.inner().watched.iter().any(|watched| watched.pool.is_some())
    }

    /// Whether the last check found any shard.
    pub(crate) fn has_shards(&self) -> bool {
        let inner = self.inner();
        !(inner.pooled.is_empty() && inner.shards.is_empty() && inner.packs.is_empty())
    }

    /// The shards, each with its medium and whether it is, as far as known, intact.
    pub fn list(&self) -> Vec<(Shard, Medium, bool)> {
        let inner = self.inner();
        let listed = |sealed: &SealedShard, medium| {
            (sealed.shard.clone(), medium, !inner.bad.contains(&sealed.shard.root))
        };
        // A shard in memory and on disk is listed twice: each copy may be lost alone.
        let in_memory = inner.pooled.values().map(|shard| listed(&shard.sealed, Medium::Memory));
        let packs = inner.packs.values().flatten().map(|pack| listed(&pack.sealed, pack.medium));
        let on_disk = inner.shards.values().map(|shard| listed(&shard.sealed, shard.medium));
        let deleted = inner.held.iter().filter(|(root, _)| !inner.shards.contains_key(*root));
        let held = deleted.map(|(_, shard)| listed(shard.sealed(), shard.medium()));
        in_memory.chain(on_disk).chain(held).chain(packs).collect()
    }

    /// For shards whose ranks named ranks that should save the same: the group and the root over the saved bytes, by the shard's root.
    pub(crate) fn shared_content(&self) -> BTreeMap<String, (String, String)> {
        let inner = self.inner();
        let sealed = inner
            .pooled
            .values()
            .map(|shard| &shard.sealed)
            .chain(inner.shards.values().map(|shard| &shard.sealed));
        let declared =
            sealed.filter_map(|sealed| Some((sealed.shard.root.clone(), sealed.shared_content.clone()?)));
        declared.map(|(root, shared)| (root, (shared.group, shared.root))).collect()
    }

    /// Sets what is offered of a watched directory for one run; watches of other users are not affected. Returns whether it changed.
    pub(crate) fn set_packs(&self, directory: &Path, run: &str, packs: Vec<Arc<Pack>>) -> bool {
        let mut inner = self.inner();
        let watched = (directory.to_owned(), run.to_owned());
        let is_same = inner.packs.get(&watched).is_some_and(|before| {
            before.len() == packs.len() && before.iter().zip(&packs).all(|(a, b)| Arc::ptr_eq(a, b))
        });
        if !is_same {
            inner.packs.insert(watched, packs);
        }
        !is_same
    }

    /// Stops offering files that differ from their seal.
    pub(crate) fn forget_pack(&self, root: &str) {
        let mut inner = self.inner();
        inner.packs.values_mut().for_each(|packs| packs.retain(|pack| pack.sealed.shard.root != root));
    }

    /// The roots of shards that all hosts see: no replicas of them are kept.
    pub(crate) fn shared(&self) -> BTreeSet<String> {
        let inner = self.inner();
        let shared = inner.packs.values().flatten().filter(|pack| pack.is_shared);
        shared.map(|pack| pack.sealed.shard.root.clone()).collect()
    }

    /// The memory of a slot. It stays mapped for later steps in the slot: mapping it again each time takes longer than sending it.
    fn mapped(&self, pooled: &PooledShard, file: &File) -> Option<SendMapping> {
        let found = file.metadata().ok()?;
        let is = (found.dev(), found.ino(), found.len());
        let watched = pooled.path();
        let mut inner = self.inner();
        if let Some((was, memory)) = inner.mapped.get(&watched)
            && *was == is
        {
            return Some(memory.clone());
        }
        let memory = SendMapping::new(file, found.len()).ok()?;
        inner.mapped.insert(watched, (is, memory.clone()));
        Some(memory)
    }

    fn pack(&self, root: &str) -> Option<Arc<Pack>> {
        self.inner().packs.values().flatten().find(|pack| pack.sealed.shard.root == root).cloned()
    }

    /// Opens a shard in a launcher's memory by its root.
    pub(crate) fn open_pooled(&self, root: &str) -> Option<OpenShard> {
        let pooled = self.inner().pooled.get(root).cloned()?;
        let file = pooled.open()?;
        let memory = self.mapped(&pooled, &file);
        let bytes = Arc::new(Bytes::File(file, memory));
        Some(OpenShard { sealed: Arc::clone(&pooled.sealed), bytes, pooled: Some(pooled) })
    }

    /// Opens a shard by its root: from memory, or from its checkpoint directory.
    pub(crate) fn open(&self, root: &str) -> Option<OpenShard> {
        if let Some(opened) = self.open_pooled(root) {
            return Some(opened);
        }
        if let Some(pack) = self.pack(root) {
            return Some(OpenShard::of_pack(&pack));
        }
        self.open_file(root).or_else(|| self.open_pinned(root)).map(OpenShard::of_file)
    }

    pub(crate) fn open_file(&self, root: &str) -> Option<(Arc<SealedShard>, File)> {
        let found = self.inner().shards.get(root).cloned()?;
        let as_user = found.access.act().ok()?;
        let file = as_user.open(&found.root).ok()?.read(&found.below.join(&found.sealed.file)).ok()?;
        // A name in the user's directory may be a file of another user.
        (file.metadata().ok()?.uid() == found.access.user().uid).then_some((found.sealed, file))
    }

    /// Records that the bytes of a shard differ from its seal: it is no longer offered.
    pub fn mark_bad(&self, root: &str) {
        let mut inner = self.inner();
        inner.held.remove(root);
        inner.bad.insert(root.to_owned());
    }

    /// Records that such a shard exists again and its bytes were verified.
    pub(crate) fn mark_good(&self, root: &str) {
        self.inner().bad.remove(root);
    }

    /// Deletes a shard. Returns whether it existed.
    pub fn remove(&self, root: &str) -> io::Result<bool> {
        let (found, was_held) = {
            let mut inner = self.inner();
            let was_held = inner.held.remove(root).is_some();
            (inner.shards.get(root).cloned(), was_held)
        };
        let Some(found) = found else { return Ok(was_held) };
        let as_user = found.access.act()?;
        let at = as_user.open(&found.root)?;
        at.remove_file(&found.below.join(MANIFEST_NAME))?;
        at.sync_directory(&found.below)?;
        at.remove_tree(&found.below)?;
        if let Some(step) = found.below.parent() {
            let _ = at.remove_directory(step);
        }
        self.inner().shards.remove(root);
        Ok(true)
    }
}

/// Whether a slot's file exists and is unchanged: device, inode and length.
fn is_still(path: &Path, was: &(u64, u64, u64)) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino(), found.len()) == *was)
}

// Checks the watched directories and launchers' memory with the rights of their users.

/// The mark of a file when it was last read, and its manifest; none if it was not valid.
type LastRead = (FileVersion, Option<Arc<SealedShard>>);

/// Maximum time for the check of one place before the check continues without it.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// Manifests that were read, by user and path.
type KnownManifests = BTreeMap<(u32, PathBuf), LastRead>;

/// The result of checking one place.
#[derive(Debug, Default)]
struct DirectoryShards {
    pooled: Vec<PooledShard>,
    looked: KnownManifests,
    shards: Vec<(String, LocalShard)>,
}

/// Whether a check of a place is running, and whether it is stuck.
#[derive(Debug, Default)]
struct CheckTurn {
    is_taken: AtomicBool,
    is_stuck: AtomicBool,
}

impl CheckTurn {
    fn take(&self) -> bool {
        !self.is_taken.swap(true, Ordering::SeqCst)
    }

    fn end(&self) {
        self.is_stuck.store(false, Ordering::SeqCst);
        self.is_taken.store(false, Ordering::SeqCst);
    }
}

impl LocalShards {
    /// Checks one place on a separate thread. A check that does not return is waited for once, and not started again until it has returned.
    fn look_aside(
        &self,
        directory: &WatchedDirectory,
        were_read: &Arc<KnownManifests>,
        known: &Arc<Vec<PooledShard>>,
    ) -> Option<DirectoryShards> {
        let turn = {
            let mut inner = self.inner();
            let Inner { turns, watched, .. } = &mut *inner;
            turns.retain(|(uid, directory), _| {
                watched.iter().any(|other| other.user.uid == *uid && other.directory == *directory)
            });
            Arc::clone(turns.entry((directory.user.uid, directory.directory.clone())).or_default())
        };
        let until = Instant::now() + CHECK_TIMEOUT;
        // Another check may be running that started before the change that this one is about.
        while !turn.take() {
            if turn.is_stuck.load(Ordering::SeqCst) || Instant::now() >= until {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let access = self.users.access(directory.user);
        let (directory, were_read, known, of_thread) =
            (directory.clone(), Arc::clone(were_read), Arc::clone(known), Arc::clone(&turn));
        let work = move || {
            let found = look_at(&directory, &access, &were_read, &known);
            of_thread.end();
            let _ = sender.send(found);
        };
        if spawn("ckpt-look", work).is_err() {
            turn.end();
            return None;
        }
        let found = receiver.recv_timeout(until.saturating_duration_since(Instant::now()));
        if found.is_err() {
            turn.is_stuck.store(true, Ordering::SeqCst);
            tracing::warn!(
                "a watched checkpoint directory does not answer: what was seen there last is offered"
            );
        }
        found.ok()
    }
}

/// Checks one place.
fn look_at(
    directory: &WatchedDirectory,
    access: &Access,
    were_read: &KnownManifests,
    known: &[PooledShard],
) -> DirectoryShards {
    let mut shards = DirectoryShards::default();
    if let Some(pool) = &directory.pool {
        shards.pooled = look_into_pool(pool, access, &directory.run, known);
    }
    let Ok(as_user) = access.act() else { return shards };
    let Ok(at) = as_user.open(&directory.directory) else { return shards };
    let medium = medium_at(&at);
    for below in rank_directories(&at) {
        let manifest = below.join(MANIFEST_NAME);
        let path = directory.directory.join(&manifest);
        let Some(mark) = version_of(&at, &manifest, directory.user) else { continue };
        let known = were_read
            .get(&(directory.user.uid, path.clone()))
            .filter(|(before, _)| *before == mark)
            .map(|(_, sealed)| sealed.clone());
        // Only agents create and store pieces: no rank seals one.
        let read = || {
            let sealed = SealedShard::read_in(&at, &manifest).ok();
            let sealed = sealed.filter(|sealed| sealed.shard.piece.is_none())?;
            sealed.owned_as(&directory.run).ok()
        };
        let sealed = known.unwrap_or_else(|| read().map(Arc::new));
        shards.looked.insert((directory.user.uid, path), (mark, sealed.clone()));
        if let Some(sealed) = sealed {
            let (root, access) = (directory.directory.clone(), access.clone());
            let found = LocalShard { sealed: Arc::clone(&sealed), root, below, access, medium };
            shards.shards.push((sealed.shard.root.clone(), found));
        }
    }
    shards
}

/// The directories of ranks below `directory`: `step-*/rank-*`.
pub(crate) fn rank_directories(at: &Beneath) -> Vec<PathBuf> {
    let named = |below: &Path, prefix: &str| -> Vec<PathBuf> {
        let is_ours = |name: &str| {
            let digits = name.strip_prefix(prefix);
            digits
                .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let names = at.list(below).unwrap_or_default().into_iter().map(|(name, _)| name);
        names.filter(|name| name.to_str().is_some_and(is_ours)).map(|name| below.join(name)).collect()
    };
    named(Path::new(""), "step-").iter().flat_map(|step| named(step, "rank-")).collect()
}

fn version_of(at: &Beneath, below: &Path, user: User) -> Option<FileVersion> {
    let found = at.stat(below).ok().filter(|found| found.st_uid == user.uid)?;
    let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    is_file.then(|| FileVersion::from_stat(&found))
}

// Steps whose files stay open until their copies are made. If saves are faster than copies, each step is overwritten in memory and
// deleted from disk before it is sent, so that no step would ever get its copies.

/// A shard whose bytes exist as long as its file is open, even if it is deleted.
#[derive(Debug)]
struct PinnedShard {
    found: LocalShard,
    file: Arc<File>,
}

impl PinnedShard {
    fn sealed(&self) -> &SealedShard {
        &self.found.sealed
    }

    fn medium(&self) -> Medium {
        self.found.medium
    }

    /// Whether it is from that directory.
    fn is_of(&self, watched: &WatchedDirectory) -> bool {
        self.found.root == watched.directory && self.found.access.user().uid == watched.user.uid
    }
}

impl LocalShards {
    /// The steps of which all ranks of this host have their shard on disk, or held.
    pub(crate) fn on_disk(&self) -> BTreeSet<StepKey> {
        let inner = self.inner();
        let in_files = || {
            let held = inner.held.values().map(|shard| &shard.found.sealed);
            inner.shards.values().map(|shard| &shard.sealed).chain(held)
        };
        let all = ranks_of_steps(inner.pooled.values().map(|shard| &shard.sealed).chain(in_files()));
        // A rank that has saved nothing of a step yet may be about to.
        let most = |run: &str| {
            let of_run = all.iter().filter(|(key, _)| key.run_id() == run);
            of_run.map(|(_, ranks)| ranks.len()).max().unwrap_or(0)
        };
        let on_disk = ranks_of_steps(in_files()).into_iter();
        on_disk.filter(|(key, ranks)| ranks.len() == most(key.run_id())).map(|(key, _)| key.clone()).collect()
    }

    /// Whether the files of this step are kept open, those of all ranks of this host.
    pub(crate) fn holds_all_of(&self, launch: &str, at: (u64, u64)) -> bool {
        let inner = self.inner();
        // In another attempt this host may have other ranks.
        let of_attempt = |sealed: &&Arc<SealedShard>| {
            let shard = &sealed.shard.key;
            shard.run == launch && shard.attempt == at.0
        };
        let in_memory = inner.pooled.values().map(|shard| &shard.sealed);
        let saved = in_memory.chain(inner.shards.values().map(|shard| &shard.sealed)).filter(of_attempt);
        let ranks: BTreeSet<u32> = saved.map(|sealed| sealed.shard.rank).collect();
        let held = inner.held.values().map(|shard| &shard.found.sealed).filter(of_attempt);
        let of_step = held.filter(|sealed| sealed.shard.key.step == at.1);
        let held: BTreeSet<u32> = of_step.map(|sealed| sealed.shard.rank).collect();
        !held.is_empty() && held.is_superset(&ranks)
    }

    /// Keeps the files of a step that are on disk open.
    pub(crate) fn hold(&self, key: &StepKey) {
        let missing: Vec<(String, LocalShard)> = {
            let Inner { shards, held, bad, .. } = &*self.inner();
            let of_step = shards.iter().filter(|(_, found)| found.sealed.shard.key == *key);
            let missing = of_step.filter(|(root, _)| !held.contains_key(*root) && !bad.contains(*root));
            missing.map(|(root, found)| (root.clone(), found.clone())).collect()
        };
        for (root, found) in missing {
            if let Some((_, file)) = self.open_file(&root) {
                self.inner().held.insert(root, PinnedShard { found, file: Arc::new(file) });
            }
        }
    }

    /// Sets the step that is being sent, or none. A step that is sent from memory may be overwritten there and deleted from disk before its
    /// copy is complete: without its owner's copy, it would have one too few. So its files are opened as soon as they are on disk.
    pub(crate) fn set_sending(&self, key: Option<StepKey>) {
        self.inner().sending = key;
    }

    /// Closes the files of all steps except the wanted ones, and those of the step of a launch that is kept from. A step of an
    /// attempt before the newest is not wanted: its owner has continued from another step.
    pub(crate) fn hold_only(&self, wanted: &BTreeSet<&StepKey>, from: Option<&(String, (u64, u64))>) {
        let Inner { shards, pooled, held, .. } = &mut *self.inner();
        if held.is_empty() {
            return;
        }
        let own =
            shards.values().map(|shard| &shard.sealed).chain(pooled.values().map(|shard| &shard.sealed));
        let mut attempts: BTreeMap<&str, u64> = BTreeMap::new();
        for key in own.map(|sealed| &sealed.shard.key) {
            let newest = attempts.entry(key.run_id()).or_default();
            *newest = key.attempt.max(*newest);
        }
        held.retain(|_, shard| {
            let key = &shard.sealed().shard.key;
            let is_kept =
                from.is_some_and(|(launch, at)| key.run == *launch && (key.attempt, key.step) == *at);
            (is_kept || wanted.contains(key))
                && attempts.get(key.run_id()).is_none_or(|newest| key.attempt >= *newest)
        });
    }

    /// The runs with files that are kept open.
    pub(crate) fn pinned_runs(&self) -> BTreeSet<String> {
        self.inner().held.values().map(|shard| shard.sealed().shard.key.run_id().to_owned()).collect()
    }

    /// Whether the file of a shard is kept open.
    pub(crate) fn is_held(&self, root: &str) -> bool {
        self.inner().held.contains_key(root)
    }

    /// Opens a shard whose file is kept open.
    pub(crate) fn open_pinned(&self, root: &str) -> Option<(Arc<SealedShard>, File)> {
        let inner = self.inner();
        let shard = inner.held.get(root)?;
        Some((Arc::clone(&shard.found.sealed), shard.file.try_clone().ok()?))
    }
}

/// The ranks that have saved each step.
fn ranks_of_steps<'s>(
    shards: impl Iterator<Item = &'s Arc<SealedShard>>,
) -> BTreeMap<&'s StepKey, BTreeSet<u32>> {
    let mut steps: BTreeMap<&StepKey, BTreeSet<u32>> = BTreeMap::new();
    for shard in shards.map(|sealed| &sealed.shard) {
        steps.entry(&shard.key).or_default().insert(shard.rank);
    }
    steps
}

// A shard that is open for reading, wherever it is stored.

/// A shard that is open for reading.
#[derive(Debug)]
pub struct OpenShard {
    /// Its manifest.
    pub sealed: Arc<SealedShard>,
    /// Its bytes: they start with the shard.
    pub bytes: Arc<Bytes>,
    /// Its slot in a launcher's memory, which may be used for another step at any time.
    pooled: Option<PooledShard>,
}

impl OpenShard {
    /// From a file that has only the shard.
    pub(crate) fn of_file((sealed, file): (Arc<SealedShard>, File)) -> OpenShard {
        OpenShard { sealed, bytes: Arc::new(file.into()), pooled: None }
    }

    /// From a replica in the store.
    pub(crate) fn of_replica(
        (sealed, file, memory): (Arc<SealedShard>, File, Option<SendMapping>),
    ) -> OpenShard {
        OpenShard { sealed, bytes: Arc::new(Bytes::File(file, memory)), pooled: None }
    }

    /// From files in their trainer's directory.
    fn of_pack(pack: &Arc<Pack>) -> OpenShard {
        let bytes = Arc::new(Bytes::Pack(Arc::clone(pack)));
        OpenShard { sealed: Arc::clone(&pack.sealed), bytes, pooled: None }
    }

    /// Whether it is in files of a trainer: it need not be fetched to this host.
    pub(crate) fn is_pack(&self) -> bool {
        matches!(*self.bytes, Bytes::Pack(_))
    }

    /// Whether the file still has the shard: then differing bytes are damaged.
    pub fn is_still(&self) -> bool {
        match &*self.bytes {
            Bytes::Pack(pack) => pack.content.is_still(),
            Bytes::File(..) => self.pooled.as_ref().is_none_or(PooledShard::is_still),
        }
    }

    /// Asks the pool owner to keep it in its slot for the next seconds.
    pub fn pin(&self) {
        self.pooled.iter().for_each(PooledShard::pin);
    }

    /// Whether the file is long enough.
    pub(crate) fn fits(&self) -> bool {
        let bytes = self.sealed.shard.bytes;
        match &*self.bytes {
            Bytes::Pack(pack) => pack.content.is_still(),
            Bytes::File(file, _) => file.metadata().is_ok_and(|found| match self.pooled {
                Some(_) => found.len() >= bytes,
                None => found.len() == bytes,
            }),
        }
    }

    /// The first chunk that differs from the seal.
    pub(crate) fn first_bad(&self) -> io::Result<Option<u32>> {
        match (&*self.bytes, &self.pooled) {
            (Bytes::File(file, _), None) => self.sealed.first_bad(file),
            (bytes, _) => self.sealed.first_bad_from_start(bytes),
        }
    }
}

// Sealed shards in the memory of a launcher on this host, as the agent sees them: by reading files, never through mapped
// memory, because a page that its user truncates must not end the agent.

/// Time for which each request reserves a slot, ms.
const PIN_MS: u64 = 10_000;

/// A sealed slot.
#[derive(Clone, Debug)]
pub(crate) struct PooledShard {
    pub(crate) sealed: Arc<SealedShard>,
    pool: PathBuf,
    /// The directory of the rank in the pool.
    home: PathBuf,
    access: Access,
    slot: Slot,
}

impl PooledShard {
    /// Opens the slot's file, which starts with the shard. None if the slot now holds another shard.
    pub(crate) fn open(&self) -> Option<File> {
        self.pin();
        let file = self.open_slot()?;
        self.is_still().then_some(file)
    }

    /// The slot's file, which later steps use again.
    pub(crate) fn path(&self) -> PathBuf {
        self.pool.join(self.file())
    }

    fn file(&self) -> PathBuf {
        self.home.join(format!("slot-{}.{}", self.slot.index, self.slot.file))
    }

    fn open_slot(&self) -> Option<File> {
        let as_user = self.access.act().ok()?;
        let file = as_user.open(&self.pool).ok()?.read(&self.file()).ok()?;
        let found = file.metadata().ok()?;
        (found.uid() == self.access.user().uid && found.len() >= self.sealed.shard.bytes).then_some(file)
    }

    /// Whether the slot still holds the shard.
    pub(crate) fn is_still(&self) -> bool {
        let Ok(as_user) = self.access.act() else { return false };
        let Ok(pool) = as_user.open(&self.pool) else { return false };
        with_page(&pool, &self.home, |page| page.is_still(&self.slot)) == Some(true)
    }

    /// Asks the pool owner not to use the slot for a while. The pool owner may ignore this: a save does not wait for a copy to a peer.
    pub(crate) fn pin(&self) {
        let Ok(as_user) = self.access.act() else { return };
        let opened = as_user.open(&self.pool).and_then(|pool| pool.write_over(&self.home.join(CONTROL_NAME)));
        let Ok(file) = opened else { return };
        let (at, word) = Control::pin(&self.slot, monotonic_ms().saturating_add(PIN_MS));
        // Overwrite existing bytes only: a pool that is being removed must not grow.
        if file.metadata().is_ok_and(|found| found.len() >= CONTROL_BYTES as u64) {
            let _ = file.write_all_at(&word, at);
        }
    }
}

/// The sealed shards in a pool, from files of this user only. `known` are manifests that were read before, by slot.
fn look_into_pool(pool: &Path, access: &Access, run: &str, known: &[PooledShard]) -> Vec<PooledShard> {
    let Ok(as_user) = access.act() else { return Vec::new() };
    let Ok(at) = as_user.open(pool) else { return Vec::new() };
    let mut found = Vec::new();
    for home in ranks(&at) {
        let slots = with_page(&at, &home, |page| page.all().collect::<Vec<Slot>>()).unwrap_or_default();
        for slot in slots.into_iter().filter(|slot| slot.state == State::Sealed) {
            if let Some(known) = known.iter().find(|known| {
                known.slot == slot
                    && known.pool == pool
                    && known.home == home
                    && known.access.user() == access.user()
            }) {
                found.push(known.clone());
                continue;
            }
            let sealed = SealedShard::read_in(&at, &home.join(format!("slot-{}.json", slot.index)));
            let Ok(sealed) = sealed.and_then(|sealed| sealed.owned_as(run)) else { continue };
            let key = &sealed.shard.key;
            let is_it = (key.attempt, key.step, u64::from(key.world), sealed.shard.bytes)
                == (slot.epoch, slot.step, slot.world_size, slot.used);
            // The manifest and the slot belong together only if nothing changed in between.
            if is_it && with_page(&at, &home, |page| page.is_still(&slot)) == Some(true) {
                let (pool, home) = (pool.to_owned(), home.clone());
                let (access, sealed) = (access.clone(), Arc::new(sealed));
                found.push(PooledShard { sealed, pool, home, access, slot });
            }
        }
    }
    found
}

/// For each rank, the memory reserved for its shard: the size of its largest slot.
fn reserved_in_pool(pool: &Path, access: &Access) -> Vec<u64> {
    let Ok(as_user) = access.act() else { return Vec::new() };
    let room = |page: &Control<'_>| page.all().map(|slot| slot.capacity).max().filter(|room| *room > 0);
    let Ok(at) = as_user.open(pool) else { return Vec::new() };
    ranks(&at).iter().filter_map(|home| with_page(&at, home, room).flatten()).collect()
}

/// A number over all sealed slots: it changes when a slot is sealed or released.
fn stamp_of_pool(pool: &Path, access: &Access) -> u64 {
    let Ok(as_user) = access.act() else { return 0 };
    let Ok(at) = as_user.open(pool) else { return 0 };
    let sealed = ranks(&at).into_iter().enumerate().flat_map(|(index_of_rank, home)| {
        let sealed_slots = |page: &Control<'_>| {
            let sealed = page.all().filter(|slot| slot.state == State::Sealed);
            sealed.map(|slot| (slot.index as u64, slot.generation)).collect::<Vec<_>>()
        };
        with_page(&at, &home, sealed_slots)
            .unwrap_or_default()
            .into_iter()
            .map(move |at| (index_of_rank as u64, at))
    });
    sealed.fold(0xcbf2_9ce4_8422_2325, |sum, (index_of_rank, (index, generation))| {
        [index_of_rank, index, generation]
            .into_iter()
            .fold(sum, |sum: u64, word| (sum ^ word).wrapping_mul(0x0100_0000_01b3))
    })
}

fn ranks(pool: &Beneath) -> Vec<PathBuf> {
    let names = pool.list(Path::new("")).unwrap_or_default().into_iter();
    let is_rank = |name: &str| name.starts_with("rank-");
    let named = names.filter(|(name, _)| name.to_str().is_some_and(is_rank));
    let mut ranks: Vec<PathBuf> = named.map(|(name, _)| name.into()).collect();
    ranks.sort_unstable();
    ranks
}

/// Reads the current page; each word is consistent.
fn with_page<T>(pool: &Beneath, home: &Path, read: impl FnOnce(&Control<'_>) -> T) -> Option<T> {
    let file = pool.read(&home.join(CONTROL_NAME)).ok()?;
    let mut bytes = [0; CONTROL_BYTES];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let mut words = bytes.chunks_exact(8).map(|word| {
        // The words of the page have native byte order.
        AtomicU64::new(u64::from_ne_bytes(word.try_into().unwrap_or_default()))
    });
    let words: Box<ControlWords> =
        Box::new(std::array::from_fn(|_| words.next().unwrap_or_else(|| AtomicU64::new(0))));
    Control::new(&words).ok().map(|page| read(&page))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use mainstay_checkpoint_format::{Chunks, Identity, MANIFEST_NAME, Manifest, SealedFile, chunk_sum};

    use super::*;
    use crate::peer::User;

    /// The shard of a rank, as its launcher seals it on disk.
    fn seal(directory: &Path, step: u64, rank: u32) {
        let identity = Identity { job: "job".into(), attempt: 0, step, rank, world_size: 2 };
        let content = b"weights".as_slice();
        let manifest = Manifest {
            identity,
            run: "run".to_owned(),
            created_unix_s: 1_700_000_000,
            serialisation: "safetensors".to_owned(),
            software: BTreeMap::new(),
            file: SealedFile {
                name: "state".to_owned(),
                size: 7,
                xxh3_128: twox_hash::XxHash3_128::oneshot(content),
            },
            chunks: Some(Chunks { bytes: 4096, sums: vec![chunk_sum(content)] }),
            shared_content: None,
        };
        let home = directory.join(format!("step-{step:012}/rank-{rank:05}"));
        fs::create_dir_all(&home).unwrap();
        fs::write(home.join("state"), content).unwrap();
        fs::write(home.join(MANIFEST_NAME), manifest.encode()).unwrap();
    }

    /// The shards of a directory, before the first look.
    fn watching(directory: &Path) -> LocalShards {
        let own = LocalShards::default();
        let (run, directory) = ("run".to_owned(), directory.to_owned());
        own.watch(WatchedDirectory { run, directory, user: User::own(), pool: None });
        own
    }

    #[test]
    fn a_step_that_is_being_sent_keeps_its_files_from_the_time_they_are_on_disk() {
        let directory = testing::tempdir().unwrap();
        let own = watching(directory.path());
        [10, 20].into_iter().for_each(|step| seal(directory.path(), step, 0));
        own.look();
        let shards: Vec<_> = own.list().into_iter().map(|(shard, ..)| shard).collect();
        let shard_of = |step: u64| shards.iter().find(|shard| shard.key.step == step).unwrap().clone();
        let (sent, other) = (shard_of(10), shard_of(20));
        fs::remove_dir_all(directory.path().join("step-000000000010")).unwrap();
        own.look();
        // As if it had been sent from memory all the time.
        own.set_sending(Some(sent.key.clone()));
        seal(directory.path(), 10, 0);
        own.look();
        // A newer step has replaced it.
        fs::remove_dir_all(directory.path()).unwrap();
        own.look();
        assert!(own.is_held(&sent.root), "its owner still has it");
        assert!(!own.is_held(&other.root));
        assert_eq!(own.open_pinned(&sent.root).map(|(sealed, _)| sealed.shard.key.step), Some(10));
        // It stays as long as it is the step that the job goes back to.
        let launch = sent.key.run.to_string();
        assert!(own.holds_all_of(&launch, (0, 10)) && !own.holds_all_of(&launch, (0, 20)));
        own.hold_only(&BTreeSet::new(), Some(&(launch.clone(), (0, 10))));
        assert!(own.holds_all_of(&launch, (0, 10)));
        own.hold_only(&BTreeSet::new(), Some(&(launch.clone(), (0, 20))));
        assert!(!own.holds_all_of(&launch, (0, 10)));
    }

    #[test]
    fn a_step_is_held_only_with_the_shards_of_all_ranks_of_the_host() {
        let directory = testing::tempdir().unwrap();
        let own = watching(directory.path());
        seal(directory.path(), 10, 0);
        seal(directory.path(), 20, 1);
        own.look();
        let shards = own.list();
        let key_of = |step: u64| &shards.iter().find(|(shard, ..)| shard.key.step == step).unwrap().0.key;
        own.hold(key_of(10));
        assert!(!own.holds_all_of(&key_of(10).run, (0, 10)), "the other rank of the host has no shard of it");
        seal(directory.path(), 10, 1);
        own.look();
        own.hold(key_of(10));
        assert!(own.holds_all_of(&key_of(10).run, (0, 10)));
        assert!(!own.holds_all_of("another", (0, 10)));
    }
}

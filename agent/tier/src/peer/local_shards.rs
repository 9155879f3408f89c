//! Shards of this host's ranks: the checkpoint directories of its jobs, read with the rights of their users.

mod look;

pub(crate) use look::rank_directories;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use mainstay_checkpoint::inventory::{Medium, Shard, StepKey};
use mainstay_checkpoint::owner::owner;
use mainstay_checkpoint_format::MANIFEST_NAME;
use serde::{Deserialize, Serialize};

use crate::files::Pack;
use crate::lock;
use crate::os::SendMapping;
use crate::peer::local_shards::look::{CheckTurn, KnownManifests};
use crate::peer::pooled::{PooledShard, reserved_in_pool, stamp_of_pool};
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

#[cfg(test)]
mod tests;

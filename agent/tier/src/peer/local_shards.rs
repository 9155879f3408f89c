//! Shards of this host's ranks: the checkpoint directories of its jobs, read with the rights of their users.

mod look;
mod opened;
mod pinned;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mainstay_checkpoint::inventory::{Medium, Shard, StepKey};
use mainstay_checkpoint::owner::owner;
use mainstay_checkpoint_format::MANIFEST_NAME;
use serde::{Deserialize, Serialize};

pub(crate) use self::look::rank_directories;
use self::look::{Read, Turn};
pub use self::opened::Opened;
use self::pinned::PinnedShard;
use super::pooled::{self, Pooled};
use super::sealed::Sealed;
use super::user::{Access, User, Users};
use crate::bytes::Bytes;
use crate::files::Pack;
use crate::os::Outgoing;

/// Maximum number of watched directories of one user.
const WATCHED_EACH: usize = 64;

/// A checkpoint directory of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watched {
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
    watched: Vec<Watched>,
    shards: BTreeMap<String, Found>,
    /// Shards in launchers' memory, by root: preferred to the copy on disk.
    pooled: BTreeMap<String, Pooled>,
    /// Sealed steps of trainers' files, by watched directory and run.
    packs: BTreeMap<(PathBuf, String), Vec<Arc<Pack>>>,
    /// Manifests that were read, by user and path, with a mark that shows whether they changed.
    read: Read,
    /// Running checks, by user and directory.
    turns: BTreeMap<(u32, PathBuf), Arc<Turn>>,
    /// Mapped memory of sent slots, by file, with device, inode and length to detect another file.
    mapped: BTreeMap<PathBuf, ((u64, u64, u64), Outgoing)>,
    /// Shards on disk whose files stay open until their replicas are stored, by root.
    held: BTreeMap<String, PinnedShard>,
    /// The step that is being sent. Its files are opened as soon as they are on disk.
    sending: Option<StepKey>,
    /// Shards whose bytes differ from their seal.
    bad: BTreeSet<String>,
}

#[derive(Clone, Debug)]
struct Found {
    sealed: Arc<Sealed>,
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
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to watch a directory.
    pub fn watch(&self, watched: Watched) {
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
        let of_user = inner.watched.iter().filter(|place| place.user.uid == uid).count();
        if of_user > WATCHED_EACH
            && let Some(oldest) = inner.watched.iter().position(|place| place.user.uid == uid)
        {
            inner.watched.remove(oldest);
        }
    }

    /// All watched directories.
    pub fn watched(&self) -> Vec<Watched> {
        self.inner().watched.clone()
    }

    /// Checks all directories. Returns whether there is anything new.
    pub fn look(&self) -> bool {
        let (watched, were_read, known) = {
            let mut inner = self.inner();
            let known: Vec<Pooled> = inner.pooled.values().cloned().collect();
            (inner.watched.clone(), std::mem::take(&mut inner.read), known)
        };
        let (were_read, known) = (Arc::new(were_read), Arc::new(known));
        let mut pooled: BTreeMap<String, Pooled> = BTreeMap::new();
        let mut looked = BTreeMap::new();
        let mut shards = BTreeMap::new();
        for place in &watched {
            match self.look_aside(place, &were_read, &known) {
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
                    let is_there = |found: &Found| {
                        found.root == place.directory && found.access.user().uid == place.user.uid
                    };
                    let before = inner.shards.iter().filter(|(_, found)| is_there(found));
                    shards.extend(before.map(|(root, found)| (root.clone(), found.clone())));
                    let is_read = |(uid, path): &(u32, PathBuf)| {
                        *uid == place.user.uid && path.starts_with(&place.directory)
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
        held.retain(|_, shard| watched.iter().any(|place| shard.is_of(place)));
        bad.retain(|root| {
            shards.contains_key(root)
                || pooled.contains_key(root)
                || packed.contains(root)
                || held.contains_key(root)
        });
        let is_new = |root: &String| !inner.shards.contains_key(root) && !inner.pooled.contains_key(root);
        let news = shards.keys().chain(pooled.keys()).any(is_new);
        // The kernel frees memory that a launcher released only when no process has it mapped.
        inner.mapped.retain(|place, (was, _)| is_still(place, was));
        (inner.shards, inner.pooled) = (shards, pooled);
        let sending = inner.sending.clone();
        drop(inner);
        sending.iter().for_each(|of| self.hold(of));
        news
    }

    /// A number that changes when something is sealed or released in launchers' memory. Much cheaper than a full check.
    pub(crate) fn stamp_of_memory(&self) -> u64 {
        let watched = self.watched();
        let pools =
            watched.iter().filter_map(|place| Some((place.pool.as_ref()?, self.users.access(place.user))));
        pools.fold(0, |sum: u64, (pool, access)| sum.rotate_left(7) ^ pooled::stamp(pool, &access))
    }

    /// For each rank of this host, the memory that its launcher reserves for a shard.
    pub(crate) fn reserved(&self) -> Vec<u64> {
        let watched = self.watched();
        let pools = watched.iter().filter_map(|place| Some((place.pool.as_ref()?, place.user)));
        pools.flat_map(|(pool, user)| pooled::reserved(pool, &self.users.access(user))).collect()
    }

    /// Whether any watched job has a launcher's memory.
    pub(crate) fn has_memory(&self) -> bool {
        self.inner().watched.iter().any(|place| place.pool.is_some())
    }

    /// Whether the last check found any shard.
    pub(crate) fn has_shards(&self) -> bool {
        let inner = self.inner();
        !(inner.pooled.is_empty() && inner.shards.is_empty() && inner.packs.is_empty())
    }

    /// The shards, each with its medium and whether it is, as far as known, intact.
    pub fn list(&self) -> Vec<(Shard, Medium, bool)> {
        let inner = self.inner();
        let reported =
            |sealed: &Sealed, medium| (sealed.shard.clone(), medium, !inner.bad.contains(&sealed.shard.root));
        // A shard in memory and on disk is listed twice: each copy may be lost alone.
        let in_memory = inner.pooled.values().map(|of| reported(&of.sealed, Medium::Memory));
        let packs = inner.packs.values().flatten().map(|pack| reported(&pack.sealed, pack.medium));
        let on_disk = inner.shards.values().map(|of| reported(&of.sealed, of.medium));
        let deleted = inner.held.iter().filter(|(root, _)| !inner.shards.contains_key(*root));
        let held = deleted.map(|(_, of)| reported(of.sealed(), of.medium()));
        in_memory.chain(on_disk).chain(held).chain(packs).collect()
    }

    /// For shards whose ranks named ranks that should save the same: the group and the root over the saved bytes, by the shard's root.
    pub(crate) fn shared_content(&self) -> BTreeMap<String, (String, String)> {
        let inner = self.inner();
        let sealed =
            inner.pooled.values().map(|of| &of.sealed).chain(inner.shards.values().map(|of| &of.sealed));
        let reported =
            sealed.filter_map(|sealed| Some((sealed.shard.root.clone(), sealed.shared_content.clone()?)));
        reported.map(|(root, shared)| (root, (shared.group, shared.root))).collect()
    }

    /// Sets what is offered of a watched directory for one run; watches of other users are not affected. Returns whether it changed.
    pub(crate) fn set_packs(&self, directory: &Path, run: &str, packs: Vec<Arc<Pack>>) -> bool {
        let mut inner = self.inner();
        let place = (directory.to_owned(), run.to_owned());
        let is_same = inner.packs.get(&place).is_some_and(|before| {
            before.len() == packs.len() && before.iter().zip(&packs).all(|(a, b)| Arc::ptr_eq(a, b))
        });
        if !is_same {
            inner.packs.insert(place, packs);
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
    fn mapped(&self, pooled: &Pooled, file: &File) -> Option<Outgoing> {
        let found = file.metadata().ok()?;
        let is = (found.dev(), found.ino(), found.len());
        let place = pooled.place();
        let mut inner = self.inner();
        if let Some((was, memory)) = inner.mapped.get(&place)
            && *was == is
        {
            return Some(memory.clone());
        }
        let memory = Outgoing::of(file, found.len()).ok()?;
        inner.mapped.insert(place, (is, memory.clone()));
        Some(memory)
    }

    fn pack(&self, root: &str) -> Option<Arc<Pack>> {
        self.inner().packs.values().flatten().find(|pack| pack.sealed.shard.root == root).cloned()
    }

    /// Opens a shard in a launcher's memory by its root.
    pub(crate) fn open_pooled(&self, root: &str) -> Option<Opened> {
        let pooled = self.inner().pooled.get(root).cloned()?;
        let file = pooled.open()?;
        let memory = self.mapped(&pooled, &file);
        let bytes = Arc::new(Bytes::File(file, memory));
        Some(Opened { sealed: Arc::clone(&pooled.sealed), bytes, pooled: Some(pooled) })
    }

    /// Opens a shard by its root: from memory, or from its checkpoint directory.
    pub(crate) fn open(&self, root: &str) -> Option<Opened> {
        if let Some(opened) = self.open_pooled(root) {
            return Some(opened);
        }
        if let Some(pack) = self.pack(root) {
            return Some(Opened::of_pack(&pack));
        }
        self.open_file(root).or_else(|| self.open_pinned(root)).map(Opened::of_file)
    }

    pub(crate) fn open_file(&self, root: &str) -> Option<(Arc<Sealed>, File)> {
        let found = self.inner().shards.get(root).cloned()?;
        let as_user = found.access.act().ok()?;
        let file = as_user.open(&found.root).ok()?.read(&found.below.join(&found.sealed.file)).ok()?;
        // A name in the user's directory may be a file of another user.
        (file.metadata().ok()?.uid() == found.access.user().uid).then_some((found.sealed, file))
    }

    /// Records that the bytes of a shard differ from its seal: it is no longer offered.
    pub fn is_bad(&self, root: &str) {
        let mut inner = self.inner();
        inner.held.remove(root);
        inner.bad.insert(root.to_owned());
    }

    /// Records that such a shard exists again and its bytes were verified.
    pub(crate) fn is_good(&self, root: &str) {
        self.inner().bad.remove(root);
    }

    /// Deletes a shard. Returns whether it existed.
    ///
    /// # Errors
    /// It exists and cannot be deleted.
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
fn is_still(place: &Path, was: &(u64, u64, u64)) -> bool {
    fs::symlink_metadata(place).is_ok_and(|found| (found.dev(), found.ino(), found.len()) == *was)
}

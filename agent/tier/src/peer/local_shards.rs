//! What ranks of this host made: the checkpoint directories of its jobs, read as the user whose they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mainstay_checkpoint::MANIFEST_NAME;
use mainstay_core::checkpoint::inventory::{Medium, Shard};
use mainstay_core::checkpoint::owner::owner;
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::pooled::{self, Pooled};
use super::sealed::Sealed;
use super::user::{As, User};
use crate::beneath::Beneath;
use crate::bytes::Bytes;
use crate::files::Pack;
use crate::os::Outgoing;

/// Directories of one user that are watched.
const WATCHED_EACH: usize = 64;

/// A checkpoint directory of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watched {
    /// The job, by its run id; with its owner (`core::checkpoint::owner`) where a user asked for it.
    pub run: String,
    /// Where its steps lie.
    pub directory: PathBuf,
    /// Whose files they are; others are not looked at.
    pub user: User,
    /// The memory of its launcher, where a step lies before it comes to the disk.
    #[serde(default)]
    pub pool: Option<PathBuf>,
}

/// The shards in all directories that are watched.
#[derive(Debug, Default)]
pub struct LocalShards {
    inner: Mutex<Inner>,
}

/// How a file was when it was last read, and what was read of it; none where it held nothing whole.
type LastRead = (Mark, Option<Arc<Sealed>>);

#[derive(Debug, Default)]
struct Inner {
    watched: Vec<Watched>,
    shards: BTreeMap<String, Found>,
    /// What lies in launchers' memory, by root: the nearer copy while it lies there.
    pooled: BTreeMap<String, Pooled>,
    /// What was sealed of files that trainers write themselves, by the directory that is watched and the run.
    packs: BTreeMap<(PathBuf, String), Vec<Arc<Pack>>>,
    /// Manifests that were read, by user and path, with what tells whether they changed.
    read: Read,
    /// Looks that are under way, by user and directory.
    turns: BTreeMap<(u32, PathBuf), Arc<Turn>>,
    /// The memory of slots that were sent, by their files, with what tells whether a file is another one.
    mapped: BTreeMap<PathBuf, ((u64, u64, u64), Outgoing)>,
    /// Shards whose bytes are not what was sealed.
    bad: BTreeSet<String>,
}

use crate::files::tree::Mark;

#[derive(Clone, Debug)]
struct Found {
    sealed: Arc<Sealed>,
    /// The directory that is watched.
    root: PathBuf,
    /// The shard's directory below it.
    below: PathBuf,
    user: User,
    medium: Medium,
}

/// How long a look at one place may take before the others go on without it.
const LOOK_WITHIN: Duration = Duration::from_secs(2);

/// Manifests that were read, by user and path.
type Read = BTreeMap<(u32, PathBuf), LastRead>;

/// What a look at one place saw.
#[derive(Debug, Default)]
struct Seen {
    pooled: Vec<Pooled>,
    looked: Read,
    shards: Vec<(String, Found)>,
}

/// Whether a look at a place is under way, and whether it has not returned for too long.
#[derive(Debug, Default)]
struct Turn {
    is_taken: AtomicBool,
    is_stuck: AtomicBool,
}

impl Turn {
    fn take(&self) -> bool {
        !self.is_taken.swap(true, Ordering::SeqCst)
    }

    fn end(&self) {
        self.is_stuck.store(false, Ordering::SeqCst);
        self.is_taken.store(false, Ordering::SeqCst);
    }
}

/// A shard that is open for reading.
#[derive(Debug)]
pub struct Opened {
    /// What it is.
    pub sealed: Arc<Sealed>,
    /// They begin with the shard.
    pub bytes: Arc<Bytes>,
    /// Where it lies in a launcher's memory, which may be given to another step at any time.
    pooled: Option<Pooled>,
}

impl Opened {
    /// Of a file that is a shard and nothing else.
    pub(crate) fn of_file((sealed, file): (Arc<Sealed>, File)) -> Opened {
        Opened { sealed, bytes: Arc::new(file.into()), pooled: None }
    }

    /// Of a replica in the store.
    pub(crate) fn of_replica((sealed, file, memory): (Arc<Sealed>, File, Option<Outgoing>)) -> Opened {
        Opened { sealed, bytes: Arc::new(Bytes::File(file, memory)), pooled: None }
    }

    /// Of files that lie where their trainer wrote them.
    fn of_pack(pack: &Arc<Pack>) -> Opened {
        let bytes = Arc::new(Bytes::Pack(Arc::clone(pack)));
        Opened { sealed: Arc::clone(&pack.sealed), bytes, pooled: None }
    }

    /// Whether it lies in files of a trainer's: nobody need bring it to this host.
    pub(crate) fn is_pack(&self) -> bool {
        matches!(*self.bytes, Bytes::Pack(_))
    }

    /// Whether the file still holds it: bytes that differ then are damaged.
    pub fn is_still(&self) -> bool {
        match &*self.bytes {
            Bytes::Pack(pack) => pack.content.is_still(),
            Bytes::File(..) => self.pooled.as_ref().is_none_or(Pooled::is_still),
        }
    }

    /// Asks that it be left where it is for the next seconds.
    pub fn pin(&self) {
        self.pooled.iter().for_each(Pooled::pin);
    }

    /// Whether the file is as long as it must be.
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

    /// The first chunk that is not what was sealed.
    pub(crate) fn first_bad(&self) -> io::Result<Option<u32>> {
        match (&*self.bytes, &self.pooled) {
            (Bytes::File(file, _), None) => self.sealed.first_bad(file),
            (bytes, _) => self.sealed.first_bad_from_start(bytes),
        }
    }
}

impl LocalShards {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches a directory from now on.
    pub fn watch(&self, watched: Watched) {
        let mut inner = self.inner();
        // Another user who names the same directory takes nothing away from this one.
        inner.watched.retain(|other| {
            other.directory != watched.directory
                || other.user.uid != watched.user.uid
                || owner(&other.run) != owner(&watched.run)
        });
        let uid = watched.user.uid;
        inner.watched.push(watched);
        // Whoever watches very many loses the oldest of their own.
        let of_user = inner.watched.iter().filter(|place| place.user.uid == uid).count();
        if of_user > WATCHED_EACH
            && let Some(oldest) = inner.watched.iter().position(|place| place.user.uid == uid)
        {
            inner.watched.remove(oldest);
        }
    }

    /// All directories that are watched.
    pub fn watched(&self) -> Vec<Watched> {
        self.inner().watched.clone()
    }

    /// Looks through all directories. Whether anything is there that was not there before.
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
                // Its file system does not answer: what was seen there last is what is known of it, and others' places go on.
                None => {
                    let inner = self.inner();
                    let is_there =
                        |found: &Found| found.root == place.directory && found.user.uid == place.user.uid;
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
        inner
            .bad
            .retain(|root| shards.contains_key(root) || pooled.contains_key(root) || packed.contains(root));
        let is_new = |root: &String| !inner.shards.contains_key(root) && !inner.pooled.contains_key(root);
        let news = shards.keys().chain(pooled.keys()).any(is_new);
        // Memory that a launcher gave up is free only when nobody has it mapped.
        inner.mapped.retain(|place, (was, _)| is_still(place, was));
        (inner.shards, inner.pooled) = (shards, pooled);
        news
    }

    /// A look at one place, on a thread of its own: one that does not return is waited for once, and is not begun again before it has.
    fn look_aside(&self, place: &Watched, were_read: &Arc<Read>, known: &Arc<Vec<Pooled>>) -> Option<Seen> {
        let turn = {
            let mut inner = self.inner();
            let Inner { turns, watched, .. } = &mut *inner;
            turns.retain(|(uid, directory), _| {
                watched.iter().any(|of| of.user.uid == *uid && of.directory == *directory)
            });
            Arc::clone(turns.entry((place.user.uid, place.directory.clone())).or_default())
        };
        let until = Instant::now() + LOOK_WITHIN;
        // Another look may be at it, which began before what this one is about.
        while !turn.take() {
            if turn.is_stuck.load(Ordering::SeqCst) || Instant::now() >= until {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let (told, tells) = std::sync::mpsc::sync_channel(1);
        let (place, were_read, known, of_thread) =
            (place.clone(), Arc::clone(were_read), Arc::clone(known), Arc::clone(&turn));
        let work = move || {
            let seen = look_at(&place, &were_read, &known);
            of_thread.end();
            let _ = told.send(seen);
        };
        if std::thread::Builder::new().name("ckpt-look".to_owned()).spawn(work).is_err() {
            turn.end();
            return None;
        }
        let seen = tells.recv_timeout(until.saturating_duration_since(Instant::now()));
        if seen.is_err() {
            turn.is_stuck.store(true, Ordering::SeqCst);
            tracing::warn!(
                "a watched checkpoint directory does not answer: what was seen there last is offered"
            );
        }
        seen.ok()
    }

    /// A number that is another one when something was sealed in launchers' memory, or given up. Much cheaper than a look.
    pub(crate) fn stamp_of_memory(&self) -> u64 {
        stamp_of(&self.watched())
    }

    /// For each rank of this host how much memory its launcher keeps for a shard.
    pub(crate) fn reserved(&self) -> Vec<u64> {
        let watched = self.watched();
        let pools = watched.iter().filter_map(|place| Some((place.pool.as_ref()?, place.user)));
        pools.flat_map(|(pool, user)| pooled::reserved(pool, user)).collect()
    }

    /// Whether there is any launcher's memory to look at.
    pub(crate) fn has_memory(&self) -> bool {
        self.inner().watched.iter().any(|place| place.pool.is_some())
    }

    /// Whether any shard was found at the last look.
    pub(crate) fn has_shards(&self) -> bool {
        let inner = self.inner();
        !(inner.pooled.is_empty() && inner.shards.is_empty() && inner.packs.is_empty())
    }

    /// What lies there: each with where it lies, and whether it is as far as is known what was sealed.
    pub fn list(&self) -> Vec<(Shard, Medium, bool)> {
        let inner = self.inner();
        let told =
            |sealed: &Sealed, medium| (sealed.shard.clone(), medium, !inner.bad.contains(&sealed.shard.root));
        // One that lies in memory and on the disk is told of twice: each may be lost alone.
        let in_memory = inner.pooled.values().map(|of| told(&of.sealed, Medium::Memory));
        let packs = inner.packs.values().flatten().map(|pack| told(&pack.sealed, pack.medium));
        in_memory.chain(inner.shards.values().map(|of| told(&of.sealed, of.medium))).chain(packs).collect()
    }

    /// Of shards whose ranks said who should have saved the same: the group, and the root over what they did, by the shard's root.
    pub(crate) fn alike(&self) -> BTreeMap<String, (String, String)> {
        let inner = self.inner();
        let sealed =
            inner.pooled.values().map(|of| &of.sealed).chain(inner.shards.values().map(|of| &of.sealed));
        let told = sealed.filter_map(|sealed| Some((sealed.shard.root.clone(), sealed.alike.clone()?)));
        told.map(|(root, alike)| (root, (alike.group, alike.root))).collect()
    }

    /// What is offered of a directory that is watched from now on, of one run: one user's watch hides nothing of another's. Whether that is something else than before.
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

    /// Files that are not what was sealed any more.
    pub(crate) fn forget_pack(&self, root: &str) {
        let mut inner = self.inner();
        inner.packs.values_mut().for_each(|packs| packs.retain(|pack| pack.sealed.shard.root != root));
    }

    /// The roots of what all hosts see: nobody keeps copies of it.
    pub(crate) fn shared(&self) -> BTreeSet<String> {
        let inner = self.inner();
        let shared = inner.packs.values().flatten().filter(|pack| pack.is_shared);
        shared.map(|pack| pack.sealed.shard.root.clone()).collect()
    }

    /// The memory of a slot. It stays mapped for the steps that the slot will hold: to map it anew each time takes longer than to send it.
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

    /// A shard by its root, in a launcher's memory.
    pub(crate) fn open_pooled(&self, root: &str) -> Option<Opened> {
        let pooled = self.inner().pooled.get(root).cloned()?;
        let file = pooled.open()?;
        let memory = self.mapped(&pooled, &file);
        let bytes = Arc::new(Bytes::File(file, memory));
        Some(Opened { sealed: Arc::clone(&pooled.sealed), bytes, pooled: Some(pooled) })
    }

    /// A shard by its root: from memory, or from where its ranks' checkpoints lie.
    pub(crate) fn open(&self, root: &str) -> Option<Opened> {
        if let Some(opened) = self.open_pooled(root) {
            return Some(opened);
        }
        if let Some(pack) = self.pack(root) {
            return Some(Opened::of_pack(&pack));
        }
        self.open_file(root).map(Opened::of_file)
    }

    pub(crate) fn open_file(&self, root: &str) -> Option<(Arc<Sealed>, File)> {
        let found = self.inner().shards.get(root).cloned()?;
        let _as_user = As::user(found.user).ok()?;
        let file = Beneath::open(&found.root).ok()?.read(&found.below.join(&found.sealed.file)).ok()?;
        // A name in a directory of the user's may be another one's file.
        (file.metadata().ok()?.uid() == found.user.uid).then_some((found.sealed, file))
    }

    /// The bytes of a shard were found not to be what was sealed: it is offered no more.
    pub fn is_bad(&self, root: &str) {
        self.inner().bad.insert(root.to_owned());
    }

    /// Such a shard is there again, and its bytes were compared.
    pub(crate) fn is_good(&self, root: &str) {
        self.inner().bad.remove(root);
    }

    /// Deletes a shard; whether it was there.
    ///
    /// # Errors
    /// It is there and cannot be deleted.
    pub fn remove(&self, root: &str) -> io::Result<bool> {
        let Some(found) = self.inner().shards.get(root).cloned() else { return Ok(false) };
        let _as_user = As::user(found.user)?;
        let at = Beneath::open(&found.root)?;
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

/// Looks through one place.
fn look_at(place: &Watched, were_read: &Read, known: &[Pooled]) -> Seen {
    let mut seen = Seen::default();
    if let Some(pool) = &place.pool {
        seen.pooled = pooled::look(pool, place.user, &place.run, known);
    }
    let Ok(_as_user) = As::user(place.user) else { return seen };
    let Ok(at) = Beneath::open(&place.directory) else { return seen };
    let medium = medium_at(&at);
    for below in rank_directories(&at) {
        let manifest = below.join(MANIFEST_NAME);
        let path = place.directory.join(&manifest);
        let Some(mark) = mark_of(&at, &manifest, place.user) else { continue };
        let known = were_read
            .get(&(place.user.uid, path.clone()))
            .filter(|(before, _)| *before == mark)
            .map(|(_, sealed)| sealed.clone());
        // Pieces are made and kept by agents: no rank seals one.
        let read = || {
            let sealed = Sealed::read_in(&at, &manifest).ok();
            let sealed = sealed.filter(|sealed| sealed.shard.piece.is_none())?;
            sealed.owned_as(&place.run).ok()
        };
        let sealed = known.unwrap_or_else(|| read().map(Arc::new));
        seen.looked.insert((place.user.uid, path), (mark, sealed.clone()));
        if let Some(sealed) = sealed {
            let (root, user) = (place.directory.clone(), place.user);
            let found = Found { sealed: Arc::clone(&sealed), root, below, user, medium };
            seen.shards.push((sealed.shard.root.clone(), found));
        }
    }
    seen
}

/// Whether a slot's file is there, and the same that it was: device, inode and length.
fn is_still(place: &Path, was: &(u64, u64, u64)) -> bool {
    fs::symlink_metadata(place).is_ok_and(|found| (found.dev(), found.ino(), found.len()) == *was)
}

fn stamp_of(watched: &[Watched]) -> u64 {
    let pools = watched.iter().filter_map(|place| Some((place.pool.as_ref()?, place.user)));
    pools.fold(0, |sum: u64, (pool, user)| sum.rotate_left(7) ^ pooled::stamp(pool, user))
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

fn mark_of(at: &Beneath, below: &Path, user: User) -> Option<Mark> {
    let found = at.stat(below).ok().filter(|found| found.st_uid == user.uid)?;
    let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    is_file.then(|| Mark::of_stat(&found))
}

pub(crate) fn medium_of(path: &Path) -> Medium {
    Beneath::open(path).map_or(Medium::Disk, |at| medium_at(&at))
}

fn medium_at(at: &Beneath) -> Medium {
    const TMPFS: i64 = 0x0102_1994;
    match at.file_system() {
        Ok(TMPFS) => Medium::Memory,
        _ => Medium::Disk,
    }
}

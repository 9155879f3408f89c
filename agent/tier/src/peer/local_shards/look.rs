//! Checks the watched directories and launchers' memory with the rights of their users.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mainstay_checkpoint_format::MANIFEST_NAME;
use rustix::fs::FileType;

use crate::beneath::{Beneath, medium_at};
use crate::files::tree::FileVersion;
use crate::os::spawn;
use crate::peer::local_shards::{Inner, LocalShard, LocalShards, WatchedDirectory};
use crate::peer::pooled::{PooledShard, look_into_pool};
use crate::peer::user::{Access, User};
use crate::seal::SealedShard;

/// The mark of a file when it was last read, and its manifest; none if it was not valid.
pub(super) type LastRead = (FileVersion, Option<Arc<SealedShard>>);

/// Maximum time for the check of one place before the check continues without it.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// Manifests that were read, by user and path.
pub(super) type KnownManifests = BTreeMap<(u32, PathBuf), LastRead>;

/// The result of checking one place.
#[derive(Debug, Default)]
pub(super) struct DirectoryShards {
    pub(super) pooled: Vec<PooledShard>,
    pub(super) looked: KnownManifests,
    pub(super) shards: Vec<(String, LocalShard)>,
}

/// Whether a check of a place is running, and whether it is stuck.
#[derive(Debug, Default)]
pub(super) struct CheckTurn {
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
    pub(super) fn look_aside(
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

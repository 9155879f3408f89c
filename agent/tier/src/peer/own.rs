//! What ranks of this host made: the checkpoint directories of its jobs, read as the user whose they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use mainstay_checkpoint::MANIFEST_NAME;
use mainstay_core::checkpoint::inventory::{Medium, Shard};
use serde::{Deserialize, Serialize};

use super::sealed::{Sealed, open_plainly};
use super::user::{As, User};

/// A checkpoint directory of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watched {
    /// The job, by its run id.
    pub run: String,
    /// Where its steps lie.
    pub directory: PathBuf,
    /// Whose files they are; others are not looked at.
    pub user: User,
}

/// The shards in all directories that are watched.
#[derive(Debug, Default)]
pub struct Own {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    watched: Vec<Watched>,
    shards: BTreeMap<String, Found>,
    /// Manifests that were read, by path, with what tells whether they changed.
    read: BTreeMap<PathBuf, (Mark, Option<Arc<Sealed>>)>,
    /// Shards whose bytes are not what was sealed.
    bad: BTreeSet<String>,
}

type Mark = (u64, u64, Option<SystemTime>);

#[derive(Clone, Debug)]
struct Found {
    sealed: Arc<Sealed>,
    directory: PathBuf,
    user: User,
    medium: Medium,
}

impl Own {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches a directory from now on.
    pub fn watch(&self, watched: Watched) {
        let mut inner = self.inner();
        inner.watched.retain(|other| other.directory != watched.directory);
        inner.watched.push(watched);
    }

    /// All directories that are watched.
    pub fn watched(&self) -> Vec<Watched> {
        self.inner().watched.clone()
    }

    /// Looks through all directories. Whether anything is there that was not there before.
    pub fn look(&self) -> bool {
        let (watched, read) = {
            let mut inner = self.inner();
            (inner.watched.clone(), std::mem::take(&mut inner.read))
        };
        let mut looked = BTreeMap::new();
        let mut shards = BTreeMap::new();
        for place in &watched {
            let Ok(_as_user) = As::user(place.user) else { continue };
            let medium = medium_of(&place.directory);
            for directory in rank_directories(&place.directory) {
                let path = directory.join(MANIFEST_NAME);
                let Some(mark) = mark_of(&path, place.user) else { continue };
                let known =
                    read.get(&path).filter(|(before, _)| *before == mark).map(|(_, sealed)| sealed.clone());
                let sealed = known.unwrap_or_else(|| Sealed::read(&path).ok().map(Arc::new));
                looked.insert(path, (mark, sealed.clone()));
                if let Some(sealed) = sealed {
                    let found = Found { sealed: Arc::clone(&sealed), directory, user: place.user, medium };
                    shards.insert(sealed.shard.root.clone(), found);
                }
            }
        }
        let mut inner = self.inner();
        inner.read = looked;
        inner.bad.retain(|root| shards.contains_key(root));
        let news = shards.keys().any(|root| !inner.shards.contains_key(root));
        inner.shards = shards;
        news
    }

    /// What lies there: each with where it lies, and whether it is as far as is known what was sealed.
    pub fn list(&self) -> Vec<(Shard, Medium, bool)> {
        let inner = self.inner();
        let told =
            |of: &Found| (of.sealed.shard.clone(), of.medium, !inner.bad.contains(&of.sealed.shard.root));
        inner.shards.values().map(told).collect()
    }

    /// A shard by its root: what it is, and its file.
    pub fn open(&self, root: &str) -> Option<(Arc<Sealed>, File)> {
        let found = self.inner().shards.get(root).cloned()?;
        let _as_user = As::user(found.user).ok()?;
        let file = open_plainly(&found.directory.join(&found.sealed.file)).ok()?;
        // A name in a directory of the user's may be another one's file.
        (file.metadata().ok()?.uid() == found.user.uid).then_some((found.sealed, file))
    }

    /// The bytes of a shard were found not to be what was sealed: it is offered no more.
    pub fn is_bad(&self, root: &str) {
        self.inner().bad.insert(root.to_owned());
    }

    /// Deletes a shard; whether it was there.
    ///
    /// # Errors
    /// It is there and cannot be deleted.
    pub fn remove(&self, root: &str) -> io::Result<bool> {
        let Some(found) = self.inner().shards.get(root).cloned() else { return Ok(false) };
        let _as_user = As::user(found.user)?;
        fs::remove_file(found.directory.join(MANIFEST_NAME))?;
        super::store::sync_directory(&found.directory)?;
        fs::remove_dir_all(&found.directory)?;
        if let Some(step) = found.directory.parent() {
            let _ = fs::remove_dir(step);
        }
        self.inner().shards.remove(root);
        Ok(true)
    }
}

/// The directories of ranks below `directory`: `step-*/rank-*`.
pub(crate) fn rank_directories(directory: &Path) -> Vec<PathBuf> {
    let below = |directory: &Path, prefix: &str| -> Vec<PathBuf> {
        let named = |path: &PathBuf| {
            let name =
                path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(prefix));
            name.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
        };
        fs::read_dir(directory)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .filter(named)
            .collect()
    };
    below(directory, "step-").iter().flat_map(|step| below(step, "rank-")).collect()
}

fn mark_of(path: &Path, user: User) -> Option<Mark> {
    let found = fs::symlink_metadata(path).ok().filter(|found| found.is_file() && found.uid() == user.uid)?;
    Some((found.ino(), found.size(), found.modified().ok()))
}

pub(crate) fn medium_of(path: &Path) -> Medium {
    match rustix::fs::statfs(path) {
        Ok(of) if of.f_type == 0x0102_1994 => Medium::Memory,
        _ => Medium::Disk,
    }
}

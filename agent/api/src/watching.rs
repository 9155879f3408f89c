//! Which directories the agent watches for checkpoints, across restarts.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use mainstay_checkpoint::files::Kind;
use mainstay_checkpoint::owner::owned;
use mainstay_tier::files::{FileWatch, Files, WatchRequest};
use mainstay_tier::peer::{Service, User, WatchedDirectory};
use serde::{Deserialize, Serialize};
use tonic::Status;

use super::refusal::{Reason, invalid};
use super::run_directories::newest_of_each;
use mainstay_journal::store::value_file::ValueFile;

/// What is watched, for threads that may block.
pub struct Watching {
    /// The watches; none without peers and durable storage.
    pub files: Option<Arc<Files>>,
    /// Watches of ranks' own shards.
    pub kept: Arc<Mutex<ValueFile<Vec<WatchedDirectory>>>>,
    /// Watches of directories into which trainers write in their own format.
    pub kept_files: Arc<Mutex<ValueFile<Vec<FilesPlace>>>>,
}

impl Watching {
    /// The watch of a directory into which a trainer writes in its own format: an existing one, or a new one if
    /// requested.
    pub fn watch_files(
        &self,
        place: &WatchedDirectory,
        kind: &str,
    ) -> Result<Option<Arc<FileWatch>>, Status> {
        let Some(files) = &self.files else { return Ok(None) };
        if kind.is_empty() {
            let known = files.find(&place.directory, &place.run);
            // A watch from the configuration is for the owner of the directory.
            let is_theirs = || files.ensure_directory(&place.directory, place.user).is_ok();
            return Ok(known.filter(|watch| watch.run() == place.run || is_theirs()));
        }
        Kind::parse(kind).map_err(|problem| invalid("files_kind", problem))?;
        // An existing watch may be absent for a moment: a new one in its place would keep it out.
        let is_new = files.find(&place.directory, &place.run).is_none();
        if is_new || place.directory.symlink_metadata().is_ok() {
            files
                .ensure_directory(&place.directory, place.user)
                .map_err(|error| Reason::CALLER_NOT_ALLOWED.refuse(error.to_string()))?;
        }
        let known = FilesPlace {
            run: place.run.clone(),
            directory: place.directory.clone(),
            kind: kind.to_owned(),
            user: Some(place.user),
        };
        let gone = || Reason::DIRECTORY_GONE.refuse(format!("{} is gone", place.directory.display()));
        let watch = files.watch(known.wanted().ok_or_else(gone)?);
        let watch = watch.map_err(|error| Reason::DIRECTORY_GONE.refuse(error.to_string()))?;
        let mut kept = self.kept_files.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = kept.value().cloned().unwrap_or_default();
        let uid_of = |place: &FilesPlace| place.user.map(|user| user.uid);
        all.retain(|other| {
            other.directory != known.directory || uid_of(other).is_some_and(|uid| Some(uid) != uid_of(&known))
        });
        all.push(known);
        let all = newest_of_each(all, uid_of);
        if let Err(error) = kept.keep(&all) {
            tracing::warn!(%error, "the watched directories cannot be written down");
        }
        Ok(Some(watch))
    }

    pub fn remember(&self, place: &WatchedDirectory) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = kept.value().cloned().unwrap_or_default();
        all.retain(|other| other.directory != place.directory || other.user.uid != place.user.uid);
        all.push(place.clone());
        let all = newest_of_each(all, |place| Some(place.user.uid));
        if let Err(error) = kept.keep(&all) {
            tracing::warn!(%error, "the watched checkpoint directories cannot be written down");
        }
    }
}

/// A directory that a launcher wants watched, for a trainer that writes in its own format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FilesPlace {
    run: String,
    /// The directory.
    pub directory: PathBuf,
    kind: String,
    /// The user who asked; in records of an earlier version, the directory's owner.
    #[serde(default)]
    user: Option<User>,
}

impl FilesPlace {
    /// None if the owner is unknown: an earlier version recorded it, and the directory is gone.
    pub fn wanted(&self) -> Option<WatchRequest> {
        let owner = || {
            let found = std::fs::symlink_metadata(&self.directory).ok().filter(std::fs::Metadata::is_dir)?;
            Some(User { uid: found.uid(), gid: found.gid() })
        };
        let user = self.user.or_else(owner)?;
        Some(WatchRequest {
            directory: self.directory.clone(),
            run: owned(user.uid, &self.run),
            user: Some(user),
            rules: Kind::parse(&self.kind).unwrap_or(Kind::Auto).rules(),
            expect: 0,
            quiet: 0,
            hosts: Vec::new(),
            shared: None,
        })
    }
}

/// What this agent cannot do for the user of a directory, and why. Files that it may only read are restored through
/// the user's process.
pub fn problem_of(peers: &Service, place: &WatchedDirectory) -> Option<String> {
    let directory = place.directory.display();
    let unserved = peers.users().access(place.user).may_serve(&place.directory).err()?;
    Some(format!("nothing in {directory} is replicated or restored: {unserved}"))
}

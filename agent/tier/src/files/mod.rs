//! Files that other programs write: checkpoints of trainers without Mainstay ([`watch`], [`replicator`]), and compile caches
//! ([`cache`]). They are sealed in place and offered to peers and durable storage as one archive, of which nothing is written
//! on this host.
//!
//! From the bottom: `tree` (lists files), `pack` (files as an archive, and its seal), `unpack` (back into a directory), `catalog` (notes
//! kept over restarts), `host` (shared parts), `watch` (compares steps with their seals and seals new ones), `put_back` (changes in a
//! directory before its trainer resumes, and who makes them), `restore` (returns a directory to the step of the decision), `all`
//! (everything that an agent manages).

mod all;
mod cache;
mod catalog;
mod host;
mod pack;
mod put_back;
mod replicator;
mod restore;
pub(crate) mod tree;
mod unpack;
mod watch;

use std::io;
use std::path::{Path, PathBuf};

pub use all::{CacheRequest, Files, FilesSettings, WatchRequest};
pub use pack::{ARCHIVE_NAME, Content, Pack, SERIALISATION};
pub use put_back::{PartialCheckpoint, PutBack, Started, put_back};
pub use tree::{FileVersion, Member, is_shared, members};
pub use watch::FileWatch;

/// Why files were not sealed or restored.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum FilesError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{0} was written to while it was read")]
    Changed(PathBuf),
    #[error(transparent)]
    Archive(#[from] mainstay_checkpoint::archive::ArchiveError),
    #[error("{0}")]
    Manifest(String),
    /// Steps were sealed and none of them is whole anywhere: a trainer must not be started with what is left.
    #[error("{0}")]
    Lost(String),
    #[error(transparent)]
    Peer(#[from] crate::peer::error::PeerError),
}

impl FilesError {
    pub(crate) fn reading(path: &Path) -> impl FnOnce(io::Error) -> FilesError {
        let path = path.to_owned();
        move |source| FilesError::Io { path, source }
    }
}

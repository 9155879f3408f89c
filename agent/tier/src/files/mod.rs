//! Files that others write: checkpoints of trainers that know nothing of Mainstay ([`watch`], [`replicator`]), and compile caches
//! ([`cache`]). They are sealed where they lie and offered to peers and durable storage as one archive, of which nothing is written
//! on this host.
//!
//! From the bottom: `tree` (which files there are), `compare` and `judge` (what became of them), `take` (their seal), `pack` (them as an
//! archive, and its seal), `unpack` (back into a directory), `catalog` (what is known over restarts), `copies` (of files that are written
//! over), `host` (what all three share), `left` and `put_back` (changes in a directory before its trainer goes on, and who makes them),
//! `back` (which step a job goes back to), `all` (what an agent looks after).

mod all;
mod back;
pub mod cache;
mod catalog;
mod compare;
mod copies;
mod host;
mod judge;
mod left;
mod pack;
mod put_back;
pub mod replicator;
mod take;
pub(crate) mod tree;
mod unpack;
pub mod watch;

use std::io;
use std::path::{Path, PathBuf};

pub use all::{Files, Plan, Wanted, WantedCache, ensure_directory};
pub use left::{PutBack, Started, Unfit};
pub use pack::{ARCHIVE_NAME, Content, Pack, SERIALISATION};
pub use put_back::put_back;
pub use tree::{Mark, Member, is_shared, members};
pub use watch::FileWatch;

/// Why files were not sealed or brought back.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// They cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody wrote while they were read.
    #[error("{0} was written to while it was read")]
    Changed(PathBuf),
    /// They cannot be an archive, or bytes are none.
    #[error(transparent)]
    Archive(#[from] mainstay_core::checkpoint::archive::ArchiveError),
    /// A manifest is of no use.
    #[error("{0}")]
    Manifest(String),
    /// Steps were sealed, and none of them is whole anywhere: a trainer must not be started over what is left.
    #[error("{0}")]
    Lost(String),
    /// Peers and storage.
    #[error(transparent)]
    Peer(#[from] crate::peer::error::PeerError),
}

impl FilesError {
    pub(crate) fn reading(path: &Path) -> impl FnOnce(io::Error) -> FilesError {
        let path = path.to_owned();
        move |source| FilesError::Io { path, source }
    }
}

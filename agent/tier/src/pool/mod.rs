//! Memory for checkpoints that outlives a rank: files on a tmpfs, allocated in full before a rank copies into them, owned by the
//! launcher's keeper. A rank takes a free slot, copies, says that it is filled, and goes on training; the keeper takes the
//! checksums, writes to the disk behind, and gives slots free again, never the newest step that is whole.
//!
//! ```text
//! <root>/<hash of the checkpoint directory>/pool.json, lock, bell, world
//!                                           rank-00003/control          one page: who may touch which slot
//!                                                      slot-0.2         a slot's file; begins with the shard
//!                                                      slot-0.json      the manifest of what is sealed in it
//! ```
//!
//! The path follows from the checkpoint directory: the guardian, or the next launcher of whatever job, finds what a killed launcher
//! left, writes it to the disk and removes it ([`recover`]).

pub mod choose;
mod lock;
mod memory;
mod owner;
mod recover;
mod room;
pub mod world;
mod writer;

pub use owner::{PoolOwner, Status, View, Whole};
pub use recover::{Recovered, recover, recover_all};
pub use room::available;

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_64;

use crate::disk::Keep;

/// What a keeper is told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where pools lie: on a tmpfs.
    pub root: PathBuf,
    /// Where checkpoints go; absolute.
    pub directory: PathBuf,
    /// The job's name.
    pub job: String,
    /// The run, for manifests.
    pub run: String,
    /// All ranks of the job.
    pub world_size: u32,
    /// Those of this host: all of them, where the job has one.
    pub ranks: Range<u32>,
    /// What is kept on the disk.
    pub keep: Keep,
    /// Slots for each rank, if there is room: 2 to 8.
    pub slots: usize,
    /// Bytes of memory for all slots of all ranks; none for half of what is available when they are first asked for.
    pub memory: Option<u64>,
    /// Bytes per second to the disk at most, while the job runs.
    pub rate: Option<u64>,
}

/// Why there is no keeper, or a pool cannot be recovered.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A file of the pool.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// Another launcher keeps checkpoints of this directory.
    #[error("another launcher keeps the checkpoints in {0}")]
    Taken(PathBuf),
    /// It is no pool of this version.
    #[error("{0} is no pool of this version")]
    NotOurs(PathBuf),
}

fn reported(path: &Path) -> impl Fn(io::Error) -> PoolError + '_ {
    move |source| PoolError::Io { path: path.to_owned(), source }
}

/// The pool's directory for a checkpoint directory.
#[must_use]
pub fn directory_of(root: &Path, checkpoints: &Path) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    root.join(format!("{:016x}", XxHash3_64::oneshot(checkpoints.as_os_str().as_bytes())))
}

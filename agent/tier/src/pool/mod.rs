//! Memory for checkpoints that outlives a rank: files on a tmpfs, fully allocated before a rank copies into them, owned by the
//! launcher's keeper. A rank takes a free slot, copies, marks it as filled and continues training. The pool owner computes the
//! checksums, writes to disk in the background and frees slots, but never the newest whole step.
//!
//! ```text
//! <root>/<hash of the checkpoint directory>/pool.json, lock, bell, world
//!                                           rank-00003/control          one page: who may touch which slot
//!                                                      slot-0.2         a slot's file; starts with the shard
//!                                                      slot-0.json      the manifest of the sealed shard
//! ```
//!
//! The path is derived from the checkpoint directory: the guardian, or the next launcher of any job, finds what a killed launcher
//! left, writes it to disk and removes it ([`recover`]).

mod available;
pub mod choose;
mod memory;
mod owner;
mod recover;
pub mod world;

pub use available::available;
pub use owner::{PoolOwner, PoolStatus, PoolView, WholeStep};
pub use recover::{Recovered, recover, recover_all};

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_64;

use crate::disk::Keep;

/// Settings of a pool owner.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory of the pools, on a tmpfs.
    pub root: PathBuf,
    /// Checkpoint directory, absolute.
    pub directory: PathBuf,
    /// The job's name.
    pub job: String,
    /// The run, for manifests.
    pub run: String,
    /// Number of ranks of the job.
    pub world_size: u32,
    /// Ranks of this host: all of them if the job has one host.
    pub ranks: Range<u32>,
    /// What is kept on disk.
    pub keep: Keep,
    /// Slots for each rank, if there is room: 2 to 8.
    pub slots: usize,
    /// Bytes of memory for all slots of all ranks; none: half of what is available when the first slots are requested.
    pub memory: Option<u64>,
    /// Maximum number of bytes per second to disk while the job runs.
    pub rate: Option<u64>,
}

/// Why there is no pool owner, or a pool cannot be recovered.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum PoolError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("another launcher keeps the checkpoints in {0}")]
    Taken(PathBuf),
    #[error("{0} is not a pool of this version")]
    NotOurs(PathBuf),
}

fn io_error(path: &Path) -> impl Fn(io::Error) -> PoolError + '_ {
    move |source| PoolError::Io { path: path.to_owned(), source }
}

/// The pool's directory for a checkpoint directory.
pub fn pool_directory(root: &Path, checkpoints: &Path) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    root.join(format!("{:016x}", XxHash3_64::oneshot(checkpoints.as_os_str().as_bytes())))
}

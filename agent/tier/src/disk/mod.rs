//! Checkpoints on disk: `<directory>/step-000000000010/rank-00003/{state.safetensors, manifest.json}`, the layout of `mainstay.checkpoint`.

mod prune;
mod read;
mod volume;
mod write;

pub use prune::{Doubts, Keep, prune, prune_of_ranks};
pub use read::{Found, found, is_whole, manifest, manifest_path, offered, ranks, steps, verify, whole_steps};
pub(crate) use volume::FileSink;
pub use volume::{Sink, StdVolume, Volume, open_own};
pub(crate) use write::remove_tree;
pub use write::{Pace, WriteError, clear_aside, write};

use std::path::{Path, PathBuf};

/// The directory of a step.
#[must_use]
pub fn step_directory(directory: &Path, step: u64) -> PathBuf {
    directory.join(format!("step-{step:012}"))
}

/// The directory of a shard.
#[must_use]
pub fn shard_directory(directory: &Path, step: u64, rank: u32) -> PathBuf {
    step_directory(directory, step).join(format!("rank-{rank:05}"))
}

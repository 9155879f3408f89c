//! The thread that writes to the disk, behind everything else.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use mainstay_checkpoint::Manifest;

use crate::disk::{self, Doubts, Keep, Pace, StdVolume, WriteError};
use crate::pool::choose::Held;

/// Shards of one step, on their way.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) shards: Vec<(Held, Manifest, Arc<File>)>,
    /// The step that stays on the disk whatever else goes.
    pub(super) vouched: Option<u64>,
}

/// What came of a batch.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) done: Vec<Held>,
    pub(super) failed: Option<(Held, WriteError)>,
}

/// Writes the shards of a step, and then removes what need not be kept. A full disk is given what older steps take, as far as they
/// may go.
pub(super) fn write(
    directory: &Path,
    batch: &Batch,
    keep: Keep,
    pace: &Pace,
    given_up: &dyn Fn() -> bool,
) -> Written {
    let volume = StdVolume;
    let mut written = Written { done: Vec::new(), failed: None };
    for (held, manifest, file) in &batch.shards {
        let mut done = disk::write(&volume, directory, manifest, &**file, pace, given_up);
        if done.as_ref().is_err_and(WriteError::is_full) {
            disk::prune(
                &volume,
                directory,
                Keep { steps: 1, bytes: None },
                &Doubts::read(&volume, directory),
                batch.vouched,
            );
            done = disk::write(&volume, directory, manifest, &**file, pace, given_up);
        }
        match done {
            Ok(()) => written.done.push(*held),
            Err(error) => {
                written.failed = Some((*held, error));
                return written;
            }
        }
    }
    disk::prune(&volume, directory, keep, &Doubts::read(&volume, directory), batch.vouched);
    written
}

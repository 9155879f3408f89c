//! Writes of steps to disk.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use mainstay_checkpoint_format::Manifest;

use crate::disk::{self, Doubts, Keep, Pace, StdVolume, WriteError};
use crate::pool::choose::SealedSlot;

/// Shards of one step that are being written.
#[derive(Debug)]
pub(super) struct WriteBatch {
    pub(super) shards: Vec<(SealedSlot, Manifest, Arc<File>)>,
    /// The step that always stays on disk.
    pub(super) vouched: Option<u64>,
    /// The ranks of this host, and the newest step with copies on other hosts; none if the job has one host.
    pub(super) among: Option<(Range<u32>, Option<u64>)>,
}

impl WriteBatch {
    fn prune(&self, directory: &Path, keep: Keep) {
        let volume = StdVolume;
        match &self.among {
            None => {
                disk::prune(&volume, directory, keep, &Doubts::read(&volume, directory), self.vouched);
            }
            Some((ranks, Some(copied))) => disk::prune_of_ranks(&volume, directory, ranks, keep, *copied),
            // The step that all hosts can go back to is still unknown.
            Some((_, None)) => {}
        }
    }

    /// The process that wrote it was killed. What it left behind is removed by a later write.
    pub(super) fn interrupted(&self, directory: &Path) -> WriteResult {
        let failed = self.shards.first().map(|(held, _, _)| {
            let source = io::Error::new(io::ErrorKind::Interrupted, "the process that wrote it was killed");
            (*held, WriteError::Io { path: directory.to_owned(), source })
        });
        WriteResult { done: Vec::new(), failed }
    }
}

/// The result of a batch.
#[derive(Debug)]
pub(super) struct WriteResult {
    pub(super) done: Vec<SealedSlot>,
    pub(super) failed: Option<(SealedSlot, WriteError)>,
}

/// Writes the shards of a step, then removes what need not be kept. On a full disk, older steps are removed first if
/// possible.
pub(super) fn write_batch(
    directory: &Path,
    batch: &WriteBatch,
    keep: Keep,
    pace: &Pace,
    given_up: &dyn Fn() -> bool,
) -> WriteResult {
    let volume = StdVolume;
    let mut written = WriteResult { done: Vec::new(), failed: None };
    for (held, manifest, file) in &batch.shards {
        let mut done = disk::write(&volume, directory, manifest, &**file, pace, given_up);
        if done.as_ref().is_err_and(WriteError::is_full) {
            batch.prune(directory, Keep { steps: 1, bytes: None });
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
    batch.prune(directory, keep);
    written
}

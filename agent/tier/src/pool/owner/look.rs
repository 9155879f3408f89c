//! Looks at the checkpoint directory, each in a thread of its own: a file system that does not answer must keep the pool
//! owner neither from sealing and freeing slots nor from its end.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::statvfs::statvfs;

use super::Shared;
use super::place::ring;
use crate::disk::{self, StdVolume};
use crate::pool::available;
use crate::pool::choose::At;

impl Shared {
    /// Searches the disk for shards that steps in memory lack, unless an earlier look has not ended.
    pub(super) fn look_elsewhere(self: &Arc<Self>) {
        let (lacking, writing) = {
            let mut inner = self.inner();
            let lacking = inner.lacking(&self.settings);
            if lacking.is_empty() {
                inner.elsewhere.clear();
            }
            (lacking, inner.writing)
        };
        let mut since = self.looks_since.lock().unwrap_or_else(PoisonError::into_inner);
        if since.is_some() || (lacking.is_empty() && !writing) {
            return;
        }
        let shared = Arc::clone(self);
        let look = move || {
            let directory = &shared.settings.directory;
            // Answered by the file system's server, not from a cache. The result does not matter.
            let _ = statvfs(directory);
            let is_there = |(at, rank): &(At, u32)| {
                disk::manifest(&StdVolume, directory, at.1, *rank).is_some_and(|(manifest, _)| {
                    let there = &manifest.identity;
                    (there.job.as_str(), there.attempt, there.world_size)
                        == (shared.settings.job.as_str(), at.0, shared.settings.world_size)
                })
            };
            let found: BTreeSet<(At, u32)> = lacking.into_iter().filter(is_there).collect();
            let before = std::mem::replace(&mut shared.inner().elsewhere, found.clone());
            *shared.looks_since.lock().unwrap_or_else(PoisonError::into_inner) = None;
            if before != found {
                ring(&shared.directory);
            }
        };
        // Without a thread, the next look tries again.
        if std::thread::Builder::new().name("ckpt-look".to_owned()).spawn(look).is_ok() {
            *since = Some(Instant::now());
        }
    }

    /// Whether the file system of the checkpoints has not answered for this long.
    pub(super) fn is_silent(&self, span: Duration) -> bool {
        let since = self.looks_since.lock().unwrap_or_else(PoisonError::into_inner);
        since.is_some_and(|since| since.elapsed() >= span)
    }

    /// Whether slots whose step is being written may get other memory: the write does not end, and there is enough.
    pub(super) fn can_replace(&self, within: Duration) -> bool {
        self.is_silent(within) && {
            let wanted: u64 = self.inner().ranks.iter().map(|memory| memory.wanted).sum();
            available(&self.directory) / 2 >= wanted
        }
    }
}

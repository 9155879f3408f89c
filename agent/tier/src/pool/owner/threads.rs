//! The threads of the pool: one checks the ranks' pages and computes checksums, one writes to disk.

use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::SystemTime;

use mainstay_checkpoint_format::control::{Slot, State};
use mainstay_checkpoint_format::{Identity, Manifest};

use super::place::ring;
use super::{LOOK_WITHOUT_BELL, SEAL_NICE, SILENT, SILENT_AT_END, Shared, WRITE_NICE};
use crate::os::lower_priority;
use crate::pool::writer;
use crate::seal::{SealError, seal};

pub(super) fn keep(shared: &Arc<Shared>, bell: Option<&UnixDatagram>) {
    lower_priority(SEAL_NICE, false);
    loop {
        match bell {
            Some(bell) => drop(bell.recv(&mut [0; 64])),
            None => std::thread::sleep(LOOK_WITHOUT_BELL),
        }
        if shared.stopped.load(Ordering::SeqCst) {
            return;
        }
        shared.look();
        if shared.finishing.load(Ordering::SeqCst) && shared.is_settled() {
            return;
        }
    }
}

pub(super) fn write_on(shared: &Shared) {
    lower_priority(WRITE_NICE, true);
    loop {
        let mut inner = shared.inner();
        let batch = loop {
            if let Some(batch) = inner.batch.take() {
                break batch;
            }
            if shared.stopped.load(Ordering::SeqCst) {
                return;
            }
            inner = shared.batch.wait(inner).unwrap_or_else(PoisonError::into_inner);
        };
        drop(inner);
        let given_up = || shared.stopped.load(Ordering::SeqCst) && !shared.finishing.load(Ordering::SeqCst);
        let settings = &shared.settings;
        let written = writer::write(&settings.directory, &batch, settings.keep, &shared.pace, &given_up);
        shared.inner().written(&batch, written);
        ring(&shared.directory);
    }
}

impl Shared {
    /// Checks all pages once.
    fn look(self: &Arc<Self>) {
        self.answer();
        self.renew();
        self.seal_all();
        self.look_elsewhere();
        let replace = self.can_replace(SILENT);
        let mut inner = self.inner();
        inner.pages().for_each(|control| control.beat());
        inner.vouch(&self.settings);
        inner.free(&self.settings, replace);
        inner.begin_write(&self.settings, self.finishing.load(Ordering::SeqCst));
        self.batch.notify_all();
    }

    /// Whether filled slots still have to be sealed.
    pub(super) fn is_sealing(&self) -> bool {
        let inner = self.inner();
        inner
            .pages()
            .any(|control| control.all().any(|slot| matches!(slot.state, State::Filled | State::Sealing)))
    }

    /// Whether nothing is left to do or to try.
    fn is_settled(&self) -> bool {
        let at_work = self.is_sealing();
        if self.is_silent(SILENT_AT_END) {
            return !at_work;
        }
        let inner = self.inner();
        let unsaved = inner.unsaved(&self.settings);
        // A shard whose last write failed is not tried forever.
        let nothing_to_write = unsaved.is_empty() || inner.trouble.is_some();
        !at_work && nothing_to_write && !inner.writing && inner.batch.is_none()
    }

    /// Accepts filled slots and computes their checksums, several in parallel.
    fn seal_all(&self) {
        let tasks = self.inner().accept(&self.settings);
        let several = std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 8).clamp(1, 4));
        for some in tasks.chunks(several) {
            std::thread::scope(|scope| {
                for (rank, slot, file) in some {
                    scope.spawn(move || {
                        lower_priority(SEAL_NICE, false);
                        let sealed = self.seal_one(*rank, slot, file);
                        self.inner().sealed(*rank, slot, sealed);
                    });
                }
            });
        }
    }

    fn seal_one(&self, rank: u32, slot: &Slot, file: &File) -> Result<Manifest, SealError> {
        let settings = &self.settings;
        let identity = Identity {
            job: settings.job.clone(),
            attempt: slot.epoch,
            step: slot.step,
            rank,
            world_size: settings.world_size,
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        seal(file, slot.used, &identity, &settings.run, now)
    }
}

//! The pool owner: the thread in the launcher that owns the memory of a job's ranks.

mod contents;
mod look;
mod place;
mod reserve;
mod slots;
mod threads;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File};
use std::ops::Range;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mainstay_checkpoint_format::Manifest;
use mainstay_checkpoint_format::control::{POOL_NAME, Slot, State};
use nix::fcntl::Flock;

use self::place::{describe, open_bell, remove_ranks, ring, take};
use self::threads::{keep, write_on};
use crate::disk::{self, Pace, StdVolume};
use crate::inventory::{Shard, Tier};
use crate::pool::choose::At;
use crate::pool::lock::lives;
use crate::pool::memory::{self, Memory};
use crate::pool::writer::Batch;
use crate::pool::{PoolError, Settings, directory_of, recover, reported};

/// Interval of the pool owner's checks without a ring.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The same without a socket to ring.
const LOOK_WITHOUT_BELL: Duration = Duration::from_millis(10);

/// A rank that has waited this long for a slot may get the slot of a step that is not whole yet.
const LONG: Duration = Duration::from_secs(2);

/// A file system that has not answered for this long gets no more of the slots that a rank waits for.
const SILENT: Duration = Duration::from_secs(3);

/// How long the end of a job waits for a file system that does not answer.
const SILENT_AT_END: Duration = Duration::from_secs(10);

/// Interval of the checks whether a thread has ended.
const END_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Pause after a failed write to disk.
const PAUSE: Duration = Duration::from_secs(10);

/// `nice` value of the threads that compute checksums.
const SEAL_NICE: i32 = 5;

/// `nice` value of the thread that writes to disk.
const WRITE_NICE: i32 = 15;

/// State of the tiers at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// The newest whole step in memory, and how long ago it was sealed, in seconds.
    pub memory: Option<(u64, f64)>,
    /// The newest whole step that this launcher has on disk, and how long ago it was sealed, in seconds.
    pub disk: Option<(u64, f64)>,
}

/// A step that all ranks have saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    /// The attempt.
    pub attempt: u64,
    /// The step.
    pub step: u64,
    /// For each rank, the checksums of its shard's chunks.
    pub chunks: Vec<Vec<u64>>,
}

/// The pool owner of one job.
#[derive(Debug)]
pub struct PoolOwner {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    settings: Settings,
    directory: PathBuf,
    inner: Mutex<Inner>,
    /// Notified when there is a batch to write, or when the writer has to stop.
    batch: Condvar,
    /// The last attempt is over: the remaining steps are written to disk.
    finishing: AtomicBool,
    /// The threads have to stop.
    stopped: AtomicBool,
    /// When the look at the checkpoint directory began that has not ended.
    looks_since: Mutex<Option<Instant>>,
    pace: Pace,
    _lock: Flock<File>,
}

#[derive(Debug, Default)]
struct Inner {
    epoch: u64,
    ranks: Vec<Memory>,
    sealed: BTreeMap<(u32, usize), Sealed>,
    on_disk: BTreeSet<(At, u32)>,
    /// Shards of steps in memory that ranks themselves wrote to disk, as of the last check.
    elsewhere: BTreeSet<(At, u32)>,
    batch: Option<Batch>,
    writing: bool,
    messages: Vec<String>,
    last_messages: String,
    trouble: Option<(String, Instant)>,
    waiting_since: BTreeMap<u32, Instant>,
    /// The attempt, and the last of its steps at which replicas agreed.
    agreed: Option<At>,
    /// The newest whole step that was saved before that.
    vouched: Option<At>,
    /// The newest step of which each shard, of all hosts, has a copy on another host.
    copied: Option<At>,
    memory: Option<(u64, Instant)>,
    disk: Option<(u64, Instant)>,
    /// Steps that became whole in memory and were not taken yet.
    whole: Vec<Whole>,
}

#[derive(Debug)]
struct Sealed {
    slot: Slot,
    manifest: Manifest,
    writing: bool,
    when: Instant,
}

impl PoolOwner {
    /// Starts a pool owner: first writes to disk what an earlier launcher of the same checkpoints left.
    ///
    /// # Errors
    /// [`PoolError`]; the job can run without a pool owner.
    pub fn start(settings: Settings) -> Result<PoolOwner, PoolError> {
        let mut directory = directory_of(&settings.root, &settings.directory);
        if settings.ranks != (0..settings.world_size) {
            // Several launchers of one job may be on one machine and save into one directory.
            directory.as_mut_os_string().push(format!("-{}", settings.ranks.start));
        }
        PoolOwner::start_in(directory, settings)
    }

    fn start_in(directory: PathBuf, settings: Settings) -> Result<PoolOwner, PoolError> {
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(reported(&directory))?;
        let lock = take(&directory, &settings.directory)?;
        let mut messages = Vec::new();
        if directory.join(POOL_NAME).exists() {
            match recover::bring_to_disk(&directory) {
                Ok(recovered) => messages.extend(recovered.reported()),
                Err(error) => messages.push(format!(
                    "checkpoints that an earlier launcher left in memory could not be brought to the disk: {error}"
                )),
            }
        }
        let _ = fs::remove_file(directory.join(recover::MARK));
        disk::clear_aside(&StdVolume, &settings.directory, &lives);
        let bell = open_bell(&directory);
        describe(&directory, &settings)?;
        let mut inner = Inner { messages, ..Inner::default() };
        for rank in settings.ranks.clone() {
            let at = memory::directory_of(&directory, rank);
            inner.ranks.push(Memory::make(&directory, rank, settings.world_size, 0).map_err(reported(&at))?);
        }
        let pace = Pace::of(settings.rate);
        let shared = Arc::new(Shared {
            settings,
            directory,
            inner: Mutex::new(inner),
            batch: Condvar::new(),
            finishing: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            looks_since: Mutex::default(),
            pace,
            _lock: lock,
        });
        let mut pool_owner = PoolOwner { shared: shared.clone(), threads: Vec::new() };
        let (of_keeper, of_writer) = (shared.clone(), shared);
        pool_owner.threads.push(thread("ckpt-keeper", move || keep(&of_keeper, bell.as_ref()))?);
        pool_owner.threads.push(thread("ckpt-writer", move || write_on(&of_writer))?);
        Ok(pool_owner)
    }

    /// The pool's directory, for the ranks and for the guardian.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.shared.directory
    }

    /// Starts another attempt: all ranks of the previous one are gone or have left it. Slots that they filled count; slots that they were
    /// filling do not, and neither does anything that they write from now on.
    pub fn begin_attempt(&self, epoch: u64) {
        let mut inner = self.shared.inner();
        let inner = &mut *inner;
        for memory in &inner.ranks {
            let Ok(control) = memory.control() else { continue };
            for slot in control.all() {
                match slot.state {
                    State::Filled if slot.epoch == inner.epoch => _ = control.advance(&slot, State::Sealing),
                    // Its file is replaced: a process that still writes into it has no effect.
                    State::Filling | State::Filled => _ = control.advance(&slot, State::Damaged),
                    _ => {}
                }
            }
            control.set_waits(false);
            control.set_epoch(epoch);
        }
        inner.waiting_since.clear();
        inner.epoch = epoch;
        ring(&self.shared.directory);
    }

    /// Records that replicas of this attempt agreed at a step and never differed before. The newest whole step that was saved before stays
    /// in memory until it is on disk, and there in any case: the job goes back to it if the replicas turn out to differ.
    pub fn vouch(&self, attempt: u64, step: u64) {
        let mut inner = self.shared.inner();
        if inner.agreed != Some((attempt, step)) {
            inner.agreed = Some((attempt, step));
            drop(inner);
            ring(&self.shared.directory);
        }
    }

    /// A view for the code that copies shards to other hosts.
    #[must_use]
    pub fn view(&self) -> View {
        View(Arc::clone(&self.shared))
    }

    /// Takes the messages for users since the last call.
    #[must_use]
    pub fn messages(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.inner().messages)
    }

    /// Takes the steps that were sealed in memory for all ranks since the last call, the newest few, in the order of sealing.
    #[must_use]
    pub fn whole_steps(&self) -> Vec<Whole> {
        std::mem::take(&mut self.shared.inner().whole)
    }

    /// The sealed shards in memory. Files start with their shards and are longer. A slot may be used for another step at any time,
    /// so readers must verify a shard with its manifest.
    #[must_use]
    pub fn shelf(&self) -> Vec<Shard> {
        let inner = self.shared.inner();
        let shards = inner.sealed.iter().filter_map(|((rank, index), sealed)| {
            let memory = inner.ranks.iter().find(|memory| memory.rank == *rank)?;
            Some(Shard {
                manifest: sealed.manifest.clone(),
                manifest_bytes: sealed.manifest.encode(),
                tier: Tier::Memory,
                path: memory::slot_path(&memory.directory, *index, sealed.slot.file),
            })
        });
        shards.collect()
    }

    /// The age of the newest whole step of each tier.
    #[must_use]
    pub fn status(&self) -> Status {
        let inner = self.shared.inner();
        let age =
            |newest: Option<(u64, Instant)>| newest.map(|(step, at)| (step, at.elapsed().as_secs_f64()));
        Status { memory: age(inner.memory), disk: age(inner.disk) }
    }

    /// Whether the file system of the checkpoint directory has not answered for some seconds.
    #[must_use]
    pub fn is_directory_silent(&self) -> bool {
        self.shared.is_silent(SILENT_AT_END)
    }

    /// Ends the pool owner after all ranks have ended: writes the newest whole step to disk and frees the memory. A step that cannot be written
    /// stays in memory for the next launcher; the messages report it.
    #[must_use]
    pub fn finish(mut self) -> Vec<String> {
        self.save_all();
        let mut inner = self.shared.inner();
        let unsaved = inner.unsaved(&self.shared.settings);
        if let Some(shard) = unsaved.first() {
            let (step, place) = (shard.at.1, self.shared.directory.display());
            let silent = self.shared.is_silent(SILENT_AT_END);
            let why = if silent { ", whose file system does not answer" } else { "" };
            inner.messages.push(format!(
                "step {step} is not on the disk{why}; it stays in memory ({place}) until the next `mainstay run` on this host"
            ));
        } else if let Err(error) = fs::remove_dir_all(&self.shared.directory) {
            tracing::warn!(%error, directory = %self.shared.directory.display(), "cannot remove the checkpoint pool");
        }
        std::mem::take(&mut inner.messages)
    }

    /// Replaces the ranks of this host with others of the job: writes the steps of the old ones to disk and keeps
    /// the same place for the new ones. Other files in that place stay.
    ///
    /// # Errors
    /// [`PoolError`]; the job can run without a pool owner.
    pub fn move_to(
        mut self,
        world_size: u32,
        ranks: Range<u32>,
    ) -> (Result<PoolOwner, PoolError>, Vec<String>) {
        self.save_all();
        let (directory, settings) = (self.shared.directory.clone(), self.shared.settings.clone());
        let messages = std::mem::take(&mut self.shared.inner().messages);
        let is_saved = self.shared.inner().unsaved(&settings).is_empty();
        drop(self);
        if is_saved && let Err(error) = remove_ranks(&directory) {
            tracing::warn!(%error, directory = %directory.display(), "cannot empty the checkpoint pool");
        }
        let started = PoolOwner::start_in(directory, Settings { world_size, ranks, ..settings });
        (started, messages)
    }

    /// Writes the remaining steps to disk, as far as the disk accepts them, and stops.
    fn save_all(&mut self) {
        let last = self.shared.inner().epoch;
        self.begin_attempt(last);
        // Try the disk once more.
        self.shared.inner().trouble = None;
        self.shared.finishing.store(true, Ordering::SeqCst);
        self.shared.pace.hurry();
        ring(&self.shared.directory);
        self.join();
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && !self.shared.is_silent(SILENT_AT_END) {
                self.shared.look_elsewhere();
                std::thread::sleep(END_POLL_INTERVAL);
            }
            // A thread that waits for a file system that does not answer is left behind.
            if thread.is_finished() && thread.join().is_err() {
                tracing::error!("a thread that keeps checkpoints ended by a panic");
            }
            // The first thread is the pool owner: when it is done, there is nothing more to write.
            self.shared.stop();
        }
    }
}

impl Drop for PoolOwner {
    /// Without [`PoolOwner::finish`], everything stays for the guardian or the next launcher.
    fn drop(&mut self) {
        self.shared.stop();
        self.shared.pace.hurry();
        ring(&self.shared.directory);
        self.join();
    }
}

/// The memory, as seen by the code that copies shards to other hosts.
#[derive(Clone, Debug)]
pub struct View(Arc<Shared>);

impl View {
    /// Records that each shard of this step, on all hosts, has a copy on another host. The step stays in memory until a newer one has its
    /// copies: the job goes back to it if a host is lost together with its memory. Returns whether it was still in memory.
    pub fn copied(&self, attempt: u64, step: u64) -> bool {
        let mut inner = self.0.inner();
        let held = inner.held();
        let is_there = |rank| held.iter().any(|shard| (shard.rank, shard.at) == (rank, (attempt, step)));
        let all = self.0.settings.ranks.clone().all(is_there);
        if all {
            inner.copied = inner.copied.max(Some((attempt, step)));
        }
        all
    }

    /// Waits until all filled slots are sealed, at most `within`.
    pub fn settle(&self, within: Duration) {
        let until = Instant::now() + within;
        ring(&self.0.directory);
        while self.0.is_sealing() && !self.0.stopped.load(Ordering::SeqCst) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, PoolError> {
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map_err(|source| PoolError::Io { path: PathBuf::from(name), source })
}

impl Shared {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A panic while the lock is held leaves no state that readers cannot handle: the pages are authoritative.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops the threads. Takes the lock that the writer holds from its check to its wait: a notification in between would be lost, and the
    /// writer and `join` would wait forever.
    fn stop(&self) {
        let _inner = self.inner();
        self.stopped.store(true, Ordering::SeqCst);
        self.batch.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn the_writer_is_never_notified_between_its_check_and_its_wait() {
        let place = testing::tempdir().unwrap();
        let pool_owner = PoolOwner::start(Settings {
            root: place.path().join("pools"),
            directory: place.path().join("checkpoints"),
            job: "a".into(),
            run: "a@1".into(),
            world_size: 1,
            ranks: 0..1,
            keep: crate::disk::Keep { steps: 1, bytes: None },
            slots: 2,
            memory: None,
            rate: None,
        })
        .unwrap();
        let shared = pool_owner.shared.clone();
        std::thread::scope(|scope| {
            // As the writer holds it from its check to its wait.
            let held = shared.inner();
            let (reported, reports) = channel();
            let shared = &shared;
            scope.spawn(move || {
                shared.stop();
                reported.send(())
            });
            assert!(
                reports.recv_timeout(Duration::from_millis(100)).is_err(),
                "told while it does not listen"
            );
            drop(held);
            reports.recv().unwrap();
        });
        drop(pool_owner);
    }
}

//! The pool owner: the thread in the launcher that owns the memory of a job's ranks.

mod allocation;
mod content;
mod directory;
mod write;

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mainstay_checkpoint_format::control::{POOL_NAME, Slot, State};
use mainstay_checkpoint_format::{Identity, Manifest};
use mainstay_sys::apart::apart;
use nix::fcntl::Flock;
use nix::sys::statvfs::statvfs;

use crate::disk::{self, Pace, StdVolume};
use crate::lock;
use crate::os::{lower_priority, now_unix_s, spawn};
use crate::pool::choose::AttemptStep;
use crate::pool::memory::{RankMemory, lives, rank_directory};
use crate::pool::owner::content::Content;
use crate::pool::owner::directory::{open_bell, remove_ranks, ring, take};
use crate::pool::owner::write::write_batch;
use crate::pool::{PoolError, Settings, available, io_error, pool_directory, recover};
use crate::seal::{SealError, seal};

/// Interval of the pool owner's checks without a socket to ring.
const POLL_INTERVAL_WITHOUT_BELL: Duration = Duration::from_millis(10);

/// A file system that has not answered for this long gets no more of the slots that a rank waits for.
const MAX_SILENCE: Duration = Duration::from_secs(3);

/// How long the end of a job waits for a file system that does not answer.
const MAX_SILENCE_AT_END: Duration = Duration::from_secs(10);

/// Interval of the checks whether a thread has ended.
const END_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// `nice` value of the threads that compute checksums.
const SEAL_NICE: i32 = 5;

/// `nice` value of the thread that writes to disk.
const WRITE_NICE: i32 = 15;

/// State of the tiers at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PoolStatus {
    /// The newest whole step in memory, and how long ago it was sealed, in seconds.
    pub memory: Option<(u64, f64)>,
    /// The newest whole step that this launcher has on disk, and how long ago it was sealed, in seconds.
    pub disk: Option<(u64, f64)>,
}

/// A step that all ranks have saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeStep {
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
    content: Mutex<Content>,
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

impl PoolOwner {
    /// Starts a pool owner: first writes to disk what an earlier launcher of the same checkpoints left.
    ///
    /// # Errors
    /// [`PoolError`]; the job can run without a pool owner.
    pub fn start(settings: Settings) -> Result<PoolOwner, PoolError> {
        let mut directory = pool_directory(&settings.root, &settings.directory);
        if settings.ranks != (0..settings.world_size) {
            // Several launchers of one job may be on one machine and save into one directory.
            directory.as_mut_os_string().push(format!("-{}", settings.ranks.start));
        }
        PoolOwner::start_in(directory, settings)
    }

    fn start_in(directory: PathBuf, settings: Settings) -> Result<PoolOwner, PoolError> {
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(io_error(&directory))?;
        let lock = take(&directory, &settings.directory)?;
        let mut messages = Vec::new();
        if directory.join(POOL_NAME).exists() {
            match recover::bring_to_disk(&directory) {
                Ok(recovered) => messages.extend(recovered.lines()),
                Err(error) => messages.push(format!(
                    "checkpoints that an earlier launcher left in memory could not be brought to the disk: {error}"
                )),
            }
        }
        let _ = fs::remove_file(directory.join(recover::RECOVERY_NAME));
        disk::clear_aside(&StdVolume, &settings.directory, &lives);
        let bell = open_bell(&directory);
        recover::PoolRecord::write(&directory, &settings)?;
        let mut ranks = Vec::new();
        for rank in settings.ranks.clone() {
            let at = rank_directory(&directory, rank);
            ranks.push(RankMemory::make(&directory, rank, settings.world_size, 0).map_err(io_error(&at))?);
        }
        let pace = Pace::new(settings.rate);
        let shared = Arc::new(Shared {
            settings,
            directory,
            content: Mutex::new(Content::new(ranks, messages)),
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
    pub fn directory(&self) -> &Path {
        &self.shared.directory
    }

    /// Starts another attempt: all ranks of the previous one are gone or have left it. Slots that they filled count; slots that they were
    /// filling do not, and neither does anything that they write from now on.
    pub fn begin_attempt(&self, epoch: u64) {
        self.shared.content().begin_attempt(epoch);
        ring(&self.shared.directory);
    }

    /// Records that replicas of this attempt agreed at a step and never differed before. The newest whole step that was saved before stays
    /// in memory until it is on disk, and there in any case: the job goes back to it if the replicas turn out to differ.
    pub fn vouch(&self, attempt: u64, step: u64) {
        let mut content = self.shared.content();
        if content.agreed != Some((attempt, step)) {
            content.agreed = Some((attempt, step));
            drop(content);
            ring(&self.shared.directory);
        }
    }

    /// A view for the code that copies shards to other hosts.
    pub fn view(&self) -> PoolView {
        PoolView(Arc::clone(&self.shared))
    }

    /// Takes the messages for users since the last call.
    #[must_use]
    pub fn messages(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.content().messages)
    }

    /// Takes the steps that were sealed in memory for all ranks since the last call, the newest few, in the order of sealing.
    #[must_use]
    pub fn whole_steps(&self) -> Vec<WholeStep> {
        std::mem::take(&mut self.shared.content().whole)
    }

    /// The age of the newest whole step of each tier.
    pub fn status(&self) -> PoolStatus {
        let content = self.shared.content();
        let age =
            |newest: Option<(u64, Instant)>| newest.map(|(step, at)| (step, at.elapsed().as_secs_f64()));
        PoolStatus { memory: age(content.memory), disk: age(content.disk) }
    }

    /// Whether the file system of the checkpoint directory has not answered for some seconds.
    pub fn is_directory_silent(&self) -> bool {
        self.shared.is_silent(MAX_SILENCE_AT_END)
    }

    /// Ends the pool owner after all ranks have ended: writes the newest whole step to disk and frees the memory. A step that cannot be written
    /// stays in memory for the next launcher; the messages report it.
    #[must_use]
    pub fn finish(mut self) -> Vec<String> {
        self.save_all();
        let mut content = self.shared.content();
        let unsaved = content.unsaved(&self.shared.settings);
        if let Some(shard) = unsaved.first() {
            let (step, shown) = (shard.at.1, self.shared.directory.display());
            let silent = self.shared.is_silent(MAX_SILENCE_AT_END);
            let why = if silent { ", whose file system does not answer" } else { "" };
            content.messages.push(format!(
                "step {step} is not on the disk{why}; it stays in memory ({shown}) until the next `mainstay run` on this host"
            ));
        } else if let Err(error) = fs::remove_dir_all(&self.shared.directory) {
            tracing::warn!(%error, directory = %self.shared.directory.display(), "cannot remove the checkpoint pool");
        }
        std::mem::take(&mut content.messages)
    }

    /// Replaces the ranks of this host with others of the job: writes the steps of the old ones to disk and keeps
    /// the same place for the new ones. Other files in that place stay.
    pub fn move_to(
        mut self,
        world_size: u32,
        ranks: Range<u32>,
    ) -> (Result<PoolOwner, PoolError>, Vec<String>) {
        self.save_all();
        let (directory, settings) = (self.shared.directory.clone(), self.shared.settings.clone());
        let messages = std::mem::take(&mut self.shared.content().messages);
        let is_saved = self.shared.content().unsaved(&settings).is_empty();
        drop(self);
        if is_saved && let Err(error) = remove_ranks(&directory) {
            tracing::warn!(%error, directory = %directory.display(), "cannot empty the checkpoint pool");
        }
        let started = PoolOwner::start_in(directory, Settings { world_size, ranks, ..settings });
        (started, messages)
    }

    /// Writes the remaining steps to disk, as far as the disk accepts them, and stops.
    fn save_all(&mut self) {
        let last = self.shared.content().epoch;
        self.begin_attempt(last);
        // Try the disk once more.
        self.shared.content().last_failure = None;
        self.shared.finishing.store(true, Ordering::SeqCst);
        self.shared.pace.hurry();
        ring(&self.shared.directory);
        self.join();
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && !self.shared.is_silent(MAX_SILENCE_AT_END) {
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
pub struct PoolView(Arc<Shared>);

impl PoolView {
    /// Records that each shard of this step, on all hosts, has a copy on another host. The step stays in memory until a newer one has its
    /// copies: the job goes back to it if a host is lost together with its memory. Returns whether it was still in memory.
    pub fn copied(&self, attempt: u64, step: u64) -> bool {
        let mut content = self.0.content();
        let held = content.held();
        let is_there = |rank| held.iter().any(|shard| (shard.rank, shard.at) == (rank, (attempt, step)));
        let all = self.0.settings.ranks.clone().all(is_there);
        if all {
            content.copied = content.copied.max(Some((attempt, step)));
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
    fn content(&self) -> MutexGuard<'_, Content> {
        // A panic while the lock is held leaves no state that readers cannot handle: the pages are authoritative.
        lock(&self.content)
    }

    /// Stops the threads. Takes the lock that the writer holds from its check to its wait: a notification in between would be lost, and the
    /// writer and `join` would wait forever.
    fn stop(&self) {
        let _content = self.content();
        self.stopped.store(true, Ordering::SeqCst);
        self.batch.notify_all();
    }
}

// The threads of the pool: one checks the ranks' pages and computes checksums, one writes to disk.

fn keep(shared: &Arc<Shared>, bell: Option<&UnixDatagram>) {
    lower_priority(SEAL_NICE, false);
    loop {
        match bell {
            Some(bell) => drop(bell.recv(&mut [0; 64])),
            None => std::thread::sleep(POLL_INTERVAL_WITHOUT_BELL),
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

fn write_on(shared: &Shared) {
    lower_priority(WRITE_NICE, true);
    loop {
        let mut content = shared.content();
        let batch = loop {
            if let Some(batch) = content.batch.take() {
                break batch;
            }
            if shared.stopped.load(Ordering::SeqCst) {
                return;
            }
            content = shared.batch.wait(content).unwrap_or_else(PoisonError::into_inner);
        };
        drop(content);
        let given_up = || shared.stopped.load(Ordering::SeqCst) && !shared.finishing.load(Ordering::SeqCst);
        let settings = &shared.settings;
        let used: Vec<BorrowedFd<'_>> = batch.shards.iter().map(|(_, _, file)| file.as_fd()).collect();
        let write = || write_batch(&settings.directory, &batch, settings.keep, &shared.pace, &given_up);
        let written =
            apart(c"ckpt-write", &used, write).unwrap_or_else(|| batch.interrupted(&settings.directory));
        shared.content().written(&batch, written);
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
        let replace = self.can_replace(MAX_SILENCE);
        let mut content = self.content();
        content.pages().for_each(|control| control.beat());
        content.vouch(&self.settings);
        content.free(&self.settings, replace);
        content.begin_write(&self.settings, self.finishing.load(Ordering::SeqCst));
        self.batch.notify_all();
    }

    /// Whether filled slots still have to be sealed.
    fn is_sealing(&self) -> bool {
        let content = self.content();
        content
            .pages()
            .any(|control| control.all().any(|slot| matches!(slot.state, State::Filled | State::Sealing)))
    }

    /// Whether nothing is left to do or to try.
    fn is_settled(&self) -> bool {
        let at_work = self.is_sealing();
        if self.is_silent(MAX_SILENCE_AT_END) {
            return !at_work;
        }
        let content = self.content();
        let unsaved = content.unsaved(&self.settings);
        // A shard whose last write failed is not tried forever.
        let nothing_to_write = unsaved.is_empty() || content.last_failure.is_some();
        !at_work && nothing_to_write && !content.writing && content.batch.is_none()
    }

    /// Accepts filled slots and computes their checksums, several in parallel.
    fn seal_all(&self) {
        let tasks = self.content().accept(&self.settings);
        let several = std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 8).clamp(1, 4));
        for some in tasks.chunks(several) {
            std::thread::scope(|scope| {
                for (rank, slot, file) in some {
                    scope.spawn(move || {
                        lower_priority(SEAL_NICE, false);
                        let sealed = self.seal_one(*rank, slot, file);
                        self.content().sealed(*rank, slot, sealed);
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
        seal(file, slot.used, &identity, &settings.run, now_unix_s())
    }
}

// Looks at the checkpoint directory, each in a thread of its own: a file system that does not answer must keep the pool
// owner neither from sealing and freeing slots nor from its end.

impl Shared {
    /// Searches the disk for shards that steps in memory lack, unless an earlier look has not ended.
    fn look_elsewhere(self: &Arc<Self>) {
        let (lacking, writing) = {
            let mut content = self.content();
            let lacking = content.lacking(&self.settings);
            if lacking.is_empty() {
                content.elsewhere.clear();
            }
            (lacking, content.writing)
        };
        let mut since = lock(&self.looks_since);
        if since.is_some() || (lacking.is_empty() && !writing) {
            return;
        }
        let shared = Arc::clone(self);
        let look = move || {
            let found = apart(c"ckpt-find", &[], || shared.stored_among(&lacking)).unwrap_or_default();
            let before = std::mem::replace(&mut shared.content().elsewhere, found.clone());
            *lock(&shared.looks_since) = None;
            if before != found {
                ring(&shared.directory);
            }
        };
        // Without a thread, the next look tries again.
        if spawn("ckpt-look", look).is_ok() {
            *since = Some(Instant::now());
        }
    }

    /// Those of `lacking` whose shards are on disk.
    fn stored_among(&self, lacking: &[(AttemptStep, u32)]) -> BTreeSet<(AttemptStep, u32)> {
        let Settings { directory, job, world_size, .. } = &self.settings;
        // Answered by the file system's server, not from a cache. The result does not matter.
        let _ = statvfs(directory);
        let is_there = |(at, rank): &&(AttemptStep, u32)| {
            disk::manifest(&StdVolume, directory, at.1, *rank).is_some_and(|(manifest, _)| {
                let there = &manifest.identity;
                (&there.job, there.attempt, &there.world_size) == (job, at.0, world_size)
            })
        };
        lacking.iter().filter(is_there).copied().collect()
    }

    /// Whether the file system of the checkpoints has not answered for this long.
    fn is_silent(&self, span: Duration) -> bool {
        let since = lock(&self.looks_since);
        since.is_some_and(|since| since.elapsed() >= span)
    }

    /// Whether slots whose step is being written may get other memory: the write does not end, and there is enough.
    fn can_replace(&self, within: Duration) -> bool {
        self.is_silent(within) && {
            let wanted: u64 = self.content().ranks.iter().map(|memory| memory.requested_bytes).sum();
            available(&self.directory) / 2 >= wanted
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn the_writer_is_never_notified_between_its_check_and_its_wait() {
        let home = testing::tempdir().unwrap();
        let pool_owner = PoolOwner::start(Settings {
            root: home.path().join("pools"),
            directory: home.path().join("checkpoints"),
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
            let held = shared.content();
            let (sender, receiver) = channel();
            let shared = &shared;
            scope.spawn(move || {
                shared.stop();
                sender.send(())
            });
            assert!(
                receiver.recv_timeout(Duration::from_millis(100)).is_err(),
                "told while it does not listen"
            );
            drop(held);
            receiver.recv().unwrap();
        });
        drop(pool_owner);
    }
}

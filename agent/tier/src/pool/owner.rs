//! The pool owner: the thread in the launcher that owns the memory of a job's ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mainstay_checkpoint_format::control::{Answer, BELL_NAME, Control, POOL_NAME, Slot, State};
use mainstay_checkpoint_format::{Identity, Manifest};
use nix::fcntl::Flock;
use nix::sys::statvfs::statvfs;

use crate::disk::{self, Doubts, Keep, Pace, StdVolume, WriteError};
use crate::lock;
use crate::os::{lower_priority, monotonic_ms, now_unix_s, spawn};
use crate::pool::choose::{self, AttemptStep, SealedSlot};
use crate::pool::memory::{RankMemory, allocate, lives, lock_file, rank_directory, slot_path};
use crate::pool::{PoolError, Settings, available, io_error, pool_directory, recover};
use crate::seal::{SealError, seal};

/// Interval of the pool owner's checks without a ring.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The same without a socket to ring.
const POLL_INTERVAL_WITHOUT_BELL: Duration = Duration::from_millis(10);

/// A rank that has waited this long for a slot may get the slot of a step that is not whole yet.
const MAX_SLOT_WAIT: Duration = Duration::from_secs(2);

/// A file system that has not answered for this long gets no more of the slots that a rank waits for.
const MAX_SILENCE: Duration = Duration::from_secs(3);

/// How long the end of a job waits for a file system that does not answer.
const MAX_SILENCE_AT_END: Duration = Duration::from_secs(10);

/// Interval of the checks whether a thread has ended.
const END_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Pause after a failed write to disk.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(10);

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
    ranks: Vec<RankMemory>,
    sealed: BTreeMap<(u32, usize), SlotContent>,
    on_disk: BTreeSet<(AttemptStep, u32)>,
    /// Shards of steps in memory that ranks themselves wrote to disk, as of the last check.
    elsewhere: BTreeSet<(AttemptStep, u32)>,
    batch: Option<WriteBatch>,
    writing: bool,
    messages: Vec<String>,
    last_messages: String,
    last_failure: Option<(String, Instant)>,
    waiting_since: BTreeMap<u32, Instant>,
    /// The attempt, and the last of its steps at which replicas agreed.
    agreed: Option<AttemptStep>,
    /// The newest whole step that was saved before that.
    vouched: Option<AttemptStep>,
    /// The newest step of which each shard, of all hosts, has a copy on another host.
    copied: Option<AttemptStep>,
    memory: Option<(u64, Instant)>,
    disk: Option<(u64, Instant)>,
    /// Steps that became whole in memory and were not taken yet.
    whole: Vec<WholeStep>,
}

#[derive(Debug)]
struct SlotContent {
    slot: Slot,
    manifest: Manifest,
    writing: bool,
    when: Instant,
}

impl SlotContent {
    fn at(&self) -> AttemptStep {
        (self.slot.epoch, self.slot.step)
    }
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
        let mut inner = Inner { messages, ..Inner::default() };
        for rank in settings.ranks.clone() {
            let at = rank_directory(&directory, rank);
            inner
                .ranks
                .push(RankMemory::make(&directory, rank, settings.world_size, 0).map_err(io_error(&at))?);
        }
        let pace = Pace::new(settings.rate);
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
    pub fn view(&self) -> PoolView {
        PoolView(Arc::clone(&self.shared))
    }

    /// Takes the messages for users since the last call.
    #[must_use]
    pub fn messages(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.inner().messages)
    }

    /// Takes the steps that were sealed in memory for all ranks since the last call, the newest few, in the order of sealing.
    #[must_use]
    pub fn whole_steps(&self) -> Vec<WholeStep> {
        std::mem::take(&mut self.shared.inner().whole)
    }

    /// The age of the newest whole step of each tier.
    pub fn status(&self) -> PoolStatus {
        let inner = self.shared.inner();
        let age =
            |newest: Option<(u64, Instant)>| newest.map(|(step, at)| (step, at.elapsed().as_secs_f64()));
        PoolStatus { memory: age(inner.memory), disk: age(inner.disk) }
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
        let mut inner = self.shared.inner();
        let unsaved = inner.unsaved(&self.shared.settings);
        if let Some(shard) = unsaved.first() {
            let (step, shown) = (shard.at.1, self.shared.directory.display());
            let silent = self.shared.is_silent(MAX_SILENCE_AT_END);
            let why = if silent { ", whose file system does not answer" } else { "" };
            inner.messages.push(format!(
                "step {step} is not on the disk{why}; it stays in memory ({shown}) until the next `mainstay run` on this host"
            ));
        } else if let Err(error) = fs::remove_dir_all(&self.shared.directory) {
            tracing::warn!(%error, directory = %self.shared.directory.display(), "cannot remove the checkpoint pool");
        }
        std::mem::take(&mut inner.messages)
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
        self.shared.inner().last_failure = None;
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
        lock(&self.inner)
    }

    /// Stops the threads. Takes the lock that the writer holds from its check to its wait: a notification in between would be lost, and the
    /// writer and `join` would wait forever.
    fn stop(&self) {
        let _inner = self.inner();
        self.stopped.store(true, Ordering::SeqCst);
        self.batch.notify_all();
    }
}

// The content of the memory: which steps are whole in it, and which of them are written next.

/// Maximum number of steps that wait to be taken.
const MAX_WHOLE_STEPS: usize = 4;

impl Inner {
    fn pages(&self) -> impl Iterator<Item = Control<'_>> {
        self.ranks.iter().filter_map(|memory| memory.control().ok())
    }

    fn add_notice(&mut self, message: String) {
        if self.last_messages != message {
            tracing::debug!("{message}");
            self.last_messages.clone_from(&message);
            self.messages.push(message);
        }
    }

    fn held(&self) -> Vec<SealedSlot> {
        let held = self.sealed.iter().map(|((rank, index), sealed)| SealedSlot {
            rank: *rank,
            index: *index,
            at: sealed.at(),
            writing: sealed.writing,
        });
        held.collect()
    }

    /// The newest step that is whole over memory and the shards that ranks wrote to disk themselves when they had no slot.
    fn newest_whole(&self, settings: &Settings) -> Option<AttemptStep> {
        self.newest_whole_of(&self.held(), settings)
    }

    /// The shards to write next: first the step to go back to, then the newest whole one.
    fn unsaved(&self, settings: &Settings) -> Vec<SealedSlot> {
        let held = self.held();
        let on_disk = |at: AttemptStep, rank: u32| self.on_disk.contains(&(at, rank));
        let vouched = choose::to_write(&held, self.vouched, &on_disk);
        if vouched.is_empty() {
            choose::to_write(&held, self.newest_whole_of(&held, settings), &on_disk)
        } else {
            vouched
        }
    }

    /// Determines the whole step that was saved before the replicas last agreed.
    fn vouch(&mut self, settings: &Settings) {
        let Some((attempt, agreed)) = self.agreed else { return };
        let mut held = self.held();
        held.retain(|shard| shard.at.0 == attempt && shard.at.1 <= agreed);
        let newest = self.newest_whole_of(&held, settings).filter(|at| Some(*at) > self.vouched);
        if let Some(at) = newest {
            self.vouched = Some(at);
            self.pages().for_each(|control| control.set_vouched(at.1));
        }
    }

    /// Records a step whose last shard was sealed, for the comparison of what ranks saved.
    fn note_whole(&mut self, at: AttemptStep) {
        let of_rank = |memory: &RankMemory| {
            let sealed = self.sealed.range((memory.rank, 0)..=(memory.rank, usize::MAX));
            let mut found = sealed.filter(|(_, sealed)| sealed.at() == at);
            found.next().and_then(|(_, sealed)| Some(sealed.manifest.chunks.as_ref()?.sums.clone()))
        };
        if self.ranks.len() < 2 {
            return;
        }
        let Some(chunks) = self.ranks.iter().map(of_rank).collect::<Option<Vec<_>>>() else { return };
        if self.whole.len() == MAX_WHOLE_STEPS {
            self.whole.remove(0);
        }
        self.whole.push(WholeStep { attempt: at.0, step: at.1, chunks });
    }

    fn newest_whole_of(&self, held: &[SealedSlot], settings: &Settings) -> Option<AttemptStep> {
        let elsewhere = |at: AttemptStep, rank: u32| {
            self.on_disk.contains(&(at, rank)) || self.elsewhere.contains(&(at, rank))
        };
        choose::newest_whole(held, &settings.ranks, &elsewhere)
    }

    /// Shards that steps in memory lack: their ranks may have written them to the disk themselves.
    fn lacking(&self, settings: &Settings) -> Vec<(AttemptStep, u32)> {
        let held: BTreeSet<(AttemptStep, u32)> =
            self.sealed.iter().map(|((rank, _), content)| (content.at(), *rank)).collect();
        let steps: BTreeSet<AttemptStep> = held.iter().map(|(at, _)| *at).collect();
        let all = steps.into_iter().flat_map(|at| settings.ranks.clone().map(move |rank| (at, rank)));
        all.filter(|shard| !held.contains(shard) && !self.on_disk.contains(shard)).collect()
    }
}

// The life of each slot: accepted, sealed, passed to the writer, freed, withdrawn.

type SealTask = (u32, Slot, Arc<File>);

impl Inner {
    /// The slots to seal: filled in this attempt, or accepted when it ended.
    fn accept(&mut self, settings: &Settings) -> Vec<SealTask> {
        let mut tasks = Vec::new();
        let mut messages = Vec::new();
        for memory in &self.ranks {
            let Ok(control) = memory.control() else { continue };
            for slot in control.all() {
                let file = memory.files.get(slot.index);
                let fits = slot.used <= slot.capacity && slot.world_size == u64::from(settings.world_size);
                match (slot.state, file) {
                    (State::Sealing, Some(file)) => tasks.push((memory.rank, slot, file.clone())),
                    (State::Filled, Some(file)) if fits && slot.epoch == self.epoch => {
                        if let Some(slot) = control.advance(&slot, State::Sealing) {
                            tasks.push((memory.rank, slot, file.clone()));
                        }
                    }
                    (State::Filled, _) => {
                        _ = control.advance(&slot, State::Damaged);
                        messages.push(format!(
                            "step {} of rank {} is not taken: it is of attempt {} and a world of {}, and this is attempt {} of {}",
                            slot.step, memory.rank, slot.epoch, slot.world_size, self.epoch, settings.world_size
                        ));
                    }
                    _ => {}
                }
            }
        }
        messages.into_iter().for_each(|message| self.add_notice(message));
        tasks
    }

    /// Records the result of sealing a slot.
    fn sealed(&mut self, rank: u32, slot: &Slot, sealed: Result<Manifest, SealError>) {
        let Some(memory) = self.ranks.iter().find(|memory| memory.rank == rank) else { return };
        let Ok(control) = memory.control() else { return };
        let laid = sealed.map_err(|error| error.to_string()).and_then(|manifest| {
            memory.lay_manifest(slot.index, &manifest).map_err(|error| error.to_string())?;
            Ok(manifest)
        });
        match laid {
            Ok(manifest) => {
                if let Some(slot) = control.advance(slot, State::Sealed) {
                    let sealed = SlotContent { slot, manifest, writing: false, when: Instant::now() };
                    self.sealed.insert((rank, slot.index), sealed);
                    self.note_whole((slot.epoch, slot.step));
                }
            }
            Err(error) => {
                _ = control.advance(slot, State::Damaged);
                let step = slot.step;
                self.add_notice(format!(
                    "step {step} of rank {rank} is not sealed: {error}; older steps are untouched"
                ));
            }
        }
    }

    /// Ensures that every rank has a free slot, if one may be freed. With `replace`, a slot that is being written to disk
    /// may be freed too for a rank that has waited long: it gets another file, and the write goes on in the old one.
    fn free(&mut self, settings: &Settings, replace: bool) {
        let newest = self.newest_whole(settings);
        if let Some(newest) = newest {
            let sealed = self.sealed.values().filter(|sealed| sealed.at() == newest);
            if let Some(when) = sealed.map(|sealed| sealed.when).max() {
                self.memory = Some((newest.1, when));
            }
        }
        let held = self.held();
        // While ranks of this attempt may still be loading, keep every step that they could choose.
        let all_have_saved = settings
            .ranks
            .clone()
            .all(|rank| held.iter().any(|shard| shard.rank == rank && shard.at.0 == self.epoch));
        let (mut freed, now) = (Vec::new(), monotonic_ms());
        for memory in &self.ranks {
            let Ok(control) = memory.control() else { continue };
            let waits = control.waits();
            let since = if waits {
                Some(*self.waiting_since.entry(memory.rank).or_insert_with(Instant::now))
            } else {
                self.waiting_since.remove(&memory.rank);
                None
            };
            let has_one = control.all().any(|slot| {
                let fits = slot.capacity >= memory.requested_bytes;
                matches!(slot.state, State::Free | State::Filling | State::Damaged) && (fits || !waits)
            });
            if has_one || !(waits || all_have_saved) {
                continue;
            }
            let long = since.is_some_and(|since| since.elapsed() > MAX_SLOT_WAIT);
            // A copy on disk is safe.
            let vouched = self.vouched.filter(|at| !self.on_disk.contains(&(*at, memory.rank)));
            // Of two slots, one must be freed eventually, regardless of the disk.
            let vouched = vouched.filter(|_| !long || control.slots() > 2);
            // A slot that is being sent to a peer is not freed, but a save does not wait for that.
            let pinned = |slot: &Slot| !waits && control.is_pinned(slot, now);
            let mut held = held.clone();
            held.iter_mut()
                .filter(|shard| shard.rank == memory.rank && pinned(&control.slot(shard.index)))
                .for_each(|shard| shard.writing = true);
            let copied = self.copied.filter(|_| !long || control.slots() > 2);
            let kept: Vec<_> = vouched.into_iter().chain(copied).collect();
            let to_free = |held: &[SealedSlot]| choose::to_free(held, memory.rank, newest, &kept, long);
            let idle = to_free(&held);
            let written = || {
                held.iter_mut().for_each(|shard| shard.writing = false);
                to_free(&held)
            };
            let Some(index) = idle.or_else(|| (replace && long).then(written).flatten()) else { continue };
            let slot = control.slot(index);
            // Too small for what the rank saves now, or read by the writer: it gets another file.
            let another = slot.capacity < memory.requested_bytes || idle.is_none();
            let to = if another { State::Damaged } else { State::Free };
            if slot.state == State::Sealed && control.advance(&slot, to).is_some() {
                freed.push((memory.rank, index));
            }
        }
        for key in freed {
            self.sealed.remove(&key);
        }
    }

    /// Passes the newest whole step to the writer, if it is idle.
    fn begin_write(&mut self, settings: &Settings, finishing: bool) {
        let paused =
            self.last_failure.as_ref().is_some_and(|(_, at)| finishing || at.elapsed() < PAUSE_AFTER_FAILURE);
        if self.writing || self.batch.is_some() || paused {
            return;
        }
        let wanted = self.unsaved(settings);
        if wanted.is_empty() {
            return;
        }
        let mut shards = Vec::new();
        for held in wanted {
            let file = self.ranks.iter().find(|memory| memory.rank == held.rank);
            let file = file.and_then(|memory| memory.files.get(held.index)).cloned();
            if let (Some(sealed), Some(file)) = (self.sealed.get_mut(&(held.rank, held.index)), file) {
                sealed.writing = true;
                shards.push((held, sealed.manifest.clone(), file));
            }
        }
        self.writing = true;
        let is_alone = settings.ranks == (0..settings.world_size);
        let among = (!is_alone).then(|| (settings.ranks.clone(), self.copied.map(|at| at.1)));
        self.batch = Some(WriteBatch { shards, vouched: self.vouched.map(|at| at.1), among });
    }

    /// Records the result of a batch.
    fn written(&mut self, batch: &WriteBatch, written: WriteResult) {
        self.writing = false;
        for (held, ..) in &batch.shards {
            if let Some(sealed) = self.sealed.get_mut(&(held.rank, held.index)) {
                sealed.writing = false;
            }
        }
        self.on_disk.extend(written.done.iter().map(|held| (held.at, held.rank)));
        match written.failed {
            None => {
                self.last_failure = None;
                if let Some((held, ..)) = batch.shards.first() {
                    let sealed = self.sealed.get(&(held.rank, held.index));
                    // Its slot may have another step by now.
                    let sealed = sealed.filter(|sealed| sealed.at() == held.at);
                    let when = sealed.map_or_else(Instant::now, |sealed| sealed.when);
                    self.disk = Some((held.at.1, when));
                }
            }
            Some((_, WriteError::GivenUp)) => {}
            Some((held, WriteError::Changed { chunk })) => {
                self.withdraw(held);
                self.add_notice(format!(
                    "step {} of rank {} is withdrawn: chunk {chunk} of it changed in memory after it was sealed. Something \
                     writes where it must not, or the memory is faulty; older steps are untouched",
                    held.at.1, held.rank
                ));
            }
            Some((held, error)) => {
                let message = format!("step {} cannot be written to the disk: {error}", held.at.1);
                let is_known =
                    self.last_failure.as_ref().is_some_and(|(before, _)| *before == error.to_string());
                self.last_failure = Some((error.to_string(), Instant::now()));
                if !is_known {
                    self.add_notice(format!("{message}; it stays in memory, and the next one is tried"));
                }
            }
        }
    }

    fn withdraw(&mut self, held: SealedSlot) {
        let sealed = self.sealed.get(&(held.rank, held.index));
        if sealed.is_some_and(|sealed| sealed.at() != held.at) {
            // The slot has another file and step by now.
            return;
        }
        self.sealed.remove(&(held.rank, held.index));
        let memory = self.ranks.iter().find(|memory| memory.rank == held.rank);
        if let Some(Ok(control)) = memory.map(RankMemory::control) {
            let slot = control.slot(held.index);
            _ = control.advance(&slot, State::Damaged);
        }
    }
}

// Memory for slots: allocated when a rank requests it, enlarged when its state grows, replaced if its content cannot be trusted.

impl Shared {
    /// Allocates the slots that ranks request. Files are created without the lock, so that a new attempt need not wait for them.
    fn answer(&self) {
        let asked: Vec<(usize, u64, u64)> = {
            let inner = self.inner();
            let asked = inner.ranks.iter().enumerate().filter_map(|(position, memory)| {
                let (number, bytes) = memory.control().ok()?.asked()?;
                Some((position, number, bytes))
            });
            asked.collect()
        };
        for (position, number, bytes) in asked {
            let answer = self.reserve(position, bytes.max(1).next_multiple_of(2 << 20));
            let inner = self.inner();
            if let Some(Ok(control)) = inner.ranks.get(position).map(RankMemory::control) {
                control.give(number, answer);
            }
        }
    }

    /// The rank whose memory has this position: ranks of a host need not start at 0.
    fn rank_at(&self, position: usize) -> u64 {
        u64::from(self.settings.ranks.start) + position as u64
    }

    fn reserve(&self, position: usize, bytes: u64) -> Answer {
        let slots = match self.slots_for(position, bytes) {
            Ok(slots) => slots,
            Err(why) => {
                self.inner().add_notice(why);
                return Answer::NoRoom;
            }
        };
        if let Some(memory) = self.inner().ranks.get_mut(position) {
            memory.requested_bytes = memory.requested_bytes.max(bytes);
        }
        for index in 0..slots {
            if let Err(error) = self.grow(position, index, bytes) {
                let rank = self.rank_at(position);
                self.inner().add_notice(format!(
                    "no memory for checkpoints of rank {rank}: {error}; they are written to the disk in training"
                ));
                return if error.kind() == io::ErrorKind::StorageFull {
                    Answer::NoRoom
                } else {
                    Answer::Failed
                };
            }
        }
        Answer::Granted
    }

    /// The number of slots of `bytes` bytes that each rank may have if all of them want the same.
    fn slots_for(&self, position: usize, bytes: u64) -> Result<usize, String> {
        let inner = self.inner();
        let held = |memory: &RankMemory| -> u64 {
            memory.control().map_or(0, |control| control.all().map(|slot| slot.capacity).sum())
        };
        let had: u64 = inner.ranks.iter().map(held).sum();
        let there =
            inner.ranks.get(position).and_then(|memory| memory.control().ok()).map_or(0, |c| c.slots());
        drop(inner);
        let free = available(&self.directory);
        let bound = self.settings.memory.unwrap_or_else(|| free.saturating_add(had) / 2);
        let all = bytes.saturating_mul(self.settings.ranks.len() as u64);
        let most = self.settings.slots.clamp(2, mainstay_checkpoint_format::control::MAX_SLOTS).max(there);
        let fits = |slots: &usize| {
            let wanted = all.saturating_mul(*slots as u64);
            wanted <= bound && wanted.saturating_sub(had) <= free
        };
        (2..=most).rev().find(fits).filter(|slots| *slots >= there).ok_or_else(|| {
            format!(
                "no memory for checkpoints: two of {} MiB for each of {} rank(s) are more than {} MiB, which is what may be \
                 taken; they are written to the disk in training. --checkpoint-memory sets the bound",
                bytes >> 20,
                self.settings.ranks.len(),
                bound.min(free.saturating_add(had)) >> 20
            )
        })
    }

    /// Gives a slot a file that is large enough, if it has none and its content is not needed.
    fn grow(&self, position: usize, index: usize, bytes: u64) -> io::Result<()> {
        {
            let inner = self.inner();
            let Some(memory) = inner.ranks.get(position) else { return Ok(()) };
            let control = memory.control().map_err(io::Error::other)?;
            if index >= control.slots() {
                drop(inner);
                return self.install_file(position, index, bytes, |control| control.set_slots(index + 1));
            }
            let slot = control.slot(index);
            if slot.capacity >= bytes || slot.state != State::Free {
                return Ok(());
            }
            // Ranks do not see it while it changes; `renew` makes it available again.
            _ = control.advance(&slot, State::Damaged);
        }
        self.renew_one(position, index)
    }

    /// Gives new files to slots whose old file a process may still write to, or whose content cannot be trusted.
    fn renew(&self) {
        let damaged: Vec<(usize, usize)> = {
            let inner = self.inner();
            let ranks = inner.ranks.iter().enumerate();
            let slots = ranks.filter_map(|(position, memory)| Some((position, memory.control().ok()?)));
            let all = slots.flat_map(|(position, control)| {
                control.all().map(move |slot| (position, slot)).collect::<Vec<_>>()
            });
            all.filter(|(_, slot)| slot.state == State::Damaged)
                .map(|(position, slot)| (position, slot.index))
                .collect()
        };
        for (position, index) in damaged {
            if let Err(error) = self.renew_one(position, index) {
                let rank = self.rank_at(position);
                self.inner().add_notice(format!("a slot of rank {rank} cannot be created again: {error}"));
            }
        }
    }

    fn renew_one(&self, position: usize, index: usize) -> io::Result<()> {
        let bytes = {
            let inner = self.inner();
            let Some(memory) = inner.ranks.get(position) else { return Ok(()) };
            let slot = memory.control().map_err(io::Error::other)?.slot(index);
            // Free the old memory first: there may not be enough for both.
            let _ = fs::remove_file(slot_path(&memory.directory, index, slot.file));
            slot.capacity.max(memory.requested_bytes)
        };
        self.install_file(position, index, bytes, |control| {
            _ = control.advance(&control.slot(index), State::Free);
        })
    }

    /// Allocates a file for a slot, without the lock, and installs it; `show` makes the slot available to its rank.
    fn install_file(
        &self,
        position: usize,
        index: usize,
        bytes: u64,
        show: impl FnOnce(&Control<'_>),
    ) -> io::Result<()> {
        let (number, path) = {
            let mut inner = self.inner();
            let Some(memory) = inner.ranks.get_mut(position) else { return Ok(()) };
            let number = memory.next_file();
            (number, slot_path(&memory.directory, index, number))
        };
        let file = allocate(&path, bytes)?;
        if let Some(memory) = self.inner().ranks.get_mut(position) {
            memory.install(index, number, file, bytes);
            if let Ok(control) = memory.control() {
                show(&control);
            }
        }
        Ok(())
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
        let written = write_batch(&settings.directory, &batch, settings.keep, &shared.pace, &given_up);
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
        let replace = self.can_replace(MAX_SILENCE);
        let mut inner = self.inner();
        inner.pages().for_each(|control| control.beat());
        inner.vouch(&self.settings);
        inner.free(&self.settings, replace);
        inner.begin_write(&self.settings, self.finishing.load(Ordering::SeqCst));
        self.batch.notify_all();
    }

    /// Whether filled slots still have to be sealed.
    fn is_sealing(&self) -> bool {
        let inner = self.inner();
        inner
            .pages()
            .any(|control| control.all().any(|slot| matches!(slot.state, State::Filled | State::Sealing)))
    }

    /// Whether nothing is left to do or to try.
    fn is_settled(&self) -> bool {
        let at_work = self.is_sealing();
        if self.is_silent(MAX_SILENCE_AT_END) {
            return !at_work;
        }
        let inner = self.inner();
        let unsaved = inner.unsaved(&self.settings);
        // A shard whose last write failed is not tried forever.
        let nothing_to_write = unsaved.is_empty() || inner.last_failure.is_some();
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
        seal(file, slot.used, &identity, &settings.run, now_unix_s())
    }
}

// Looks at the checkpoint directory, each in a thread of its own: a file system that does not answer must keep the pool
// owner neither from sealing and freeing slots nor from its end.

impl Shared {
    /// Searches the disk for shards that steps in memory lack, unless an earlier look has not ended.
    fn look_elsewhere(self: &Arc<Self>) {
        let (lacking, writing) = {
            let mut inner = self.inner();
            let lacking = inner.lacking(&self.settings);
            if lacking.is_empty() {
                inner.elsewhere.clear();
            }
            (lacking, inner.writing)
        };
        let mut since = lock(&self.looks_since);
        if since.is_some() || (lacking.is_empty() && !writing) {
            return;
        }
        let shared = Arc::clone(self);
        let look = move || {
            let directory = &shared.settings.directory;
            // Answered by the file system's server, not from a cache. The result does not matter.
            let _ = statvfs(directory);
            let is_there = |(at, rank): &(AttemptStep, u32)| {
                disk::manifest(&StdVolume, directory, at.1, *rank).is_some_and(|(manifest, _)| {
                    let there = &manifest.identity;
                    (there.job.as_str(), there.attempt, there.world_size)
                        == (shared.settings.job.as_str(), at.0, shared.settings.world_size)
                })
            };
            let found: BTreeSet<(AttemptStep, u32)> = lacking.into_iter().filter(is_there).collect();
            let before = std::mem::replace(&mut shared.inner().elsewhere, found.clone());
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

    /// Whether the file system of the checkpoints has not answered for this long.
    fn is_silent(&self, span: Duration) -> bool {
        let since = lock(&self.looks_since);
        since.is_some_and(|since| since.elapsed() >= span)
    }

    /// Whether slots whose step is being written may get other memory: the write does not end, and there is enough.
    fn can_replace(&self, within: Duration) -> bool {
        self.is_silent(within) && {
            let wanted: u64 = self.inner().ranks.iter().map(|memory| memory.requested_bytes).sum();
            available(&self.directory) / 2 >= wanted
        }
    }
}

// The pool's directory: its lock, its description for recovery, and the socket that ranks ring.

/// Takes the pool's lock. Waits for the guardian of a killed launcher, which may still hold it, and a moment for a process
/// that an ended launcher had just started: it holds the launcher's open files until it executes its program.
fn take(directory: &Path, checkpoints: &Path) -> Result<Flock<File>, PoolError> {
    const MAX_TRIES: u32 = 6000;
    const MAX_TRIES_IF_OWNED: u32 = 10;
    let path = directory.join("lock");
    let mut owned = 0;
    for _ in 0..MAX_TRIES {
        if let Some(lock) = lock_file(&path).map_err(io_error(&path))? {
            return Ok(lock);
        }
        if directory.join(POOL_NAME).exists() && !directory.join(recover::RECOVERY_NAME).exists() {
            owned += 1;
            if owned == MAX_TRIES_IF_OWNED {
                return Err(PoolError::Taken(checkpoints.to_owned()));
            }
        }
        std::thread::sleep(Duration::from_millis(100));
        // The guardian may have removed the directory.
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(io_error(directory))?;
    }
    Err(PoolError::Taken(checkpoints.to_owned()))
}

/// Removes the ranks' memory of a pool and its lock, which the next pool in the same place takes again.
fn remove_ranks(pool: &Path) -> io::Result<()> {
    // Its description first: without it the rest is not recognized as a pool.
    fs::remove_file(pool.join(POOL_NAME))?;
    for entry in fs::read_dir(pool)?.flatten() {
        let path = entry.path();
        let is_a_ranks = entry.file_name().as_encoded_bytes().starts_with(b"rank-");
        match path.is_dir() {
            true if is_a_ranks => fs::remove_dir_all(path)?,
            true => {}
            false => fs::remove_file(path)?,
        }
    }
    Ok(())
}

fn open_bell(directory: &Path) -> Option<UnixDatagram> {
    let path = directory.join(BELL_NAME);
    let _ = fs::remove_file(&path);
    let bell =
        UnixDatagram::bind(&path).and_then(|bell| bell.set_read_timeout(Some(POLL_INTERVAL)).map(|()| bell));
    bell.inspect_err(
        |error| tracing::debug!(%error, path = %path.display(), "no bell; looking often instead"),
    )
    .ok()
}

fn ring(directory: &Path) {
    // A pool owner that does not receive it checks by itself a little later.
    if let Ok(socket) = UnixDatagram::unbound() {
        let _ = socket.set_nonblocking(true);
        let _ = socket.send_to(b"!", directory.join(BELL_NAME));
    }
}

// The thread that writes to disk, with the lowest priority.

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
}

/// The result of a batch.
#[derive(Debug)]
pub(super) struct WriteResult {
    pub(super) done: Vec<SealedSlot>,
    pub(super) failed: Option<(SealedSlot, WriteError)>,
}

/// Writes the shards of a step, then removes what need not be kept. On a full disk, older steps are removed first if
/// possible.
fn write_batch(
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
            let held = shared.inner();
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

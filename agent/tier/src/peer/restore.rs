//! Restores the newest step that is whole over all holders into a job's checkpoint directory, before its ranks start.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mainstay_checkpoint::decision::Decision;
use mainstay_checkpoint::inventory::{Copy, Medium, StepKey, restorable, steps};
use mainstay_checkpoint::plan::{Transfer, plan};
use mainstay_checkpoint_format::MANIFEST_NAME;

use super::client::Target;
use super::error::PeerError;
use super::local_shards::WatchedDirectory;
use super::receive::{ShardWriter, shard_directory};
use super::service::{Service, Shared};
use super::user::{Access, User};
use crate::beneath::Beneath;
use crate::lent_files::{RestoreFiles, RestoredShard};
use crate::lock;
use crate::seal::pass_on;
use crate::seal::{SealedShard, open_plainly};

/// Number of shards that are fetched in parallel.
const MAX_AT_ONCE: usize = 4;

/// Maximum number of decisions that are tried: each one after a failure excludes the copies that were found damaged.
const MAX_TRIES: usize = 4;

/// Time within which the process that requested the restore must lend its files.
const LEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Progress of a restore.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// The step.
    pub step: u64,
    /// Shards that are done, and all.
    pub shards: (usize, usize),
    /// Bytes received from peers, and all that are needed.
    pub bytes: (u64, u64),
    /// A message in one line; empty if only the counts changed.
    pub message: String,
    /// Number of files to lend for the shards (`lent_files`), with this token; 0 if this agent creates them itself.
    pub files_wanted: usize,
    /// The token; empty if no files are wanted.
    pub files_token: String,
}

impl Progress {
    pub(crate) fn line(step: u64, shards: usize, message: String) -> Progress {
        Progress { step, shards: (0, shards), message, ..Progress::default() }
    }
}

/// The result of a restore.
#[derive(Clone, Debug, PartialEq)]
pub struct Restored {
    /// The decision that holds for all hosts.
    pub decision: Decision,
    /// Bytes received from peers.
    pub bytes: u64,
    /// Shards fetched from peers.
    pub fetched: usize,
    /// Shards that were already on this host.
    pub here: usize,
    /// Duration in seconds.
    pub seconds: f64,
    /// Shards in lent files, for the process that moves them into place.
    pub landed: Vec<RestoredShard>,
}

impl Service {
    /// Decides with the other hosts to which step the job goes back, and fetches the shards of `ranks` (none: all ranks) into
    /// the directory. Changes nothing if no step is whole anywhere.
    ///
    /// # Errors
    /// There is no decision, or no step could be restored because all copies are damaged.
    pub fn restore(
        &self,
        watched: &WatchedDirectory,
        ranks: Option<&[u32]>,
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<Restored, PeerError> {
        let shared = &*self.shared;
        let began = Instant::now();
        shared.own.watch(watched.clone());
        shared.own.look();
        let mut last = None;
        let done = |decision, came: FetchResult| {
            let FetchResult { bytes, fetched, here, landed } = came;
            Restored { decision, bytes, fetched, here, seconds: began.elapsed().as_secs_f64(), landed }
        };
        for _ in 0..MAX_TRIES {
            let decision = shared.decide(&watched.run)?;
            self.report_lost_pieces(&watched.run, decision.step.as_ref(), report);
            let Some(key) = decision.step.clone() else {
                return Ok(done(decision, FetchResult::default()));
            };
            match self.fetch_step(&key, watched, ranks, report) {
                Ok(came) => {
                    shared.own.look();
                    return Ok(done(decision, came));
                }
                // The error would be the same for each step.
                Err(error @ PeerError::NoFiles(_)) => return Err(error),
                Err(error) => {
                    let message = format!(
                        "step {} cannot be restored: {error}; the next older whole one is looked for",
                        key.step
                    );
                    tracing::warn!("{message}");
                    report(Progress::line(key.step, key.world as usize, message));
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or_else(|| PeerError::Local("no step could be restored".to_owned())))
    }

    /// Reports newer steps than the decided one that are lost because too many pieces are missing.
    fn report_lost_pieces(&self, run: &str, decided: Option<&StepKey>, report: &(dyn Fn(Progress) + Sync)) {
        for state in steps(&restorable(self.shared.copies()), Some(run)) {
            let key = &state.key;
            if decided.is_some_and(|decided| decided.step >= key.step) {
                continue;
            }
            if let Some((rank, left, needed)) = state.short_of_pieces().first() {
                let message = format!(
                    "step {} is lost: of the shard of rank {rank} {left} piece(s) are left, and {needed} are needed",
                    key.step
                );
                tracing::warn!("{message}");
                report(Progress::line(key.step, key.world as usize, message));
            }
        }
    }

    /// Fetches the shards of one step.
    fn fetch_step(
        &self,
        key: &StepKey,
        watched: &WatchedDirectory,
        ranks: Option<&[u32]>,
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<FetchResult, PeerError> {
        let shared = &*self.shared;
        let step = shared
            .step(key)
            .ok_or_else(|| PeerError::Local("no peer that answers has any of it".to_owned()))?;
        let all: Vec<u32> = (0..key.world).collect();
        let here = || vec![self.name().to_owned()];
        let wanted: BTreeMap<u32, Vec<String>> =
            ranks.unwrap_or(&all).iter().map(|rank| (*rank, here())).collect();
        let plan = plan(&step, &wanted);
        if let Some(rank) = plan.missing.first() {
            return Err(PeerError::Local(format!("no peer that answers has the shard of rank {rank}")));
        }
        let count = plan.transfers.len();
        let lot = self.lent_files(key, watched.user, count, report)?;
        let work = FetchWork {
            shared,
            watched,
            access: shared.settings.users.access(watched.user),
            files: lot.clone(),
            left: Mutex::new(plan.transfers.iter().rev().collect()),
            done: AtomicUsize::new(0),
            fetched: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            failed: Mutex::new(None),
            report: &|progress: &FetchWork<'_>, message: String| {
                report(Progress {
                    shards: (progress.done.load(Ordering::Relaxed), count),
                    bytes: (progress.bytes.load(Ordering::Relaxed), plan.bytes()),
                    ..Progress::line(key.step, count, message)
                });
            },
        };
        std::thread::scope(|scope| {
            for _ in 0..MAX_AT_ONCE.min(count) {
                scope.spawn(|| work.run());
            }
        });
        if let Some(error) = work.failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        let fetched = work.fetched.into_inner();
        let landed = lot.map(|lot| lot.take_written()).unwrap_or_default();
        Ok(FetchResult { bytes: work.bytes.into_inner(), fetched, here: count - fetched, landed })
    }

    /// The files that the user's process lends for `count` shards, if this agent may not write as the user.
    pub(crate) fn lent_files(
        &self,
        key: &StepKey,
        user: User,
        count: usize,
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<Option<Arc<RestoreFiles>>, PeerError> {
        let Err(cannot) = self.users().access(user).act_to_write() else { return Ok(None) };
        let pending = self.users().lent_files.request(user.uid, count);
        let pending = pending.map_err(|error| PeerError::NoFiles(format!("{cannot}: {error}")))?;
        let files_token = pending.token().to_owned();
        let line = Progress::line(key.step, count, String::new());
        report(Progress { files_wanted: count, files_token, ..line });
        let lot = pending.wait(LEND_TIMEOUT);
        let none =
            || PeerError::NoFiles(format!("{cannot}, and no files were lent for its {count} shard(s)"));
        lot.ok_or_else(none).map(Some)
    }
}

/// The result of fetching one step.
#[derive(Default)]
struct FetchResult {
    bytes: u64,
    /// Shards that were fetched, and shards that were already here.
    fetched: usize,
    here: usize,
    /// Shards in lent files.
    landed: Vec<RestoredShard>,
}

/// Whether this exact shard is in the directory; the caller has verified its bytes.
fn is_there(directory: &Path, sealed: &SealedShard, access: &Access) -> bool {
    let Ok(as_user) = access.act() else { return false };
    let Ok(at) = as_user.open(directory) else { return false };
    SealedShard::read_in(&at, &shard_directory(sealed).join(MANIFEST_NAME))
        .and_then(|there| there.owned_as(&sealed.shard.key.run))
        .is_ok_and(|there| there.shard.root == sealed.shard.root)
}

/// The shards to fetch, for the threads that do it.
struct FetchWork<'a> {
    shared: &'a Shared,
    watched: &'a WatchedDirectory,
    access: Access,
    files: Option<Arc<RestoreFiles>>,
    left: Mutex<Vec<&'a Transfer>>,
    done: AtomicUsize,
    fetched: AtomicUsize,
    bytes: AtomicU64,
    failed: Mutex<Option<PeerError>>,
    report: &'a (dyn Fn(&FetchWork<'_>, String) + Sync),
}

impl FetchWork<'_> {
    fn run(&self) {
        loop {
            let next = lock(&self.left).pop();
            let Some(transfer) = next else { return };
            if let Err(error) = self.fetch_shard(transfer) {
                // Without this shard the step is incomplete: do not fetch the others.
                lock(&self.left).clear();
                *lock(&self.failed) = Some(error);
                return;
            }
            self.done.fetch_add(1, Ordering::Relaxed);
            (self.report)(self, String::new());
        }
    }

    /// Fetches one shard from its nearest copy; if that fails, from the next one.
    fn fetch_shard(&self, transfer: &Transfer) -> Result<(), PeerError> {
        let mut last = None;
        for copy in &transfer.sources {
            match self.fetch_from(copy) {
                Ok(()) => return Ok(()),
                Err(error) => {
                    let holder = &copy.holder;
                    if !matches!(error, PeerError::Local(_)) || copy.holder == self.shared.name() {
                        self.shared.distrust(holder, &copy.shard.root);
                    }
                    let rank = transfer.rank;
                    (self.report)(
                        self,
                        format!(
                            "the shard of rank {rank} at {holder} cannot be used: {error}; another copy is used if there is one"
                        ),
                    );
                    last = Some(error);
                }
            }
        }
        if !transfer.pieces.is_empty() {
            let report = |report: String| (self.report)(self, report);
            let bytes =
                super::pieces::restore_from_pieces(self.shared, &|| self.shard_writer(), transfer, &report)?;
            self.count_fetched(bytes);
            return Ok(());
        }
        Err(last.unwrap_or_else(|| PeerError::Local("no copy is left".to_owned())))
    }

    fn count_fetched(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.fetched.fetch_add(1, Ordering::Relaxed);
    }

    fn shard_writer(&self) -> ShardWriter<'_> {
        ShardWriter::as_user(&self.watched.directory, self.access.clone(), &self.shared.store)
            .in_files(self.files.clone())
    }

    fn fetch_from(&self, copy: &Copy) -> Result<(), PeerError> {
        let (shared, root) = (self.shared, &copy.shard.root);
        if copy.medium == Medium::Durable || copy.holder != shared.name() {
            let mut landing = self.shard_writer();
            let bytes = if copy.medium == Medium::Durable {
                let gone = || PeerError::Local("durable storage is unknown here".to_owned());
                shared.durable().ok_or_else(gone)?.get(&copy.shard, &mut landing)?
            } else {
                shared.client().get(&copy.holder, root, &mut landing, shared.settings.streams)?
            };
            landing.finish()?;
            self.count_fetched(bytes);
            return Ok(());
        }
        let opened =
            self.shared.open(root).ok_or_else(|| PeerError::Local("it cannot be opened".to_owned()))?;
        let (sealed, from) = (&*opened.sealed, &*opened.bytes);
        let reading = |error: io::Error| {
            PeerError::Local(format!("reading the shard of rank {}: {error}", copy.shard.rank))
        };
        if let Some(chunk) = opened.first_bad().map_err(reading)? {
            return Err(PeerError::Corrupt { peer: "this host".to_owned(), chunk });
        }
        // Files of a trainer are already in place.
        if opened.is_pack() || is_there(&self.watched.directory, sealed, &self.access) {
            return Ok(());
        }
        let mut landing = self.shard_writer();
        landing.begin(sealed)?;
        let bytes = 0..sealed.shard.bytes;
        pass_on(from, bytes, reading, |offset, piece| landing.write(offset, piece))?;
        landing.finish()
    }
}

/// Copies files that were sealed in place into a directory of this process, as an ordinary shard.
///
/// # Errors
/// They have changed, or there is no room.
pub(crate) fn land(
    service: &Service,
    directory: &Path,
    sealed: &SealedShard,
    content: &crate::files::Content,
) -> Result<(), PeerError> {
    let reading = |error: io::Error| PeerError::Local(format!("{}: {error}", content.base().display()));
    let mut landing = ShardWriter::as_user(directory, Access::own(), &service.shared.store);
    landing.begin(sealed)?;
    pass_on(content, 0..sealed.shard.bytes, reading, |offset, piece| landing.write(offset, piece))?;
    // A file that was written meanwhile has a new modification time and is not part of this step.
    if !content.is_still() {
        return Err(PeerError::Local(format!("{} was written to meanwhile", content.base().display())));
    }
    landing.finish()
}

/// Reads the manifests in a checkpoint directory without an agent and without reading the shards. Reports the problem of each invalid one.
pub fn look_directory(directory: &Path, mut report: impl FnMut(&Path, Result<SealedShard, String>)) {
    let Ok(at) = Beneath::open(directory) else { return };
    for shard in super::local_shards::rank_directories(&at) {
        let found = SealedShard::read_in(&at, &shard.join(MANIFEST_NAME)).map_err(|error| error.to_string());
        report(&directory.join(shard), found);
    }
}

/// Same as [`look_directory`], and verifies all bytes.
pub fn verify_directory(directory: &Path, mut report: impl FnMut(&Path, Result<SealedShard, String>)) {
    look_directory(directory, |shard, found| {
        let checked = found.and_then(|sealed| {
            let failed = |error: io::Error| format!("{}: {error}", sealed.file);
            let file = open_plainly(&shard.join(&sealed.file)).map_err(failed)?;
            match sealed.first_bad(&file).map_err(failed)? {
                None => Ok(sealed),
                Some(chunk) => Err(format!("{}: chunk {chunk} is not what was sealed", sealed.file)),
            }
        });
        report(shard, checked);
    });
}

// For the launchers of one job, whose leader decides on the step.

/// Maximum number of reported steps, the newest.
const MAX_REPORTED: usize = 16;

/// The shards of a host's ranks are in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedShards {
    /// The root of each rank's shard.
    pub roots: BTreeMap<u32, String>,
    /// Shards fetched from other hosts.
    pub fetched: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Service {
    /// The copies on this host of the newest steps of a run: of its own ranks, and stored for others.
    pub fn holding(&self, run: &str) -> Vec<Copy> {
        let mine = |copies: Vec<Copy>| -> Vec<Copy> {
            copies
                .into_iter()
                .filter(|copy| copy.holder == self.name() && copy.medium != Medium::Durable)
                .collect()
        };
        let mut copies = mine(restorable(self.copies()));
        let newest: Vec<StepKey> =
            steps(&copies, Some(run)).into_iter().take(MAX_REPORTED).map(|step| step.key).collect();
        copies.retain(|copy| newest.contains(&copy.shard.key));
        copies
    }

    /// Fetches the shards of these ranks of a step: shards in the launcher's memory stay there, all others go into the
    /// directory. Each is compared with its owner's seal.
    ///
    /// # Errors
    /// A shard is not available: no answering host has a good copy.
    pub fn fetch_shards(
        &self,
        key: &StepKey,
        watched: &WatchedDirectory,
        ranks: &[u32],
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<FetchedShards, PeerError> {
        let shared = &*self.shared;
        shared.own.watch(watched.clone());
        shared.own.look();
        shared.refresh();
        let step = shared.step(key);
        let step = step.ok_or_else(|| PeerError::Local("no host that answers has any of it".to_owned()))?;
        let mut roots = BTreeMap::new();
        let mut absent = Vec::new();
        let (mut bytes, mut fetched) = (0, 0);
        for rank in ranks {
            let copies = step.ranks.get(rank).map_or(&[][..], Vec::as_slice);
            let Some(copy) = copies.first() else {
                return Err(PeerError::Local(format!("no host that answers has the shard of rank {rank}")));
            };
            let root = copy.shard.root.clone();
            if !self.is_good_in_memory(&root) {
                absent.push(*rank);
            }
            roots.insert(*rank, root);
        }
        if !absent.is_empty() {
            // Copies that were found damaged no longer count.
            let step = shared.step(key);
            for rank in &absent {
                let copies = step.as_ref().and_then(|step| step.ranks.get(rank)?.first());
                let none =
                    || PeerError::Local(format!("no host that answers has a good shard of rank {rank}"));
                roots.insert(*rank, copies.ok_or_else(none)?.shard.root.clone());
            }
            let came = self.fetch_step(key, watched, Some(&absent), report)?;
            (bytes, fetched) = (came.bytes, came.fetched);
            shared.own.look();
        }
        Ok(FetchedShards { roots, fetched, bytes })
    }

    /// Whether a shard in the memory of this host's launcher matches its seal.
    fn is_good_in_memory(&self, root: &str) -> bool {
        let Some(opened) = self.shared.own.open_pooled(root) else { return false };
        let good = matches!(opened.first_bad(), Ok(None)) && opened.is_still();
        if !good {
            // Use another copy, from any host.
            self.shared.distrust(self.name(), root);
        }
        good
    }

    /// The steps of a launch of which each shard is on at least two hosts, newest first: as attempt and step.
    pub fn copied(&self, launch: &str) -> Vec<(u64, u64)> {
        let mut copies = self.shared.copies();
        copies.retain(|copy| copy.shard.key.run == launch);
        let all = steps(&copies, None);
        let copied = all.iter().filter(|step| step.is_whole() && step.least_copies() > self.redundancy());
        let mut copied: Vec<(u64, u64)> = copied.map(|step| (step.key.attempt, step.key.step)).collect();
        copied.sort_unstable_by(|a, b| b.cmp(a));
        copied
    }
}

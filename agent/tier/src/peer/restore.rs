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
use super::local_shards::Watched;
use super::receive::{ShardWriter, shard_directory};
use super::service::{Service, Shared};
use super::user::{Access, User};
use crate::beneath::Beneath;
use crate::lent_files::{RestoreFiles, RestoredShard};
use crate::seal::pass_on;
use crate::seal::{Sealed, open_plainly};

/// Number of shards that are fetched in parallel.
const AT_ONCE: usize = 4;

/// Maximum number of decisions that are tried: each one after a failure excludes the copies that were found damaged.
const TRIES: usize = 4;

/// Time within which the process that requested the restore must lend its files.
const LENT_WITHIN: Duration = Duration::from_secs(10);

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
    pub reported: String,
    /// Number of files to lend for the shards (`lent_files`), with this token; 0 if this agent creates them itself.
    pub files_wanted: usize,
    /// The token; empty if no files are wanted.
    pub files_token: String,
}

impl Progress {
    pub(crate) fn words(step: u64, shards: usize, reported: String) -> Progress {
        Progress { step, shards: (0, shards), reported, ..Progress::default() }
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
        place: &Watched,
        ranks: Option<&[u32]>,
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<Restored, PeerError> {
        let shared = &*self.shared;
        let began = Instant::now();
        shared.own.watch(place.clone());
        shared.own.look();
        let mut last = None;
        let done = |decision, came: FetchResult| {
            let FetchResult { bytes, fetched, here, landed } = came;
            Restored { decision, bytes, fetched, here, seconds: began.elapsed().as_secs_f64(), landed }
        };
        for _ in 0..TRIES {
            let decision = shared.decide(&place.run)?;
            self.report_lost_pieces(&place.run, decision.step.as_ref(), report);
            let Some(key) = decision.step.clone() else {
                return Ok(done(decision, FetchResult::default()));
            };
            match self.fetch_step(&key, place, ranks, report) {
                Ok(came) => {
                    shared.own.look();
                    return Ok(done(decision, came));
                }
                // The error would be the same for each step.
                Err(error @ PeerError::NoFiles(_)) => return Err(error),
                Err(error) => {
                    let reported = format!(
                        "step {} cannot be restored: {error}; the next older whole one is looked for",
                        key.step
                    );
                    tracing::warn!("{reported}");
                    report(Progress::words(key.step, key.world as usize, reported));
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
                let reported = format!(
                    "step {} is lost: of the shard of rank {rank} {left} piece(s) are left, and {needed} are needed",
                    key.step
                );
                tracing::warn!("{reported}");
                report(Progress::words(key.step, key.world as usize, reported));
            }
        }
    }

    /// Fetches the shards of one step.
    fn fetch_step(
        &self,
        key: &StepKey,
        place: &Watched,
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
        let lot = self.lent_files(key, place.user, count, report)?;
        let work = Work {
            shared,
            place,
            access: shared.settings.users.access(place.user),
            lot: lot.clone(),
            left: Mutex::new(plan.transfers.iter().rev().collect()),
            done: AtomicUsize::new(0),
            fetched: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            failed: Mutex::new(None),
            report: &|progress: &Work<'_>, reported: String| {
                report(Progress {
                    shards: (progress.done.load(Ordering::Relaxed), count),
                    bytes: (progress.bytes.load(Ordering::Relaxed), plan.bytes()),
                    ..Progress::words(key.step, count, reported)
                });
            },
        };
        std::thread::scope(|scope| {
            for _ in 0..AT_ONCE.min(count) {
                scope.spawn(|| work.run());
            }
        });
        if let Some(error) = work.failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        let fetched = work.fetched.into_inner();
        let landed = lot.map(|lot| lot.all_landed()).unwrap_or_default();
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
        let wanted = self.users().lent_files.want(user.uid, count);
        let wanted = wanted.map_err(|error| PeerError::NoFiles(format!("{cannot}: {error}")))?;
        let files_token = wanted.token().to_owned();
        let words = Progress::words(key.step, count, String::new());
        report(Progress { files_wanted: count, files_token, ..words });
        let lot = wanted.wait(LENT_WITHIN);
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
fn is_there(directory: &Path, sealed: &Sealed, access: &Access) -> bool {
    let Ok(as_user) = access.act() else { return false };
    let Ok(at) = as_user.open(directory) else { return false };
    Sealed::read_in(&at, &shard_directory(sealed).join(MANIFEST_NAME))
        .and_then(|there| there.owned_as(&sealed.shard.of.run))
        .is_ok_and(|there| there.shard.root == sealed.shard.root)
}

/// The shards to fetch, for the threads that do it.
struct Work<'a> {
    shared: &'a Shared,
    place: &'a Watched,
    access: Access,
    lot: Option<Arc<RestoreFiles>>,
    left: Mutex<Vec<&'a Transfer>>,
    done: AtomicUsize,
    fetched: AtomicUsize,
    bytes: AtomicU64,
    failed: Mutex<Option<PeerError>>,
    report: &'a (dyn Fn(&Work<'_>, String) + Sync),
}

impl Work<'_> {
    fn run(&self) {
        loop {
            let next = self.left.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(transfer) = next else { return };
            if let Err(error) = self.bring(transfer) {
                // Without this shard the step is incomplete: do not fetch the others.
                self.left.lock().unwrap_or_else(PoisonError::into_inner).clear();
                *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                return;
            }
            self.done.fetch_add(1, Ordering::Relaxed);
            (self.report)(self, String::new());
        }
    }

    /// Fetches one shard from its nearest copy; if that fails, from the next one.
    fn bring(&self, transfer: &Transfer) -> Result<(), PeerError> {
        let mut last = None;
        for copy in &transfer.sources {
            match self.bring_from(copy) {
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
            let reported = |reported: String| (self.report)(self, reported);
            let bytes = super::pieces::bring(self.shared, &|| self.landing(), transfer, &reported)?;
            self.came(bytes);
            return Ok(());
        }
        Err(last.unwrap_or_else(|| PeerError::Local("no copy is left".to_owned())))
    }

    fn came(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.fetched.fetch_add(1, Ordering::Relaxed);
    }

    fn landing(&self) -> ShardWriter<'_> {
        ShardWriter::of_user(&self.place.directory, self.access.clone(), &self.shared.store)
            .in_files(self.lot.clone())
    }

    fn bring_from(&self, copy: &Copy) -> Result<(), PeerError> {
        let (shared, root) = (self.shared, &copy.shard.root);
        if copy.medium == Medium::Durable || copy.holder != shared.name() {
            let mut landing = self.landing();
            let bytes = if copy.medium == Medium::Durable {
                let gone = || PeerError::Local("durable storage is unknown here".to_owned());
                shared.durable().ok_or_else(gone)?.get(&copy.shard, &mut landing)?
            } else {
                shared.asking().get(&copy.holder, root, &mut landing, shared.settings.streams)?
            };
            landing.finish()?;
            self.came(bytes);
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
        if opened.is_pack() || is_there(&self.place.directory, sealed, &self.access) {
            return Ok(());
        }
        let mut landing = self.landing();
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
    sealed: &Sealed,
    content: &crate::files::Content,
) -> Result<(), PeerError> {
    let reading = |error: io::Error| PeerError::Local(format!("{}: {error}", content.base().display()));
    let mut landing = ShardWriter::of_user(directory, Access::own(), &service.shared.store);
    landing.begin(sealed)?;
    pass_on(content, 0..sealed.shard.bytes, reading, |offset, piece| landing.write(offset, piece))?;
    // A file that was written meanwhile has a new modification time and is not part of this step.
    if !content.is_still() {
        return Err(PeerError::Local(format!("{} was written to meanwhile", content.base().display())));
    }
    landing.finish()
}

/// Reads the manifests in a checkpoint directory without an agent and without reading the shards. Reports the problem of each invalid one.
pub fn look_directory(directory: &Path, mut reported: impl FnMut(&Path, Result<Sealed, String>)) {
    let Ok(at) = Beneath::open(directory) else { return };
    for shard in super::local_shards::rank_directories(&at) {
        let found = Sealed::read_in(&at, &shard.join(MANIFEST_NAME)).map_err(|error| error.to_string());
        reported(&directory.join(shard), found);
    }
}

/// Same as [`look_directory`], and verifies all bytes.
pub fn verify_directory(directory: &Path, mut reported: impl FnMut(&Path, Result<Sealed, String>)) {
    look_directory(directory, |shard, found| {
        let checked = found.and_then(|sealed| {
            let failed = |error: io::Error| format!("{}: {error}", sealed.file);
            let file = open_plainly(&shard.join(&sealed.file)).map_err(failed)?;
            match sealed.first_bad(&file).map_err(failed)? {
                None => Ok(sealed),
                Some(chunk) => Err(format!("{}: chunk {chunk} is not what was sealed", sealed.file)),
            }
        });
        reported(shard, checked);
    });
}

// For the launchers of one job, whose leader decides on the step.

/// Maximum number of reported steps, the newest.
const MAX_REPORTED: usize = 16;

/// The shards of a host's ranks are in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Brought {
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
        copies.retain(|copy| newest.contains(&copy.shard.of));
        copies
    }

    /// Fetches the shards of these ranks of a step: shards in the launcher's memory stay there, all others go into the
    /// directory. Each is compared with its owner's seal.
    ///
    /// # Errors
    /// A shard is not available: no answering host has a good copy.
    pub fn bring(
        &self,
        key: &StepKey,
        place: &Watched,
        ranks: &[u32],
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<Brought, PeerError> {
        let shared = &*self.shared;
        shared.own.watch(place.clone());
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
            let came = self.fetch_step(key, place, Some(&absent), report)?;
            (bytes, fetched) = (came.bytes, came.fetched);
            shared.own.look();
        }
        Ok(Brought { roots, fetched, bytes })
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
        copies.retain(|copy| copy.shard.of.run == launch);
        let all = steps(&copies, None);
        let copied = all.iter().filter(|step| step.is_whole() && step.least_copies() > self.redundancy());
        let mut copied: Vec<(u64, u64)> = copied.map(|step| (step.key.attempt, step.key.step)).collect();
        copied.sort_unstable_by(|a, b| b.cmp(a));
        copied
    }
}

//! Recovers what a killed launcher left in memory: its guardian, or the next launcher on the host, writes it to disk.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainstay_checkpoint_format::control::{POOL_NAME, Slot, State, VERSION};
use mainstay_checkpoint_format::{Identity, Manifest};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Doubts, Keep, Pace, StdVolume};
use crate::os::now_unix_s;
use crate::pool::choose::{self, AttemptStep, SealedSlot};
use crate::pool::memory::{RankMemory, lives, lock_file, rank_directory};
use crate::pool::{PoolError, Settings, io_error};
use crate::seal::{self, seal};

/// Name of the file that marks the lock as held by a recovery, which ends soon.
pub(super) const RECOVERY_NAME: &str = "recovering";

/// The result of a recovery.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// The checkpoint directory.
    pub directory: PathBuf,
    /// The steps from memory that are now on disk.
    pub steps: Vec<u64>,
    /// Messages about shards that could not be written.
    pub failed: Vec<String>,
}

impl Recovered {
    /// The result as messages for users.
    pub fn lines(&self) -> Vec<String> {
        let mut messages = self.failed.clone();
        if !self.steps.is_empty() {
            let steps: Vec<String> = self.steps.iter().map(u64::to_string).collect();
            let (steps, shown) = (steps.join(", "), self.directory.display());
            messages
                .push(format!("step {steps}, which a killed launcher had left in memory, is in {shown} now"));
        }
        messages
    }
}

/// Writes a pool whose launcher is gone to disk, and removes it. None if it is in use, or there is none.
///
/// # Errors
/// It cannot be read at all. Shards that cannot be written stay in memory.
pub fn recover(pool: &Path) -> Result<Option<Recovered>, PoolError> {
    if !pool.join(POOL_NAME).exists() {
        return Ok(None);
    }
    let path = pool.join("lock");
    let Some(_lock) = lock_file(&path).map_err(io_error(&path))? else { return Ok(None) };
    let recovered = bring_to_disk(pool)?;
    if recovered.failed.is_empty() {
        let _ = fs::remove_dir_all(pool);
    }
    Ok(Some(recovered))
}

/// Same as [`recover`], for all unused pools in `root`.
pub fn recover_all(root: &Path) -> Vec<Recovered> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let pools = entries.flatten().map(|entry| entry.path());
    pools.filter_map(|pool| recover(&pool).ok().flatten()).collect()
}

/// Writes a pool to disk. The caller holds the lock.
pub(super) fn bring_to_disk(pool: &Path) -> Result<Recovered, PoolError> {
    let mark = pool.join(RECOVERY_NAME);
    fs::write(&mark, []).map_err(io_error(&mark))?;
    let about = PoolRecord::read(pool)?;
    let mut recovered = Recovered { directory: about.directory.clone(), ..Recovered::default() };
    let vouched = vouched(pool, about.first_rank);
    let shards = shards(pool, &about, &mut recovered.failed);
    write(&about, &shards, vouched, &mut recovered);
    if recovered.failed.is_empty() {
        empty(pool).map_err(io_error(pool))?;
    } else {
        let _ = fs::remove_file(&mark);
    }
    Ok(recovered)
}

/// Removes everything in a pool except its lock, which is held.
fn empty(pool: &Path) -> io::Result<()> {
    // Its description first: without it the rest is not recognized as a pool.
    fs::remove_file(pool.join(POOL_NAME))?;
    for entry in fs::read_dir(pool)?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            fs::remove_dir_all(path)?;
        } else if entry.file_name() != "lock" {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// The description of a pool, with which it can be recovered without its launcher.
#[derive(Serialize, Deserialize)]
pub(super) struct PoolRecord {
    version: u64,
    directory: PathBuf,
    job: String,
    run: String,
    world_size: u32,
    /// Neither this nor the number of ranks is in pools of versions that only had whole jobs.
    #[serde(default)]
    first_rank: u32,
    ranks: Option<u32>,
    keep: usize,
    keep_bytes: Option<u64>,
}

impl PoolRecord {
    /// Writes the description of a pool with these settings.
    pub(super) fn write(pool: &Path, settings: &Settings) -> Result<(), PoolError> {
        let Settings { directory, job, run, world_size, ranks, keep, .. } = settings;
        let about = PoolRecord {
            version: VERSION,
            directory: directory.clone(),
            job: job.clone(),
            run: run.clone(),
            world_size: *world_size,
            first_rank: ranks.start,
            ranks: Some(ranks.end.saturating_sub(ranks.start)),
            keep: keep.steps,
            keep_bytes: keep.bytes,
        };
        let path = pool.join(POOL_NAME);
        let aside = path.with_extension("new");
        let written = serde_json::to_vec(&about).map_err(io::Error::other);
        written
            .and_then(|about| fs::write(&aside, about))
            .and_then(|()| fs::rename(&aside, &path))
            .map_err(io_error(&path))
    }

    fn read(pool: &Path) -> Result<PoolRecord, PoolError> {
        let path = pool.join(POOL_NAME);
        let bytes = fs::read(&path).map_err(io_error(&path))?;
        let about = serde_json::from_slice(&bytes).ok();
        let is_known = |about: &PoolRecord| about.version == VERSION && about.directory.is_absolute();
        about.filter(is_known).ok_or(PoolError::NotOurs(path))
    }

    fn ranks(&self) -> Range<u32> {
        self.first_rank..self.first_rank.saturating_add(self.ranks.unwrap_or(self.world_size))
    }
}

/// The step to go back to if replicas turn out to differ; each page has it.
fn vouched(pool: &Path, first_rank: u32) -> Option<u64> {
    let memory = RankMemory::open(&rank_directory(pool, first_rank)).ok()?;
    memory.control().ok()?.vouched()
}

struct AbandonedPool {
    held: SealedSlot,
    manifest: Manifest,
    file: Arc<File>,
}

/// All shards that were filled when the launcher ended: sealed ones by their manifests; others are sealed now.
fn shards(pool: &Path, about: &PoolRecord, failed: &mut Vec<String>) -> Vec<AbandonedPool> {
    let mut left = Vec::new();
    for rank in about.ranks() {
        let directory = rank_directory(pool, rank);
        let memory = match RankMemory::open(&directory) {
            Ok(memory) => memory,
            // Killed before it was created: there is nothing in it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                failed.push(format!("the memory of rank {rank} in {}: {error}", directory.display()));
                continue;
            }
        };
        let Ok(control) = memory.control() else { continue };
        for slot in control.all() {
            let Some(file) = memory.files.get(slot.index) else { continue };
            let Some(manifest) = slot_manifest(&memory, about, &slot, file, control.epoch()) else {
                continue;
            };
            let held = SealedSlot { rank, index: slot.index, at: (slot.epoch, slot.step), writing: false };
            left.push(AbandonedPool { held, manifest, file: file.clone() });
        }
    }
    left
}

fn slot_manifest(
    memory: &RankMemory,
    about: &PoolRecord,
    slot: &Slot,
    file: &File,
    epoch: u64,
) -> Option<Manifest> {
    let identity = Identity {
        job: about.job.clone(),
        attempt: slot.epoch,
        step: slot.step,
        rank: memory.rank,
        world_size: about.world_size,
    };
    match slot.state {
        State::Sealed => {
            let manifest = memory.manifest(slot.index)?;
            let is_it = manifest.identity == identity && manifest.file.size == slot.used;
            (is_it && seal::is_as_sealed(file, &manifest).unwrap_or(false)).then_some(manifest)
        }
        State::Sealing => seal(file, slot.used, &identity, &about.run, now_unix_s()).ok(),
        State::Filled if slot.epoch == epoch && slot.world_size == u64::from(about.world_size) => {
            seal(file, slot.used, &identity, &about.run, now_unix_s()).ok()
        }
        _ => None,
    }
}

/// Writes the newest whole step first, then older whole ones, then steps whose other shards may be on other hosts.
fn write(about: &PoolRecord, shards: &[AbandonedPool], vouched: Option<u64>, recovered: &mut Recovered) {
    let volume = StdVolume;
    disk::clear_aside(&volume, &about.directory, &lives);
    let held: Vec<SealedSlot> = shards.iter().map(|left| left.held).collect();
    let on_disk = |at: AttemptStep, rank: u32| {
        disk::manifest(&volume, &about.directory, at.1, rank)
            .is_some_and(|(there, _)| there.identity.job == about.job && there.identity.attempt == at.0)
    };
    let newest = choose::newest_whole(&held, &about.ranks(), &on_disk);
    let mut by_step: BTreeMap<AttemptStep, Vec<&AbandonedPool>> = BTreeMap::new();
    for left in shards {
        by_step.entry(left.held.at).or_default().push(left);
    }
    let mut order: Vec<AttemptStep> = by_step.keys().copied().rev().collect();
    // Stable sort: the newest whole step, then the others, newest first.
    order.sort_by_key(|at| Some(*at) != newest);
    for at in order {
        // The disk may have a later attempt's shard of that step, which is newer than this one.
        let stale = |left: &&&AbandonedPool| {
            disk::manifest(&volume, &about.directory, at.1, left.held.rank)
                .is_some_and(|(there, _)| there.identity.job == about.job && there.identity.attempt > at.0)
        };
        let shards = &by_step[&at];
        if shards.iter().any(|left| stale(&left)) {
            continue;
        }
        let write = |left: &&AbandonedPool| {
            disk::write(&volume, &about.directory, &left.manifest, &*left.file, &Pace::default(), &|| false)
        };
        match shards.iter().try_for_each(write) {
            Ok(()) => recovered.steps.push(at.1),
            Err(error) if Some(at) == newest => {
                recovered.failed.push(format!("step {} stays in memory: {error}", at.1));
            }
            // Only the newest one is worth keeping memory for.
            Err(error) => tracing::warn!(step = at.1, %error, "an older step is not brought to the disk"),
        }
    }
    // For a job on several hosts, this host does not know which step all of them have.
    if about.ranks() == (0..about.world_size) {
        let keep = Keep { steps: about.keep, bytes: about.keep_bytes };
        disk::prune(&volume, &about.directory, keep, &Doubts::read(&volume, &about.directory), vouched);
    }
}

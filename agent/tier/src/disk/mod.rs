//! Checkpoints on disk: `<directory>/step-000000000010/rank-00003/{state.safetensors, manifest.json}`, the layout of `mainstay.checkpoint`.

mod volume;
mod write;

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use mainstay_checkpoint_format::{MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest};
use serde::Deserialize;
use serde_json::Value;
pub(crate) use volume::FileSink;
pub use volume::{Sink, StdVolume, Volume, open_own};
pub(crate) use write::remove_tree;
pub use write::{Pace, WriteError, clear_aside, write};

/// The directory of a step.
pub fn step_directory(directory: &Path, step: u64) -> PathBuf {
    directory.join(format!("step-{step:012}"))
}

/// The directory of a shard.
pub fn shard_directory(directory: &Path, step: u64, rank: u32) -> PathBuf {
    step_directory(directory, step).join(format!("rank-{rank:05}"))
}

// Reads checkpoints on disk: manifests first, bytes when they are verified.

/// A shard on disk whose manifest is intact and whose file has the length in the manifest.
#[derive(Clone, Debug)]
pub struct StoredShard {
    /// Its manifest.
    pub manifest: Manifest,
    /// The manifest's bytes.
    pub manifest_bytes: Vec<u8>,
    /// Its file.
    pub path: PathBuf,
}

/// All steps with a directory, newest first.
pub fn steps(volume: &dyn Volume, directory: &Path) -> Vec<u64> {
    let names = volume.list(directory).unwrap_or_default();
    let mut steps: Vec<u64> = names.iter().filter_map(|name| number(name, "step-", 12)).collect();
    steps.sort_unstable_by(|a, b| b.cmp(a));
    steps
}

/// The number in a directory name.
fn number(name: &str, before: &str, digits: usize) -> Option<u64> {
    let number = name.strip_prefix(before)?;
    let is_ours = number.len() >= digits && number.bytes().all(|digit| digit.is_ascii_digit());
    is_ours.then(|| number.parse().ok()).flatten()
}

/// The path of a shard's manifest.
pub fn manifest_path(directory: &Path, step: u64, rank: u32) -> PathBuf {
    shard_directory(directory, step, rank).join(MANIFEST_NAME)
}

/// The manifest of a shard, if it is intact and of this step and rank.
pub fn manifest(volume: &dyn Volume, directory: &Path, step: u64, rank: u32) -> Option<(Manifest, Vec<u8>)> {
    let bytes = read(volume, &manifest_path(directory, step, rank), MAX_MANIFEST_BYTES).ok()?;
    let manifest = Manifest::decode(&bytes).ok()?;
    let is_it = (manifest.identity.step, manifest.identity.rank) == (step, rank);
    is_it.then_some((manifest, bytes))
}

fn read(volume: &dyn Volume, path: &Path, limit: usize) -> io::Result<Vec<u8>> {
    let (file, length) = volume.open(path)?;
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > limit {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// A shard whose manifest is intact and whose file has the length in the manifest. Its bytes are not read.
pub fn stored_shard(volume: &dyn Volume, directory: &Path, step: u64, rank: u32) -> Option<StoredShard> {
    let (manifest, manifest_bytes) = manifest(volume, directory, step, rank)?;
    let path = shard_directory(directory, step, rank).join(&manifest.file.name);
    let (_, length) = volume.open(&path).ok()?;
    (length == manifest.file.size).then_some(StoredShard { manifest, manifest_bytes, path })
}

/// The shards of a step, if every rank has one and all are of the same job, launch, attempt and world size. Bytes are not read.
pub fn whole_step(volume: &dyn Volume, directory: &Path, step: u64) -> Option<Vec<StoredShard>> {
    let first = stored_shard(volume, directory, step, *ranks(volume, directory, step).first()?)?;
    let shards = (0..first.manifest.identity.world_size).map(|rank| {
        let shard = stored_shard(volume, directory, step, rank)?;
        let (a, b) = (&shard.manifest.identity, &first.manifest.identity);
        let agree = (&a.job, a.attempt, a.world_size) == (&b.job, b.attempt, b.world_size);
        (agree && is_of_one_launch(&shard.manifest.run, &first.manifest.run)).then_some(shard)
    });
    shards.collect()
}

/// Whether two shards of one job may be of the same launch. Some shards do not name their launch.
fn is_of_one_launch(a: &str, b: &str) -> bool {
    a.is_empty() || b.is_empty() || a == b
}

/// The ranks with a directory in a step, in order.
pub fn ranks(volume: &dyn Volume, directory: &Path, step: u64) -> Vec<u32> {
    let names = volume.list(&step_directory(directory, step)).unwrap_or_default();
    let ranks = names.iter().filter_map(|name| u32::try_from(number(name, "rank-", 5)?).ok());
    let mut ranks: Vec<u32> = ranks.collect();
    ranks.sort_unstable();
    ranks
}

// Removes old steps from the disk: never the newest whole step, and nothing while fewer steps are whole than are to be kept.

/// Limits of what is kept.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    /// Number of whole steps.
    pub steps: usize,
    /// Maximum number of bytes; the newest whole step is kept in any case. None: no limit.
    pub bytes: Option<u64>,
}

/// The doubtful steps, as the launcher recorded them in the directory.
#[derive(Clone, Debug, Default)]
pub struct Doubts(Vec<Doubt>);

#[derive(Clone, Debug, Deserialize)]
struct Doubt {
    job: String,
    /// The launch; earlier versions recorded only the job.
    run: Option<String>,
    attempt: u64,
    after: Option<u64>,
}

impl Doubts {
    /// Reads `doubtful.json`. If it cannot be read, no step is doubtful.
    #[must_use]
    pub fn read(volume: &dyn Volume, directory: &Path) -> Doubts {
        let Ok((file, length)) = volume.open(&directory.join("doubtful.json")) else {
            return Doubts::default();
        };
        let mut bytes = vec![0; usize::try_from(length.min(1 << 20)).unwrap_or(0)];
        if file.read_exact_at(&mut bytes, 0).is_err() {
            return Doubts::default();
        }
        let entries: Vec<Value> = serde_json::from_slice(&bytes).unwrap_or_default();
        Doubts(entries.into_iter().filter_map(|entry| serde_json::from_value(entry).ok()).collect())
    }

    /// Whether a shard is of a doubtful step. A later attempt or another launch computed its steps of the same number again.
    pub fn about(&self, shard: &Manifest) -> bool {
        let key = &shard.identity;
        self.0.iter().any(|doubt| {
            doubt.job == key.job
                && is_of_one_launch(doubt.run.as_deref().unwrap_or_default(), &shard.run)
                && key.attempt <= doubt.attempt
                && doubt.after.is_none_or(|after| key.step > after)
        })
    }
}

/// Removes the steps that are older than those to be kept. Doubtful steps do not count as kept, so they displace no other step. `vouched`,
/// which was saved before the replicas last agreed, always stays: the job goes back to it if the replicas turn out to differ.
pub fn prune(volume: &dyn Volume, directory: &Path, keep: Keep, doubts: &Doubts, vouched: Option<u64>) {
    let mut kept = 0;
    let mut bytes = 0_u64;
    let mut oldest = None;
    let all = steps(volume, directory);
    for step in &all {
        let Some(shards) = whole_step(volume, directory, *step) else { continue };
        bytes = shards.iter().fold(bytes, |sum, shard| sum.saturating_add(shard.manifest.file.size));
        if shards.first().is_some_and(|shard| doubts.about(&shard.manifest)) {
            continue;
        }
        if kept > 0 && keep.bytes.is_some_and(|most| bytes > most) {
            break;
        }
        kept += 1;
        oldest = Some(*step);
        if kept >= keep.steps.max(1) {
            break;
        }
    }
    let enough = kept >= keep.steps.max(1) || keep.bytes.is_some_and(|most| bytes > most);
    let Some(oldest) = oldest.filter(|_| enough) else { return };
    for step in all.into_iter().filter(|step| *step < oldest && Some(*step) != vouched) {
        remove_step(volume, directory, step);
    }
}

/// Same as [`prune`] on one of several hosts, for the shards of its own ranks: the directory may also have shards of other hosts, which
/// stay. `copied` is a step that all hosts can go back to: this step and newer ones stay.
pub fn prune_of_ranks(volume: &dyn Volume, directory: &Path, ranks: &Range<u32>, keep: Keep, copied: u64) {
    let is_there =
        |step: &u64| ranks.clone().all(|rank| stored_shard(volume, directory, *step, rank).is_some());
    let all = steps(volume, directory);
    let Some(oldest) = all.iter().copied().filter(is_there).nth(keep.steps.max(1) - 1) else { return };
    for step in all.into_iter().filter(|step| *step < oldest && *step < copied) {
        for rank in ranks.clone() {
            // The manifest first: an interrupted removal leaves nothing that looks sealed.
            let _ = volume.remove_file(&manifest_path(directory, step, rank));
            remove_tree(volume, &shard_directory(directory, step, rank));
        }
        // Fails while another host has shards in it.
        let _ = volume.remove_directory(&step_directory(directory, step));
    }
}

fn remove_step(volume: &dyn Volume, directory: &Path, step: u64) {
    // Rename it first: an interrupted removal leaves no half step.
    let aside = directory.join(crate::aside::name(&format!("step-{step:012}")));
    if volume.rename(&step_directory(directory, step), &aside).is_ok() {
        // Sync before the parts are removed: the disk could lose them before the rename reaches it.
        let _ = volume.sync_directory(directory);
        remove_tree(volume, &aside);
    }
}

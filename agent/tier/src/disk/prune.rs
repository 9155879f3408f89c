//! Removes old steps from the disk: never the newest whole step, and nothing while fewer steps are whole than are to be kept.

use std::ops::Range;
use std::path::Path;

use mainstay_checkpoint_format::Manifest;
use serde_json::Value;

use crate::disk::volume::Volume;
use crate::disk::write::remove_tree;
use crate::disk::{read, shard_directory, step_directory};

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

#[derive(Clone, Debug)]
struct Doubt {
    job: String,
    /// The launch; empty if written by an earlier version, which recorded only the job.
    run: String,
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
        let doubt = |entry: &Value| {
            Some(Doubt {
                job: entry.get("job")?.as_str()?.to_owned(),
                run: entry.get("run").and_then(Value::as_str).unwrap_or_default().to_owned(),
                attempt: entry.get("attempt")?.as_u64()?,
                after: entry.get("after").and_then(Value::as_u64),
            })
        };
        Doubts(entries.iter().filter_map(doubt).collect())
    }

    /// Whether a shard is of a doubtful step. A later attempt or another launch computed its steps of the same number again.
    #[must_use]
    pub fn about(&self, shard: &Manifest) -> bool {
        let of = &shard.identity;
        self.0.iter().any(|doubt| {
            doubt.job == of.job
                && read::is_of_one_launch(&doubt.run, &shard.run)
                && of.attempt <= doubt.attempt
                && doubt.after.is_none_or(|after| of.step > after)
        })
    }
}

/// Removes the steps that are older than those to be kept. Doubtful steps do not count as kept, so they displace no other step. `vouched`,
/// which was saved before the replicas last agreed, always stays: the job goes back to it if the replicas turn out to differ.
pub fn prune(volume: &dyn Volume, directory: &Path, keep: Keep, doubts: &Doubts, vouched: Option<u64>) {
    let mut kept = 0;
    let mut bytes = 0_u64;
    let mut oldest = None;
    let all = read::steps(volume, directory);
    for step in &all {
        let Some(shards) = read::is_whole(volume, directory, *step) else { continue };
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
        |step: &u64| ranks.clone().all(|rank| read::found(volume, directory, *step, rank).is_some());
    let all = read::steps(volume, directory);
    let Some(oldest) = all.iter().copied().filter(is_there).nth(keep.steps.max(1) - 1) else { return };
    for step in all.into_iter().filter(|step| *step < oldest && *step < copied) {
        for rank in ranks.clone() {
            // The manifest first: an interrupted removal leaves nothing that looks sealed.
            let _ = volume.remove_file(&read::manifest_path(directory, step, rank));
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

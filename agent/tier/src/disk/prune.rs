//! What may be removed from the disk: never the newest whole step, and nothing while fewer are whole than are to be kept.

use std::ops::Range;
use std::path::Path;

use mainstay_checkpoint::Manifest;
use serde_json::Value;

use crate::disk::volume::Volume;
use crate::disk::write::remove_tree;
use crate::disk::{read, shard_directory, step_directory};

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    /// Whole steps.
    pub steps: usize,
    /// Bytes, as far as more than the newest whole step is concerned; none for as many as the steps need.
    pub bytes: Option<u64>,
}

/// Which steps are doubtful, as the launcher wrote it beside them.
#[derive(Clone, Debug, Default)]
pub struct Doubts(Vec<Doubt>);

#[derive(Clone, Debug)]
struct Doubt {
    job: String,
    /// The launch that it is about; empty of an earlier version, which named only the job.
    run: String,
    attempt: u64,
    after: Option<u64>,
}

impl Doubts {
    /// Reads `doubtful.json`; without a readable one nothing is doubtful.
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

    /// Whether a shard is of a doubtful step. What a later attempt or another launch saved under the same number was computed anew.
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

/// Removes the steps that are older than those to be kept. Doubtful ones do not count as kept, so that they push no other out. `vouched`,
/// which was saved before the replicas last agreed, stays in any case: it is the one to go back to should they turn out to differ.
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

/// The same on one of several hosts, for the shards of its ranks: those of other hosts may lie in the directory too, and are theirs.
/// `copied` is a step that all hosts can go back to: it stays, and what is newer.
pub fn prune_of_ranks(volume: &dyn Volume, directory: &Path, ranks: &Range<u32>, keep: Keep, copied: u64) {
    let is_there =
        |step: &u64| ranks.clone().all(|rank| read::found(volume, directory, *step, rank).is_some());
    let all = read::steps(volume, directory);
    let Some(oldest) = all.iter().copied().filter(is_there).nth(keep.steps.max(1) - 1) else { return };
    for step in all.into_iter().filter(|step| *step < oldest && *step < copied) {
        for rank in ranks.clone() {
            // The manifest first: a removal that is cut short leaves nothing that looks sealed.
            let _ = volume.remove_file(&read::manifest_path(directory, step, rank));
            remove_tree(volume, &shard_directory(directory, step, rank));
        }
        // It stays while another host has shards in it.
        let _ = volume.remove_directory(&step_directory(directory, step));
    }
}

fn remove_step(volume: &dyn Volume, directory: &Path, step: u64) {
    // Out of sight first, in one move: a removal cut short leaves no half step.
    let aside = directory.join(format!(".step-{step:012}.{}.tmp", std::process::id()));
    remove_tree(volume, &aside);
    if volume.rename(&step_directory(directory, step), &aside).is_ok() {
        // Before its parts go: they could go from the disk earlier than the move reaches it.
        let _ = volume.sync_directory(directory);
        remove_tree(volume, &aside);
    }
}

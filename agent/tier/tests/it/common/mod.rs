//! Shards for tests.

#![allow(dead_code, clippy::expect_used, clippy::unwrap_used, reason = "each test takes what it needs")]

pub mod rank;

use std::collections::BTreeMap;
use std::path::Path;

use mainstay_checkpoint_format::container::{self, Tensor};
use mainstay_checkpoint_format::{Identity, Manifest};
use mainstay_tier::disk::{self, Pace, StdVolume, StoredShard, Volume};
use mainstay_tier::seal::{is_as_sealed, seal};

/// A container of one tensor.
pub fn container(job: &str, attempt: u64, step: u64, rank: u32, world_size: u32, state: &[u8]) -> Vec<u8> {
    let words = [
        ("job", job.to_owned()),
        ("attempt", attempt.to_string()),
        ("step", step.to_string()),
        ("rank", rank.to_string()),
        ("world_size", world_size.to_string()),
        ("software.mainstay", "0".to_owned()),
    ];
    let words: BTreeMap<String, String> =
        words.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let tensor = Tensor { name: "state".to_owned(), dtype: "U8".to_owned(), shape: vec![state.len() as u64] };
    let (mut bytes, _) = container::encode(&words, vec![tensor]).expect("a header");
    bytes.extend(state);
    bytes
}

/// A container that names the group of ranks that save equal bytes.
pub fn container_of_group(rank: u32, group: &str, state: &[u8]) -> Vec<u8> {
    let words = [("job", "job"), ("attempt", "0"), ("step", "1"), ("world_size", "12"), ("alike", group)];
    let words = words.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let words = words.into_iter().chain([("rank".to_owned(), rank.to_string())]).collect();
    let own = vec![rank as u8; 3 + rank as usize];
    let tensor = |name: &str, bytes: &[u8]| Tensor {
        name: name.to_owned(),
        dtype: "U8".to_owned(),
        shape: vec![bytes.len() as u64],
    };
    let tensors = vec![tensor("state", state), tensor(container::STATE_TENSOR, &own)];
    let (bytes, _) = container::encode(&words, tensors).expect("a header");
    [bytes, state.to_vec(), own].concat()
}

/// A sealed container.
pub fn manifest(
    job: &str,
    attempt: u64,
    step: u64,
    rank: u32,
    world_size: u32,
    state: &[u8],
) -> (Manifest, Vec<u8>) {
    let bytes = container(job, attempt, step, rank, world_size, state);
    let identity = Identity { job: job.to_owned(), attempt, step, rank, world_size };
    (seal(&bytes, bytes.len() as u64, &identity, "run", 1).expect("sealed"), bytes)
}

/// Writes all shards of a step to disk.
pub fn write_step(home: &Path, attempt: u64, step: u64, world_size: u32, state: &[u8]) {
    for rank in 0..world_size {
        let (manifest, bytes) = manifest("job", attempt, step, rank, world_size, state);
        disk::write(&StdVolume, home, &manifest, &bytes, &Pace::default(), &|| false).expect("written");
    }
}

/// The newest whole step whose bytes are all verified, with its shards: what a job that starts again reads.
pub fn offered(volume: &dyn Volume, directory: &Path) -> Option<(u64, Vec<StoredShard>)> {
    disk::steps(volume, directory).into_iter().find_map(|step| {
        let shards = disk::whole_step(volume, directory, step)?;
        shards.iter().all(|shard| verify(volume, shard)).then_some((step, shards))
    })
}

/// Whether every byte of the shard matches its manifest.
pub fn verify(volume: &dyn Volume, shard: &StoredShard) -> bool {
    let opened = volume.open(&shard.path);
    opened.is_ok_and(|(file, _)| is_as_sealed(&*file, &shard.manifest).unwrap_or(false))
}

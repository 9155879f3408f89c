//! Reads checkpoints on disk: manifests first, bytes when they are verified.

use std::io;
use std::path::{Path, PathBuf};

use mainstay_checkpoint_format::{MANIFEST_LIMIT, MANIFEST_NAME, Manifest};

use crate::disk::volume::Volume;
use crate::disk::{shard_directory, step_directory};
use crate::seal;

/// A shard on disk whose manifest is intact and whose file has the length in the manifest.
#[derive(Clone, Debug)]
pub struct Found {
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
pub(super) fn number(name: &str, before: &str, digits: usize) -> Option<u64> {
    let number = name.strip_prefix(before)?;
    let is_ours = number.len() >= digits && number.bytes().all(|digit| digit.is_ascii_digit());
    is_ours.then(|| number.parse().ok()).flatten()
}

/// The path of a shard's manifest.
#[must_use]
pub fn manifest_path(directory: &Path, step: u64, rank: u32) -> PathBuf {
    shard_directory(directory, step, rank).join(MANIFEST_NAME)
}

/// The manifest of a shard, if it is intact and of this step and rank.
pub fn manifest(volume: &dyn Volume, directory: &Path, step: u64, rank: u32) -> Option<(Manifest, Vec<u8>)> {
    let bytes = read(volume, &manifest_path(directory, step, rank), MANIFEST_LIMIT).ok()?;
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
pub fn found(volume: &dyn Volume, directory: &Path, step: u64, rank: u32) -> Option<Found> {
    let (manifest, manifest_bytes) = manifest(volume, directory, step, rank)?;
    let path = shard_directory(directory, step, rank).join(&manifest.file.name);
    let (_, length) = volume.open(&path).ok()?;
    (length == manifest.file.size).then_some(Found { manifest, manifest_bytes, path })
}

/// The shards of a step, if every rank has one and all are of the same job, launch, attempt and world size. Bytes are not read.
pub fn is_whole(volume: &dyn Volume, directory: &Path, step: u64) -> Option<Vec<Found>> {
    let first = found(volume, directory, step, *ranks(volume, directory, step).first()?)?;
    let shards = (0..first.manifest.identity.world_size).map(|rank| {
        let shard = found(volume, directory, step, rank)?;
        let (a, b) = (&shard.manifest.identity, &first.manifest.identity);
        let agree = (&a.job, a.attempt, a.world_size) == (&b.job, b.attempt, b.world_size);
        (agree && is_of_one_launch(&shard.manifest.run, &first.manifest.run)).then_some(shard)
    });
    shards.collect()
}

/// Whether two shards of one job may be of the same launch. Some shards do not name their launch.
pub(super) fn is_of_one_launch(a: &str, b: &str) -> bool {
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

/// Steps that are whole by their manifests, newest first.
pub fn whole_steps(volume: &dyn Volume, directory: &Path) -> Vec<u64> {
    let all = steps(volume, directory);
    all.into_iter().filter(|step| is_whole(volume, directory, *step).is_some()).collect()
}

/// Whether every byte of the shard matches its manifest.
pub fn verify(volume: &dyn Volume, shard: &Found) -> bool {
    let opened = volume.open(&shard.path);
    opened.is_ok_and(|(file, _)| seal::is_as_sealed(&*file, &shard.manifest).unwrap_or(false))
}

/// The newest whole step whose bytes are all verified, with its shards.
pub fn offered(volume: &dyn Volume, directory: &Path) -> Option<(u64, Vec<Found>)> {
    steps(volume, directory).into_iter().find_map(|step| {
        let shards = is_whole(volume, directory, step)?;
        shards.iter().all(|shard| verify(volume, shard)).then_some((step, shards))
    })
}

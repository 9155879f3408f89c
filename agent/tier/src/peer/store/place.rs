//! Moves replicas into their places in the store and removes them. Each operation goes through a [`Volume`], so that a test can
//! cut the power between any two of them.

use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use mainstay_checkpoint::inventory::{Shard, StepKey};
use mainstay_checkpoint_format::{MANIFEST_LIMIT, MANIFEST_NAME};

use super::DATA;
use crate::disk::{FileSink, Sink, Volume, remove_tree};
use crate::peer::withdrawal::WithdrawalLock;
use crate::seal::ReadAt;
use crate::seal::{Sealed, open_plainly};

/// The real disk, with files and directories that no other user may read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Private;

impl Volume for Private {
    fn make_directory(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o700).create(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink + '_>> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Box::new(FileSink(file)))
    }

    fn open(&self, path: &Path) -> io::Result<(Box<dyn ReadAt + '_>, u64)> {
        let file = open_plainly(path)?;
        let length = file.metadata()?.len();
        Ok((Box::new(file), length))
    }
}

/// Path of a shard's directory below `replicas`.
pub fn home(replicas: &Path, shard: &Shard) -> PathBuf {
    let StepKey { step, job, run, attempt, world } = &shard.of;
    let mut hasher = blake3::Hasher::new();
    for words in [job, run] {
        hasher.update(&(words.len() as u64).to_le_bytes()).update(words.as_bytes());
    }
    let of_run = &hasher.update(&world.to_le_bytes()).finalize().to_hex()[..16];
    let piece = shard.piece.as_ref().map_or_else(String::new, |piece| format!(".{}", piece.index));
    let of_step = replicas.join(of_run).join(format!("step-{step:012}.{attempt}"));
    of_step.join(format!("rank-{:05}{piece}", shard.rank))
}

/// Turns the complete bytes in the file `from` into a replica in `home`: first `sync` syncs them to disk, then they are moved into place,
/// then their manifest. `lock`, the name of the lock file, is next to them before they are a replica.
///
/// # Errors
/// An I/O error. A previous replica in `home` may be lost then.
pub fn put(
    volume: &dyn Volume,
    from: &Path,
    home: &Path,
    manifest: &[u8],
    lock: Option<&str>,
    sync: &dyn Fn() -> io::Result<()>,
) -> io::Result<()> {
    sync()?;
    make_all(volume, home)?;
    // Operations that need space come first: on a full disk the previous replica stays intact.
    let aside = home.join(format!(".{MANIFEST_NAME}.tmp"));
    remove_if_there(volume, &aside)?;
    let mut sink = volume.create(&aside)?;
    sink.write(manifest)?;
    sink.sync()?;
    drop(sink);
    if let Some(lock) = lock
        && !volume.list(home)?.iter().any(|name| name == lock)
    {
        drop(volume.create(&home.join(lock))?);
    }
    // A shard of the same rank that was sealed earlier: without its manifest it does not count.
    remove_if_there(volume, &home.join(MANIFEST_NAME))?;
    volume.sync_directory(home)?;
    // No shard needs the other locks any more.
    for (name, ..) in locks(volume, home).filter(|(name, ..)| Some(name.as_str()) != lock) {
        remove_if_there(volume, &home.join(name))?;
    }
    volume.rename(from, &home.join(DATA))?;
    volume.rename(&aside, &home.join(MANIFEST_NAME))?;
    volume.sync_directory(home)
}

/// Removes a replica, its manifest first, so that it exists completely or not at all. Moves its file to `spare`, if given; returns whether.
pub fn take_down(volume: &dyn Volume, home: &Path, spare: Option<&Path>) -> bool {
    let manifest = home.join(MANIFEST_NAME);
    let _ = volume.remove_file(&manifest).and_then(|()| volume.sync_directory(home));
    let moved = spare.is_some_and(|spare| volume.rename(&home.join(DATA), spare).is_ok());
    remove_tree(volume, home);
    // The directories of the step and of the run, if empty.
    for above in home.ancestors().skip(1).take(2) {
        let _ = volume.remove_directory(above);
    }
    moved
}

/// The lock of a replica, if it has one.
pub fn lock_of(volume: &dyn Volume, home: &Path, sealed: &Sealed) -> Option<WithdrawalLock> {
    locks(volume, home).find(|(_, key, _)| *key == sealed.key).map(|(.., lock)| lock)
}

/// All locks next to a replica by file name, each with the key of its shard.
fn locks(volume: &dyn Volume, home: &Path) -> impl Iterator<Item = (String, u64, WithdrawalLock)> {
    let names = volume.list(home).unwrap_or_default().into_iter();
    names.filter_map(|name| WithdrawalLock::of_file_name(&name).map(|(key, lock)| (name, key, lock)))
}

/// All directories of replicas, each with its manifest; none if the manifest is not valid.
pub fn found(volume: &dyn Volume, replicas: &Path) -> Vec<(PathBuf, Option<Sealed>)> {
    let below = |directory: &PathBuf| -> Vec<PathBuf> {
        let names = volume.list(directory).unwrap_or_default();
        names.into_iter().map(|name| directory.join(name)).collect()
    };
    let steps: Vec<PathBuf> = below(&replicas.to_owned()).iter().flat_map(below).collect();
    let homes = steps.iter().flat_map(below);
    homes.map(|home| (home.clone(), manifest_of(volume, &home))).collect()
}

fn manifest_of(volume: &dyn Volume, home: &Path) -> Option<Sealed> {
    let (file, length) = volume.open(&home.join(MANIFEST_NAME)).ok()?;
    let length = usize::try_from(length).ok().filter(|length| *length <= MANIFEST_LIMIT)?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0).ok()?;
    Sealed::of(bytes).ok()
}

/// Whether every byte of a replica matches its manifest. Reads all of it.
pub fn is_whole(volume: &dyn Volume, home: &Path, sealed: &Sealed) -> bool {
    let Ok((file, length)) = volume.open(&home.join(DATA)) else { return false };
    length == sealed.shard.bytes && matches!(sealed.first_bad_from_start(&*file), Ok(None))
}

/// Creates a replica's directory and the two above it, and syncs their names to disk.
fn make_all(volume: &dyn Volume, home: &Path) -> io::Result<()> {
    let above: Vec<&Path> = home.ancestors().skip(1).take(3).collect();
    for directory in above.iter().rev().skip(1).copied().chain([home]) {
        match volume.make_directory(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    above.into_iter().try_for_each(|directory| volume.sync_directory(directory))
}

fn remove_if_there(volume: &dyn Volume, path: &Path) -> io::Result<()> {
    match volume.remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

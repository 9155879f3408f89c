//! The inventory: which shards lie on this host, in which tier, each with its manifest's bytes and a way to its own.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use mainstay_checkpoint::Manifest;

use crate::disk::{self, StdVolume};
use crate::seal;

/// Where a shard lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// In the launcher's memory.
    Memory,
    /// On this host's disk.
    Disk,
    /// A copy kept for another host.
    Replica,
}

/// One copy of a shard: its manifest is intact, its bytes are to be verified by whoever uses them.
#[derive(Clone, Debug)]
pub struct Shard {
    /// What it is.
    pub manifest: Manifest,
    /// The manifest as it lies there: what goes onto the wire.
    pub manifest_bytes: Vec<u8>,
    /// Where it lies.
    pub tier: Tier,
    /// The file that begins with it: one in memory may be longer than the shard.
    pub path: PathBuf,
}

impl Shard {
    /// Opens its file for reading; the shard is the first `manifest.file.size` bytes.
    ///
    /// # Errors
    /// It is gone, another's, or shorter than its manifest says.
    pub fn open(&self) -> io::Result<File> {
        let file = disk::open_own(&self.path)?;
        if file.metadata()?.len() < self.manifest.file.size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(file)
    }

    /// Whether every byte is as it was sealed. Reads all of it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn verify(&self) -> io::Result<bool> {
        seal::is_as_sealed(&self.open()?, &self.manifest)
    }
}

/// What lies in a directory of the disk's layout: a job's checkpoints, or a store of replicas.
#[must_use]
pub fn on_disk(directory: &Path, tier: Tier) -> Vec<Shard> {
    let volume = StdVolume;
    let mut shards = Vec::new();
    for step in disk::steps(&volume, directory) {
        shards.extend(disk::ranks(&volume, directory, step).into_iter().filter_map(|rank| {
            let found = disk::found(&volume, directory, step, rank)?;
            let (manifest, manifest_bytes, path) = (found.manifest, found.manifest_bytes, found.path);
            Some(Shard { manifest, manifest_bytes, tier, path })
        }));
    }
    shards
}

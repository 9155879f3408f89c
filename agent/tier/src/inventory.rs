//! The inventory: the shards on this host, their tiers, their manifests' bytes and how to open them.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use mainstay_checkpoint_format::Manifest;

use crate::disk::{self, StdVolume};
use crate::seal;

/// The tier of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// In the launcher's memory.
    Memory,
    /// On this host's disk.
    Disk,
    /// A replica stored for another host.
    Replica,
}

/// One copy of a shard. Its manifest is intact; its bytes are verified by the code that uses them.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Its manifest.
    pub manifest: Manifest,
    /// The manifest's bytes as they are stored and sent to peers.
    pub manifest_bytes: Vec<u8>,
    /// Its tier.
    pub tier: Tier,
    /// The file that starts with the shard; in memory it may be longer.
    pub path: PathBuf,
}

impl Shard {
    /// Opens its file for reading; the shard is the first `manifest.file.size` bytes.
    ///
    /// # Errors
    /// It is gone, belongs to another user, or is shorter than in its manifest.
    pub fn open(&self) -> io::Result<File> {
        let file = disk::open_own(&self.path)?;
        if file.metadata()?.len() < self.manifest.file.size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(file)
    }

    /// Whether every byte matches the manifest. Reads all of it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn verify(&self) -> io::Result<bool> {
        seal::is_as_sealed(&self.open()?, &self.manifest)
    }
}

/// The shards in a directory with the disk's layout: a job's checkpoints, or a store of replicas.
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

//! A sealed shard as peers see it: its manifest and the bounds of its chunks.

use std::fs::File;
use std::hash::Hasher;
use std::io::{self, Read};
use std::path::Path;

use mainstay_checkpoint::inventory::{Shard, StepKey};
use mainstay_checkpoint::owner;
use mainstay_checkpoint_format::{MANIFEST_LIMIT, Manifest, SharedContent};
use twox_hash::XxHash3_64;

use super::frame::MAX_CHUNK;

use crate::beneath::Beneath;
use crate::seal::{PIECE, ReadAt};

/// A shard by its manifest of format 2. Only such shards are replicated.
#[derive(Clone, Debug)]
pub struct Sealed {
    /// Its identity, as a type of the core.
    pub shard: Shard,
    /// Name of the file next to the manifest.
    pub file: String,
    /// Bytes of each chunk except the last.
    pub chunk_bytes: u32,
    /// Checksum of each chunk.
    pub sums: Vec<u64>,
    /// The first half of the root: its name on the wire.
    pub key: u64,
    /// The manifest, byte for byte.
    pub manifest: Vec<u8>,
    /// Ranks that should have saved the same, if its rank named them.
    pub shared_content: Option<SharedContent>,
}

/// Why peers cannot use a manifest.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum SealedError {
    #[error("{0}")]
    File(#[from] io::Error),
    #[error("{0}")]
    Manifest(#[from] mainstay_checkpoint_format::ManifestError),
    #[error("its manifest has no checksums of chunks (format 1): it can be loaded but not replicated")]
    NoChunks,
    #[error("its chunks of {0} bytes are larger than {MAX_CHUNK}")]
    ChunkSize(u64),
}

impl Sealed {
    /// From the bytes of a manifest.
    pub fn of(manifest: Vec<u8>) -> Result<Sealed, SealedError> {
        let read = Manifest::decode(&manifest)?;
        let (Some(root), Some(chunks)) = (read.root(), read.chunks) else {
            return Err(SealedError::NoChunks);
        };
        let chunk_bytes = u32::try_from(chunks.bytes).ok().filter(|bytes| *bytes <= MAX_CHUNK);
        let identity = read.identity;
        let of = StepKey {
            step: identity.step,
            job: identity.job.into(),
            run: read.run.into(),
            attempt: identity.attempt,
            world: identity.world_size,
        };
        let created = i64::try_from(read.created_unix_s).unwrap_or(i64::MAX);
        Ok(Sealed {
            shard: Shard {
                of,
                rank: identity.rank,
                root: hex(&root),
                bytes: read.file.size,
                created,
                piece: None,
            }
            .understood(),
            file: read.file.name,
            chunk_bytes: chunk_bytes.ok_or(SealedError::ChunkSize(chunks.bytes))?,
            sums: chunks.sums,
            key: u64::from_be_bytes([root[0], root[1], root[2], root[3], root[4], root[5], root[6], root[7]]),
            manifest,
            shared_content: read.shared_content,
        })
    }

    /// The same shard under the run `run` with its owner, as agents store it. The owner is part of the manifest and so of the root, by
    /// which a shard is requested and deleted. A run without an owner changes nothing.
    pub fn owned_as(self, run: &str) -> Result<Sealed, SealedError> {
        let Some(uid) = owner::owner(run) else { return Ok(self) };
        let wanted = owner::owned(uid, &self.shard.of.run);
        self.renamed(wanted)
    }

    /// The same shard as its user sees it, without the owner.
    pub fn as_written(self) -> Result<Sealed, SealedError> {
        let wanted = owner::name(&self.shard.of.run).to_owned();
        self.renamed(wanted)
    }

    fn renamed(self, run: String) -> Result<Sealed, SealedError> {
        if self.shard.of.run == run {
            return Ok(self);
        }
        // The manifest of a piece has its own name, which includes the run.
        let mut manifest = Manifest::decode(&self.manifest)?;
        manifest.run = run;
        Sealed::of(manifest.encode())
    }

    /// From the manifest in a file.
    pub fn read(path: &Path) -> Result<Sealed, SealedError> {
        let mut bytes = Vec::new();
        let limit = MANIFEST_LIMIT as u64 + 1;
        open_plainly(path)?.take(limit).read_to_end(&mut bytes)?;
        Sealed::of(bytes)
    }

    /// Same as [`Sealed::read`], for a file below a directory that a user can change.
    ///
    /// # Errors
    /// As [`Sealed::read`], and a link is on the way.
    pub(crate) fn read_in(at: &Beneath, below: &Path) -> Result<Sealed, SealedError> {
        let mut bytes = Vec::new();
        let limit = MANIFEST_LIMIT as u64 + 1;
        at.read(below)?.take(limit).read_to_end(&mut bytes)?;
        Sealed::of(bytes)
    }

    /// Offset, length and checksum of chunk `index`; none if there is no such chunk.
    pub fn chunk(&self, index: u32) -> Option<(u64, u32, u64)> {
        let sum = *self.sums.get(index as usize)?;
        let offset = u64::from(index) * u64::from(self.chunk_bytes);
        let length = (self.shard.bytes.checked_sub(offset)?).min(u64::from(self.chunk_bytes));
        Some((offset, u32::try_from(length).ok()?, sum))
    }

    /// Number of chunks.
    pub fn chunks(&self) -> u32 {
        // A longer table would exceed the manifest's size limit.
        u32::try_from(self.sums.len()).unwrap_or(u32::MAX)
    }

    /// The first chunk in `file` that does not match the manifest; none if all match.
    pub fn first_bad(&self, file: &File) -> io::Result<Option<u32>> {
        if file.metadata()?.len() != self.shard.bytes {
            return Ok(Some(self.chunks().saturating_sub(1)));
        }
        self.first_bad_from_start(file)
    }

    /// Same as [`Sealed::first_bad`], for a file that starts with the shard and may be longer.
    pub fn first_bad_from_start(&self, file: &dyn ReadAt) -> io::Result<Option<u32>> {
        let mut buffer = vec![0; PIECE];
        for index in 0..self.chunks() {
            if !self.chunk_is_good(file, index, &mut buffer)? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// Whether one chunk in `file` matches the manifest.
    pub fn chunk_is_good(&self, file: &dyn ReadAt, index: u32, buffer: &mut Vec<u8>) -> io::Result<bool> {
        let Some((mut offset, length, sum)) = self.chunk(index) else { return Ok(false) };
        let end = offset + u64::from(length);
        let mut hasher = XxHash3_64::new();
        buffer.resize(PIECE, 0);
        while offset < end {
            let piece = usize::try_from(end - offset).unwrap_or(usize::MAX).min(buffer.len());
            file.read_exact_at(&mut buffer[..piece], offset)?;
            hasher.write(&buffer[..piece]);
            offset += piece as u64;
        }
        Ok(hasher.finish() == sum)
    }
}

/// Opens a regular file for reading; refuses links, pipes and devices.
pub(crate) fn open_plainly(path: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} is not a plain file", path.display()),
        ));
    }
    Ok(file)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

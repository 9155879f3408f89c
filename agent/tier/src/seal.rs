//! Checksums: they turn the bytes of a slot into a shard. Bytes are read with `pread`, so that truncation by another process is an error
//! and no SIGBUS.

use std::fs::File;
use std::hash::Hasher;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use mainstay_checkpoint::inventory::{Shard, StepKey};
use mainstay_checkpoint::owner;
use mainstay_checkpoint_format::container::{self, ContainerError};
use mainstay_checkpoint_format::{
    CHUNK_BYTES, Chunks, Identity, MAX_MANIFEST_BYTES, Manifest, SealedFile, SharedContent, hex,
};
use twox_hash::{XxHash3_64, XxHash3_128};

use crate::beneath::Beneath;
use crate::files::Pack;
use crate::os::SendMapping;
use crate::peer::frame::MAX_CHUNK;

/// Name of a shard's file.
pub const STATE_NAME: &str = "state.safetensors";

/// Read size: small enough to stay in the L2 cache between the two checksums.
pub(crate) const READ_BYTES: usize = 256 << 10;

/// Bytes that can be read at any offset.
pub trait ReadAt: Sync {
    /// Fills `buffer` from `offset` on.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let found = from.checked_add(buffer.len()).and_then(|end| self.get(from..end));
        buffer.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Why the content of a slot is not a shard.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum SealError {
    #[error("reading it: {0}")]
    Io(#[from] io::Error),
    #[error("it is not a checkpoint: {0}")]
    Container(#[from] ContainerError),
    #[error("its manifest identifies it as {found}, not {expected}")]
    Another { expected: String, found: String },
}

/// The checksums of the first `size` bytes: of all bytes, and of each chunk of `chunk` bytes.
pub fn sums(source: &dyn ReadAt, size: u64, chunk: u64) -> io::Result<(u128, Vec<u64>)> {
    sums_beside(source, size, chunk, 0..0).map(|(whole, parts, _)| (whole, parts))
}

/// Same as [`sums`], plus a separate checksum of a part of the bytes.
fn sums_beside(
    source: &dyn ReadAt,
    size: u64,
    chunk: u64,
    beside: Range<u64>,
) -> io::Result<(u128, Vec<u64>, u128)> {
    let chunk = chunk.max(1);
    let (mut whole, mut apart) = (XxHash3_128::new(), XxHash3_128::new());
    let mut parts = Vec::new();
    let mut buffer = vec![0; READ_BYTES];
    let mut at = 0;
    while at < size {
        let end = at.saturating_add(chunk).min(size);
        let mut part = XxHash3_64::new();
        while at < end {
            let length = usize::try_from(end - at).map_or(READ_BYTES, |left| left.min(READ_BYTES));
            let piece = &mut buffer[..length];
            source.read_exact_at(piece, at)?;
            whole.write(piece);
            part.write(piece);
            apart.write(within(piece, at, &beside));
            at += length as u64;
        }
        parts.push(part.finish());
    }
    Ok((whole.finish_128(), parts, apart.finish_128()))
}

/// The part of `bytes`, which start at offset `at`, that is within a range.
fn within<'a>(bytes: &'a [u8], at: u64, range: &Range<u64>) -> &'a [u8] {
    let place = |end: u64| usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX).min(bytes.len());
    bytes.get(place(range.start)..place(range.end)).unwrap_or_default()
}

/// Passes the bytes of a range on in pieces, each with its offset.
pub(crate) fn pass_on<E>(
    source: &dyn ReadAt,
    range: Range<u64>,
    reading: impl Fn(io::Error) -> E,
    mut to: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut buffer = vec![0; 1 << 20];
    let mut offset = range.start;
    while offset < range.end {
        let length = usize::try_from(range.end - offset).unwrap_or(usize::MAX).min(buffer.len());
        let piece = &mut buffer[..length];
        source.read_exact_at(piece, offset).map_err(&reading)?;
        to(offset, piece)?;
        offset += length as u64;
    }
    Ok(())
}

/// Computes the checksums of a container and creates its manifest. The container's header must match `identity`: this detects what a
/// late writer left under another name.
pub fn seal(
    source: &dyn ReadAt,
    size: u64,
    identity: &Identity,
    run: &str,
    now_unix_s: u64,
) -> Result<Manifest, SealError> {
    let header = header(source, size)?;
    let value = |name: &str| header.metadata.get(name).cloned().unwrap_or_default();
    let found = format!(
        "job {:?}, attempt {}, step {}, rank {} of {}",
        value("job"),
        value("attempt"),
        value("step"),
        value("rank"),
        value("world_size")
    );
    let Identity { job, attempt, step, rank, world_size } = identity;
    let expected = format!("job {job:?}, attempt {attempt}, step {step}, rank {rank} of {world_size}");
    if found != expected {
        return Err(SealError::Another { expected, found });
    }
    let software = header
        .metadata
        .iter()
        .filter_map(|(name, version)| Some((name.strip_prefix("software.")?.to_owned(), version.clone())));
    let asked = SharedContent::asked(&header);
    let tensors = asked.as_ref().map_or(0..0, |(_, range)| range.clone());
    let (whole, parts, of_tensors) = sums_beside(source, size, CHUNK_BYTES, tensors)?;
    Ok(Manifest {
        identity: identity.clone(),
        run: run.to_owned(),
        created_unix_s: now_unix_s,
        serialisation: "safetensors".to_owned(),
        software: software.collect(),
        file: SealedFile { name: STATE_NAME.to_owned(), size, xxh3_128: whole },
        chunks: Some(Chunks { bytes: CHUNK_BYTES, sums: parts }),
        shared_content: asked.map(|(group, _)| SharedContent::new(group, &header, of_tensors)),
    })
}

fn header(source: &dyn ReadAt, size: u64) -> Result<container::Header, SealError> {
    let mut first = [0; 8];
    if size < 8 {
        return Err(ContainerError::Short.into());
    }
    source.read_exact_at(&mut first, 0)?;
    let length = container::header_bytes(first)?;
    if length > size {
        return Err(ContainerError::Short.into());
    }
    let mut start = vec![0; usize::try_from(length).map_err(|_| ContainerError::Short)?];
    source.read_exact_at(&mut start, 0)?;
    Ok(container::decode(&start, size)?)
}

/// Whether the bytes match the manifest. Reads all of them.
pub fn is_as_sealed(source: &dyn ReadAt, manifest: &Manifest) -> io::Result<bool> {
    let chunk = manifest.chunks.as_ref().map_or(CHUNK_BYTES, |chunks| chunks.bytes);
    let (whole, parts) = match sums(source, manifest.file.size, chunk) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        sums => sums?,
    };
    let as_listed = manifest.chunks.as_ref().is_none_or(|chunks| chunks.sums == parts);
    Ok(whole == manifest.file.xxh3_128 && as_listed)
}

// Source of a shard's bytes: one file, or several files that are read as one archive.

/// Bytes of a shard.
#[derive(Debug)]
pub enum Bytes {
    /// A file that starts with the shard, and its memory if it is mapped.
    File(File, Option<SendMapping>),
    /// Files of a trainer, read as one archive.
    Pack(Arc<Pack>),
}

impl Bytes {
    /// A file in memory that starts with a shard of `bytes` bytes. It is mapped because it is sent many times.
    ///
    /// # Errors
    /// The file is shorter, or the kernel refuses the mapping.
    pub fn in_memory(file: File, bytes: u64) -> io::Result<Bytes> {
        let memory = SendMapping::new(&file, bytes)?;
        Ok(Bytes::File(file, Some(memory)))
    }
}

impl From<File> for Bytes {
    fn from(file: File) -> Bytes {
        Bytes::File(file, None)
    }
}

impl ReadAt for Bytes {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Bytes::File(file, _) => ReadAt::read_exact_at(file, buffer, offset),
            Bytes::Pack(pack) => pack.content.read_exact_at(buffer, offset),
        }
    }
}

// A sealed shard as peers see it: its manifest and the bounds of its chunks.

/// A shard by its manifest of format 2. Only such shards are replicated.
#[derive(Clone, Debug)]
pub struct SealedShard {
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
pub enum SealedShardError {
    #[error("{0}")]
    File(#[from] io::Error),
    #[error("{0}")]
    Manifest(#[from] mainstay_checkpoint_format::ManifestError),
    #[error("its manifest has no checksums of chunks (format 1): it can be loaded but not replicated")]
    NoChunks,
    #[error("its chunks of {0} bytes are larger than {MAX_CHUNK}")]
    ChunkSize(u64),
}

impl SealedShard {
    /// From the bytes of a manifest.
    pub fn of(manifest: Vec<u8>) -> Result<SealedShard, SealedShardError> {
        let read = Manifest::decode(&manifest)?;
        let (Some(root), Some(chunks)) = (read.root(), read.chunks) else {
            return Err(SealedShardError::NoChunks);
        };
        let chunk_bytes = u32::try_from(chunks.bytes).ok().filter(|bytes| *bytes <= MAX_CHUNK);
        let identity = read.identity;
        let key = StepKey {
            step: identity.step,
            job: identity.job.into(),
            run: read.run.into(),
            attempt: identity.attempt,
            world: identity.world_size,
        };
        let created = i64::try_from(read.created_unix_s).unwrap_or(i64::MAX);
        Ok(SealedShard {
            shard: Shard {
                key,
                rank: identity.rank,
                root: hex(&root),
                bytes: read.file.size,
                created,
                piece: None,
            }
            .understood(),
            file: read.file.name,
            chunk_bytes: chunk_bytes.ok_or(SealedShardError::ChunkSize(chunks.bytes))?,
            sums: chunks.sums,
            key: u64::from_be_bytes([root[0], root[1], root[2], root[3], root[4], root[5], root[6], root[7]]),
            manifest,
            shared_content: read.shared_content,
        })
    }

    /// The same shard under the run `run` with its owner, as agents store it. The owner is part of the manifest and so of the root, by
    /// which a shard is requested and deleted. A run without an owner changes nothing.
    pub fn owned_as(self, run: &str) -> Result<SealedShard, SealedShardError> {
        let Some(uid) = owner::owner(run) else { return Ok(self) };
        let wanted = owner::owned(uid, &self.shard.key.run);
        self.renamed(wanted)
    }

    /// The same shard as its user sees it, without the owner.
    pub fn as_written(self) -> Result<SealedShard, SealedShardError> {
        let wanted = owner::name(&self.shard.key.run).to_owned();
        self.renamed(wanted)
    }

    fn renamed(self, run: String) -> Result<SealedShard, SealedShardError> {
        if self.shard.key.run == run {
            return Ok(self);
        }
        // The manifest of a piece has its own name, which includes the run.
        let mut manifest = Manifest::decode(&self.manifest)?;
        manifest.run = run;
        SealedShard::of(manifest.encode())
    }

    /// From the manifest in a file.
    pub fn read(path: &Path) -> Result<SealedShard, SealedShardError> {
        let mut bytes = Vec::new();
        let limit = MAX_MANIFEST_BYTES as u64 + 1;
        open_plainly(path)?.take(limit).read_to_end(&mut bytes)?;
        SealedShard::of(bytes)
    }

    /// Same as [`SealedShard::read`], for a file below a directory that a user can change.
    ///
    /// # Errors
    /// As [`SealedShard::read`], and a link is on the way.
    pub(crate) fn read_in(at: &Beneath, below: &Path) -> Result<SealedShard, SealedShardError> {
        let mut bytes = Vec::new();
        let limit = MAX_MANIFEST_BYTES as u64 + 1;
        at.read(below)?.take(limit).read_to_end(&mut bytes)?;
        SealedShard::of(bytes)
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

    /// Same as [`SealedShard::first_bad`], for a file that starts with the shard and may be longer.
    pub fn first_bad_from_start(&self, file: &dyn ReadAt) -> io::Result<Option<u32>> {
        let mut buffer = vec![0; READ_BYTES];
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
        buffer.resize(READ_BYTES, 0);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_same_checksum_as_alone_wherever_pieces_end() {
        let bytes: Vec<u8> =
            (0..3 * READ_BYTES as u32 + 77).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for range in
            [0..0, 5..9, 4096..READ_BYTES as u64, 4096..3 * READ_BYTES as u64 + 3, 100..bytes.len() as u64]
        {
            let part = &bytes[range.start as usize..range.end as usize];
            let (_, _, beside) = sums_beside(&bytes, bytes.len() as u64, 1000, range).unwrap();
            assert_eq!(beside, XxHash3_128::oneshot(part));
        }
    }
}

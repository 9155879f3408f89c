//! Checksums: they turn the bytes of a slot into a shard. Bytes are read with `pread`, so that truncation by another process is an error
//! and no SIGBUS.

use std::fs::File;
use std::hash::Hasher;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use mainstay_checkpoint_format::container::{self, ContainerError};
use mainstay_checkpoint_format::{CHUNK_BYTES, Chunks, Identity, Manifest, SealedFile, SharedContent};
use twox_hash::{XxHash3_64, XxHash3_128};

/// Name of a shard's file.
pub const STATE_NAME: &str = "state.safetensors";

/// Read size: small enough to stay in the L2 cache between the two checksums.
pub(crate) const PIECE: usize = 256 << 10;

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
    let mut buffer = vec![0; PIECE];
    let mut at = 0;
    while at < size {
        let end = at.saturating_add(chunk).min(size);
        let mut part = XxHash3_64::new();
        while at < end {
            let length = usize::try_from(end - at).map_or(PIECE, |left| left.min(PIECE));
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
    let reported = |name: &str| header.metadata.get(name).cloned().unwrap_or_default();
    let found = format!(
        "job {:?}, attempt {}, step {}, rank {} of {}",
        reported("job"),
        reported("attempt"),
        reported("step"),
        reported("rank"),
        reported("world_size")
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
        shared_content: asked.map(|(group, _)| SharedContent::of(group, &header, of_tensors)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_same_checksum_as_alone_wherever_pieces_end() {
        let bytes: Vec<u8> =
            (0..3 * PIECE as u32 + 77).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for range in [0..0, 5..9, 4096..PIECE as u64, 4096..3 * PIECE as u64 + 3, 100..bytes.len() as u64] {
            let part = &bytes[range.start as usize..range.end as usize];
            let (_, _, beside) = sums_beside(&bytes, bytes.len() as u64, 1000, range).unwrap();
            assert_eq!(beside, XxHash3_128::oneshot(part));
        }
    }
}

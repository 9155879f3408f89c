//! Creates one piece of a shard, on the host that has the shard.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use mainstay_checkpoint::parity::{Parity, Piece};
use mainstay_checkpoint_format::{Chunks, Identity, Manifest, SealedFile, chunk_sum};

use super::BLOCK_BYTES;
use super::code::Encoder;
use crate::peer::SealedShard;
use crate::peer::error::PeerError;
use crate::seal::{ReadAt, sums};

/// Name of a piece's file in its manifest.
const PIECE_NAME: &str = "piece";

/// Reads a shard in order; returns only bytes that were compared with the seal.
struct Reader<'a> {
    from: &'a dyn ReadAt,
    sealed: &'a SealedShard,
    /// The index of the chunk in `held`.
    chunk: Option<u32>,
    held: Vec<u8>,
}

impl Reader<'_> {
    /// Reads bytes from `offset`; zeros beyond the end of the shard.
    fn read(&mut self, mut offset: u64, mut into: &mut [u8]) -> Result<(), PeerError> {
        while !into.is_empty() && offset < self.sealed.shard.bytes {
            let start = self.have_chunk_of(offset)?;
            let at = usize::try_from(offset - start).unwrap_or(usize::MAX).min(self.held.len());
            let length = (self.held.len() - at).min(into.len());
            if length == 0 {
                return Err(PeerError::Local("a chunk is shorter than its manifest says".to_owned()));
            }
            into[..length].copy_from_slice(&self.held[at..at + length]);
            into = &mut into[length..];
            offset += length as u64;
        }
        into.fill(0);
        Ok(())
    }

    /// Loads the chunk with this byte. Returns the chunk's offset.
    fn have_chunk_of(&mut self, offset: u64) -> Result<u64, PeerError> {
        let index = offset / u64::from(self.sealed.chunk_bytes.max(1));
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        let none = || PeerError::Local(format!("there is no chunk {index}"));
        let (start, length, sum) = self.sealed.chunk(index).ok_or_else(none)?;
        if self.chunk != Some(index) {
            self.chunk = None;
            self.held.resize(length as usize, 0);
            let reading = |error| PeerError::Local(format!("reading a shard: {error}"));
            self.from.read_exact_at(&mut self.held, start).map_err(reading)?;
            if chunk_sum(&self.held) != sum {
                return Err(PeerError::Corrupt { peer: "this host".to_owned(), chunk: index });
            }
            self.chunk = Some(index);
        }
        Ok(start)
    }
}

/// Writes one piece of a shard into an empty file and seals it. The same piece has the same root on every host.
///
/// # Errors
/// The shard cannot be read, differs from its seal ([`PeerError::Corrupt`]), or the file cannot be written.
pub(crate) fn cut(
    sealed: &SealedShard,
    from: &dyn ReadAt,
    way: Parity,
    index: u32,
    into: &File,
) -> Result<SealedShard, PeerError> {
    let lane = way.lane(sealed.shard.bytes);
    let writing = |error: io::Error| PeerError::Local(format!("making a piece: {error}"));
    let lanes = if index < way.data { index..index + 1 } else { 0..way.data };
    let reader = |_| Reader { from, sealed, chunk: None, held: Vec::new() };
    let mut readers: Vec<(u64, Reader<'_>)> =
        lanes.map(|number| (u64::from(number) * lane, reader(number))).collect();
    let mut blocks = vec![vec![0; BLOCK_BYTES]; readers.len()];
    let mut made = vec![0; BLOCK_BYTES];
    let disorder = |error: super::CodeError| PeerError::Local(format!("computing parity: {error}"));
    let mut encoder = Encoder::new(way, BLOCK_BYTES).map_err(disorder)?;
    let mut at = 0;
    while at < lane {
        let length = usize::try_from(lane - at).unwrap_or(BLOCK_BYTES).min(BLOCK_BYTES);
        for ((start, reader), block) in readers.iter_mut().zip(&mut blocks) {
            block.resize(length, 0);
            reader.read(*start + at, block)?;
        }
        made.resize(length, 0);
        match index.checked_sub(way.data) {
            None => made.copy_from_slice(&blocks[0]),
            Some(parity) => encoder.parity(&blocks, parity, &mut made).map_err(disorder)?,
        }
        into.write_all_at(&made, at).map_err(writing)?;
        at += length as u64;
    }
    into.write_all_at(&sealed.manifest, lane).map_err(writing)?;
    let manifest = seal(sealed, way, index, into, lane + sealed.manifest.len() as u64).map_err(writing)?;
    SealedShard::of(manifest.encode())
        .map_err(|error| PeerError::Local(format!("a piece's manifest: {error}")))
}

fn seal(whole: &SealedShard, parity: Parity, index: u32, file: &File, size: u64) -> io::Result<Manifest> {
    let shard = &whole.shard;
    let piece = Piece { root: shard.root.clone(), bytes: shard.bytes, parity, index };
    let chunk = u64::from(whole.chunk_bytes);
    let (xxh3_128, parts) = sums(file, size, chunk)?;
    let key = &shard.key;
    Ok(Manifest {
        identity: Identity {
            job: key.job.to_string(),
            attempt: key.attempt,
            step: key.step,
            rank: shard.rank,
            world_size: key.world,
        },
        run: piece.name(&key.run),
        created_unix_s: u64::try_from(shard.created).unwrap_or(0),
        serialisation: "piece".to_owned(),
        software: BTreeMap::new(),
        file: SealedFile { name: PIECE_NAME.to_owned(), size, xxh3_128 },
        chunks: Some(Chunks { bytes: chunk, sums: parts }),
        shared_content: None,
    })
}

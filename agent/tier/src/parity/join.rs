//! Restores a shard from pieces.

use std::fs::File;
use std::hash::Hasher;
use std::io;

use mainstay_checkpoint::inventory::Shard;
use mainstay_checkpoint::parity::Parity;
use twox_hash::XxHash3_64;

use super::BLOCK_BYTES;
use super::code::restore;
use crate::peer::SealedShard;
use crate::peer::client::Target;
use crate::peer::error::PeerError;
use crate::seal::ReadAt;

/// A piece in a local file.
#[derive(Debug)]
pub(crate) struct LocalPiece {
    /// Its identity, as reported by the holder.
    pub(crate) shard: Shard,
    /// The host that stored it.
    pub(crate) holder: String,
    /// Its bytes, verified with its own manifest.
    pub(crate) file: File,
}

impl LocalPiece {
    /// The number of the piece.
    pub(crate) fn index(&self) -> u32 {
        self.shard.piece.as_ref().map_or(0, |piece| piece.index)
    }
}

/// The manifest of the whole shard, which each piece includes. It must match the shard that the holder reported.
pub(crate) fn whole_of(given: &LocalPiece) -> Result<SealedShard, PeerError> {
    let wrong = |error: String| PeerError::Unreadable { peer: given.holder.clone(), error };
    let Some(piece) = &given.shard.piece else { return Err(wrong("it is not a piece".to_owned())) };
    let lane = piece.parity.lane(piece.bytes);
    let length = given
        .shard
        .bytes
        .checked_sub(lane)
        .filter(|length| *length <= mainstay_checkpoint_format::MAX_MANIFEST_BYTES as u64);
    let length = length.ok_or_else(|| wrong("a piece has another length than its name says".to_owned()))?;
    let mut manifest = vec![0; usize::try_from(length).unwrap_or(0)];
    ReadAt::read_exact_at(&given.file, &mut manifest, lane).map_err(|error| wrong(error.to_string()))?;
    let whole = SealedShard::of(manifest).map_err(|error| wrong(error.to_string()))?;
    let shard = &whole.shard;
    let is_it = shard.piece.is_none()
        && shard.root == piece.root
        && shard.bytes == piece.bytes
        && (&shard.key, shard.rank) == (&given.shard.key, given.shard.rank);
    if is_it { Ok(whole) } else { Err(wrong("a piece has the manifest of another shard".to_owned())) }
}

/// Restores the shard from the needed number of different pieces, and writes it into `target`, which already has its manifest.
/// `room` provides files for computed lanes.
///
/// # Errors
/// Too few pieces, or the result differs from the seal ([`PeerError::Corrupt`]): then one of them is of another shard.
pub(crate) fn join(
    whole: &SealedShard,
    parity: Parity,
    given: &[&LocalPiece],
    target: &dyn Target,
    room: &dyn Fn(u64) -> io::Result<File>,
) -> Result<(), PeerError> {
    let lane = parity.lane(whole.shard.bytes);
    let computed = compute(parity, given, lane, room)?;
    let files: Vec<&File> = (0..parity.data)
        .filter_map(|index| {
            let there = given.iter().find(|piece| piece.index() == index).map(|piece| &piece.file);
            there.or_else(|| computed.iter().find(|(number, _)| *number == index).map(|(_, file)| file))
        })
        .collect();
    let reading = |error: io::Error| PeerError::Local(format!("reading a piece: {error}"));
    let mut buffer = vec![0; BLOCK_BYTES];
    for index in 0..whole.chunks() {
        let Some((mut offset, length, sum)) = whole.chunk(index) else { continue };
        let end = offset + u64::from(length);
        let mut hasher = XxHash3_64::new();
        while offset < end {
            let (number, at) = (offset / lane, offset % lane);
            let file = files.get(usize::try_from(number).unwrap_or(usize::MAX));
            let file = file.ok_or_else(|| PeerError::Local("a piece is missing".to_owned()))?;
            let piece = (end - offset).min(lane - at).min(BLOCK_BYTES as u64);
            let piece = &mut buffer[..usize::try_from(piece).unwrap_or(0)];
            ReadAt::read_exact_at(*file, piece, at).map_err(reading)?;
            hasher.write(piece);
            target.write(offset, piece)?;
            offset += piece.len() as u64;
        }
        if hasher.finish() != sum {
            return Err(PeerError::Corrupt { peer: "what the pieces make".to_owned(), chunk: index });
        }
    }
    Ok(())
}

/// Computes the missing lanes of data, each with its number.
fn compute(
    parity: Parity,
    given: &[&LocalPiece],
    lane: u64,
    room: &dyn Fn(u64) -> io::Result<File>,
) -> Result<Vec<(u32, File)>, PeerError> {
    let is_given = |index: &u32| given.iter().any(|piece| piece.index() == *index);
    let missing: Vec<u32> = (0..parity.data).filter(|index| !is_given(index)).collect();
    let writing = |error: io::Error| PeerError::Local(format!("making room for a piece: {error}"));
    let mut computed = Vec::new();
    for index in &missing {
        computed.push((*index, room(lane).map_err(writing)?));
    }
    let mut blocks = vec![Vec::new(); given.len()];
    let mut at = 0;
    while !missing.is_empty() && at < lane {
        let length = usize::try_from(lane - at).unwrap_or(BLOCK_BYTES).min(BLOCK_BYTES);
        for (piece, block) in given.iter().zip(&mut blocks) {
            block.resize(length, 0);
            ReadAt::read_exact_at(&piece.file, block, at).map_err(writing)?;
        }
        let numbered: Vec<(u32, &[u8])> =
            given.iter().zip(&blocks).map(|(piece, block)| (piece.index(), block.as_slice())).collect();
        let restored = restore(parity, &numbered).map_err(|error| PeerError::Local(error.to_string()))?;
        for (index, block) in restored {
            if let Some((_, file)) = computed.iter().find(|(number, _)| *number == index) {
                std::os::unix::fs::FileExt::write_all_at(file, &block, at).map_err(writing)?;
            }
        }
        at += length as u64;
    }
    Ok(computed)
}

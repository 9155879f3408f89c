//! Chunks that need not come over the wire because the same bytes lie here: what ranks that hold the same parameters have sealed of the
//! step, and what has not changed since an older one.
//!
//! A chunk counts as the same when its length and its checksum in the owner's manifest are those of one in a manifest here. It is
//! compared with the owner's checksum while it is copied, as it is when it comes over the wire: bytes that have changed here since they
//! were sealed are asked of the owner as if nothing were known.

use std::collections::HashMap;
use std::hash::Hasher;
use std::io;
use std::time::{Duration, Instant};

use mainstay_core::checkpoint::inventory::Shard;
use twox_hash::XxHash3_64;

use super::local_shards::Opened;
use super::service::Shared;
use super::store::{Claim, Upload};

use crate::seal::{PIECE, ReadAt};

/// For so long the owner is left to wait while chunks are copied: what is left then comes over the wire.
const LONGEST: Duration = Duration::from_secs(2);

/// Shards in which chunks are looked for: those of the step first, then older ones of the same rank.
const MOST: usize = 16;

/// Fills the chunks of an upload that lie here already, and counts their bytes.
pub(crate) fn fill(shared: &Shared, upload: &Upload) -> u64 {
    let began = Instant::now();
    let alike = alike(shared, &upload.sealed.shard);
    let mut places: HashMap<(u32, u64), (usize, u64)> = HashMap::new();
    for (number, opened) in alike.iter().enumerate() {
        let chunks = (0..opened.sealed.chunks()).filter_map(|index| opened.sealed.chunk(index));
        chunks.for_each(|(offset, length, sum)| {
            places.entry((length, sum)).or_insert((number, offset));
        });
    }
    let (mut bytes, mut buffer) = (0, vec![0; PIECE]);
    for index in upload.missing() {
        let Some((offset, length, sum)) = upload.sealed.chunk(index) else { continue };
        let Some(&(number, from)) = places.get(&(length, sum)) else { continue };
        if began.elapsed() > LONGEST {
            break;
        }
        let Some(claim) = upload.claim(index) else { continue };
        // A claim that is not done is given back: the chunk is missing as before.
        if matches!(copy(&*alike[number].bytes, from, &claim, (offset, length), &mut buffer), Ok(found) if found == sum)
        {
            claim.done();
            bytes += u64::from(length);
        }
    }
    bytes
}

/// The shards here that may have chunks in common with this one.
fn alike(shared: &Shared, of: &Shard) -> Vec<Opened> {
    let own = shared.own.list().into_iter().filter(|(.., good)| *good).map(|(shard, ..)| shard);
    let kept = shared.store.list().into_iter().filter(|(.., verified)| *verified).map(|(shard, ..)| shard);
    let mut shards: Vec<Shard> = own
        .chain(kept)
        .filter(|shard| shard.of == of.of || (shard.of.run_id() == of.of.run_id() && shard.rank == of.rank))
        .collect();
    shards.sort_by_key(|shard| (shard.of != of.of, std::cmp::Reverse(shard.of.step), shard.root.clone()));
    shards.dedup_by(|a, b| a.root == b.root);
    shards
        .iter()
        .filter(|shard| shard.root != of.root)
        .take(MOST)
        .filter_map(|shard| shared.open(&shard.root))
        .collect()
}

/// Copies a chunk, and returns the checksum of what was copied.
fn copy(
    from: &dyn ReadAt,
    mut at: u64,
    claim: &Claim<'_>,
    (mut offset, length): (u64, u32),
    buffer: &mut [u8],
) -> io::Result<u64> {
    let mut hasher = XxHash3_64::new();
    if let Some(mut memory) = claim.memory(offset, length) {
        for piece in memory.bytes().chunks_mut(PIECE) {
            from.read_exact_at(piece, at)?;
            hasher.write(piece);
            at += piece.len() as u64;
        }
        return Ok(hasher.finish());
    }
    let end = offset + u64::from(length);
    while offset < end {
        let piece = usize::try_from(end - offset).unwrap_or(usize::MAX).min(buffer.len());
        let piece = &mut buffer[..piece];
        from.read_exact_at(piece, at)?;
        hasher.write(piece);
        claim.write(offset, piece)?;
        (at, offset) = (at + piece.len() as u64, offset + piece.len() as u64);
    }
    Ok(hasher.finish())
}

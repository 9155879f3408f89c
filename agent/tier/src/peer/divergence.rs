//! Chunks that need not be sent because the same bytes are on this host: shards of the same step of ranks that hold the same
//! parameters, and unchanged parts of an older step.
//!
//! A chunk counts as the same if its length and checksum in the owner's manifest equal those of a chunk in a local manifest. It is
//! compared with the owner's checksum while it is copied, as if it were received over the wire. If the local bytes have changed since they
//! were sealed, the owner sends the chunk.

use std::collections::HashMap;
use std::hash::Hasher;
use std::io;
use std::time::{Duration, Instant};

use mainstay_checkpoint::inventory::Shard;
use twox_hash::XxHash3_64;

use super::local_shards::Opened;
use super::service::Shared;
use super::store::{Claim, Upload};

use crate::seal::{PIECE, ReadAt};

/// Maximum time that the owner waits while chunks are copied. The rest is sent over the wire.
const LONGEST: Duration = Duration::from_secs(2);

/// Maximum number of shards to search for chunks: those of the step first, then older ones of the same rank.
const MOST: usize = 16;

/// Fills the chunks of an upload that are already on this host. Returns the number of bytes.
pub(crate) fn fill(shared: &Shared, upload: &Upload) -> u64 {
    let began = Instant::now();
    let sources = probably_equal(shared, &upload.sealed.shard);
    let mut places: HashMap<(u32, u64), (usize, u64)> = HashMap::new();
    for (number, opened) in sources.iter().enumerate() {
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
        // An unfinished claim is released: the chunk counts as missing again.
        if matches!(copy(&*sources[number].bytes, from, &claim, (offset, length), &mut buffer), Ok(found) if found == sum)
        {
            claim.done();
            bytes += u64::from(length);
        }
    }
    bytes
}

/// Local shards that may have chunks in common with this one.
fn probably_equal(shared: &Shared, of: &Shard) -> Vec<Opened> {
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

/// Copies a chunk and returns the checksum of the copied bytes.
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

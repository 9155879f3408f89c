//! Requests that an agent serves: it stores replicas, returns them and reports what it has.

use std::collections::HashMap;
use std::hash::Hasher;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mainstay_checkpoint::decision::Decision;
use mainstay_checkpoint::inventory::Shard;
use twox_hash::XxHash3_64;

use crate::os::lower_priority;
use crate::peer::REPLICATE_NICE;
use crate::peer::error::{PeerError, Reason, Report};
use crate::peer::frame::{Header, Kind};
use crate::peer::local_shards::OpenShard;
use crate::peer::message::{Decide, Dropped, Get, MissingChunks, Withdrawal};
use crate::peer::service::Shared;
use crate::peer::store::{ChunkClaim, IncomingShard, Offer, StoreError, WithdrawalResult};
use crate::peer::wire::{Frame, Wire};
use crate::peer::withdrawal::WithdrawalLock;
use crate::seal::SealedShard;
use crate::seal::{READ_BYTES, ReadAt};

/// Maximum number of chunks in flight on one connection.
const MAX_CHUNKS_IN_FLIGHT: u32 = 4;

/// Serves one peer until it disconnects. Returns whether the stored shards may have changed: most peers only ask for the inventory.
pub(crate) fn converse(wire: &mut Wire, shared: &Shared) -> Result<bool, PeerError> {
    let mut changed = false;
    while let Some(frame) = wire.receive()? {
        let (header, message) = match frame {
            Frame::Message(header, message) => (header, message),
            chunk @ Frame::Chunk(_) => return Err(wire.unexpected(Some(chunk), Kind::Put)),
        };
        changed |= matches!(header.kind, Kind::Put | Kind::Drop | Kind::Announce);
        match header.kind {
            Kind::Put => put(wire, shared, header, message)?,
            Kind::Get => get(wire, shared, &message)?,
            Kind::List => wire.send_json(Header::of(Kind::Inventory), &shared.inventory())?,
            Kind::Decide => {
                let asked: Decide = wire.parse(&message)?;
                match shared.lead(&asked.run, &asked.asker, &asked.distrusted) {
                    Ok(decision) => wire.send_json(Header::of(Kind::Decided), &decision)?,
                    Err(error) => report(wire, Header::of(Kind::Error), Reason::Other, &error.to_string())?,
                }
            }
            Kind::Announce => {
                let decision: Decision = wire.parse(&message)?;
                let reply = shared.decisions().store(&decision);
                wire.send_json(Header::of(Kind::Announced), &reply)?;
            }
            Kind::Drop => {
                let asked: Withdrawal = wire.parse(&message)?;
                let dropped = drop_for(shared, &asked, wire.is_tls());
                wire.send_json(Header::of(Kind::Dropped), &dropped)?;
            }
            _ => return Err(wire.unexpected(Some(Frame::Message(header, message)), Kind::Put)),
        }
    }
    Ok(changed)
}

/// Deletes replicas for a peer. A peer with only the token may be any host that knows it, and can delete only what it sent itself. A host
/// with a certificate can delete any replica and, on a user's request, what ranks of this host wrote.
fn drop_for(shared: &Shared, asked: &Withdrawal, shows_certificate: bool) -> Dropped {
    if shows_certificate {
        let replicas = asked.roots.iter().filter(|root| shared.store.forget(root)).count();
        let own = if asked.everything { shared.remove_own(&asked.roots) } else { 0 };
        return Dropped { count: replicas + own, refused: 0 };
    }
    let mut dropped = Dropped { count: 0, refused: 0 };
    for (at, root) in asked.roots.iter().enumerate() {
        match shared.store.withdraw(root, asked.secrets.get(at).map(String::as_str)) {
            WithdrawalResult::Deleted => dropped.count += 1,
            WithdrawalResult::Refused => dropped.refused += 1,
            WithdrawalResult::NotHere => {}
        }
    }
    dropped
}

fn report(wire: &mut Wire, header: Header, reason: Reason, text: &str) -> Result<(), PeerError> {
    wire.send_json(Header { kind: Kind::Error, ..header }, &Report { reason, text: text.to_owned() })
}

/// Receives an offered shard. After a refusal the connection continues.
fn put(wire: &mut Wire, shared: &Shared, header: Header, manifest: Vec<u8>) -> Result<(), PeerError> {
    let lock = WithdrawalLock::from_header((header.offset, header.digest));
    let answer = Header { length: 0, offset: 0, digest: 0, ..header };
    let sealed = match SealedShard::of(manifest) {
        Ok(sealed) => sealed,
        Err(error) => return report(wire, answer, Reason::Bad, &error.to_string()),
    };
    let key = &sealed.shard.key;
    if (header.key, header.attempt, header.step) != (sealed.key, key.attempt, key.step) {
        return report(wire, answer, Reason::Bad, "the header speaks of another shard than the manifest");
    }
    shared.compare_offered(&sealed);
    let root = sealed.shard.root.clone();
    match shared.store.offer(sealed, &shared.deletable(), lock) {
        Ok(Offer::Here) => wire.send(Header { kind: Kind::Stored, ..answer }, root.as_bytes()),
        Ok(Offer::Missing(upload)) => {
            // The thread keeps this priority: a replicating peer requests nothing else over the same connection.
            lower_priority(REPLICATE_NICE, false);
            let _busy = shared.throttle.begin_to_receive();
            if upload.search_begins() {
                fill(shared, &upload);
            }
            let missing = MissingChunks { chunks: upload.missing(), credits: MAX_CHUNKS_IN_FLIGHT };
            wire.send_json(Header { kind: Kind::Missing, ..answer }, &missing)?;
            take(wire, shared, answer, &upload)
        }
        Err(error @ (StoreError::Full { .. } | StoreError::Part { .. })) => {
            report(wire, answer, Reason::Full, &error.to_string())
        }
        Err(error) => report(wire, answer, Reason::Disk, &error.to_string()),
    }
}

/// Receives chunks until the shard is committed or the connection ends. Received chunks stay for a while, so that a sender
/// that reconnects can resume.
fn take(
    wire: &mut Wire,
    shared: &Shared,
    answer: Header,
    upload: &Arc<IncomingShard>,
) -> Result<(), PeerError> {
    let mut buffer = Vec::new();
    loop {
        match wire.receive()? {
            Some(Frame::Chunk(header)) => take_chunk(wire, answer, upload, header, &mut buffer)?,
            Some(Frame::Message(header, _)) if header.kind == Kind::Commit => {
                return match shared.store.commit(upload) {
                    Ok(()) => {
                        shared.count(|counts| {
                            counts.shards_taken += 1;
                            counts.bytes_taken += upload.sealed.shard.bytes;
                        });
                        let root = upload.sealed.shard.root.clone();
                        wire.send(Header { kind: Kind::Stored, ..answer }, root.as_bytes())
                    }
                    Err(error) => report(wire, answer, Reason::Disk, &error.to_string()),
                };
            }
            // The end of one of several connections of this shard.
            Some(Frame::Message(header, _)) if header.kind == Kind::End => return Ok(()),
            None => return Ok(()),
            other => return Err(wire.unexpected(other, Kind::Chunk)),
        }
    }
}

fn take_chunk(
    wire: &mut Wire,
    answer: Header,
    upload: &IncomingShard,
    header: Header,
    buffer: &mut Vec<u8>,
) -> Result<(), PeerError> {
    let sealed = &upload.sealed;
    let fits = sealed.chunk(header.chunk) == Some((header.offset, header.length, header.digest));
    if !fits || (header.key, header.attempt) != (sealed.key, sealed.shard.key.attempt) {
        report(wire, answer, Reason::Bad, "a chunk that is none of the manifest's")?;
        return Err(PeerError::Local(format!("{} sent a chunk that is none of the manifest's", wire.peer())));
    }
    let claim = upload.claim(header.chunk);
    let mut hasher = XxHash3_64::new();
    let mut failed = None;
    if let Some(mut memory) = claim.as_ref().and_then(|claim| claim.memory(header.offset, header.length)) {
        wire.read_chunk_into(memory.bytes(), |piece| hasher.write(piece))?;
    } else {
        let mut offset = header.offset;
        wire.read_chunk(header.length, buffer, |piece| {
            hasher.write(piece);
            if let (Some(claim), None) = (&claim, &failed) {
                failed = claim.write(offset, piece).err();
            }
            offset += piece.len() as u64;
            Ok(())
        })?;
    }
    let answer = Header { chunk: header.chunk, ..answer };
    if let Some(error) = failed {
        return report(wire, answer, Reason::Disk, &error.to_string());
    }
    if hasher.finish() != header.digest {
        return report(
            wire,
            answer,
            Reason::Corrupt,
            &format!("chunk {} is not what the manifest says", header.chunk),
        );
    }
    if let Some(claim) = claim {
        claim.done();
    }
    wire.send(Header { kind: Kind::Taken, ..answer }, &[])
}

/// Sends a shard. The requester verifies its bytes.
fn get(wire: &mut Wire, shared: &Shared, message: &[u8]) -> Result<(), PeerError> {
    let asked: Get = wire.parse(message)?;
    let Some(opened) = shared.open(&asked.root) else {
        return report(wire, Header::of(Kind::Error), Reason::NotHere, "that shard is not here");
    };
    let sealed = &opened.sealed;
    let header = Header {
        attempt: sealed.shard.key.attempt,
        step: sealed.shard.key.step,
        key: sealed.key,
        ..Header::of(Kind::Manifest)
    };
    if !opened.fits() {
        return report(wire, header, Reason::Corrupt, "its file is not as long as its manifest says");
    }
    wire.send(header, &sealed.manifest)?;
    for index in asked.from..asked.to.unwrap_or(u32::MAX).min(sealed.chunks()) {
        let Some((offset, length, digest)) = sealed.chunk(index) else { break };
        opened.pin();
        let header = Header { kind: Kind::Chunk, offset, length, digest, chunk: index, ..header };
        wire.send_chunk(header, &opened.bytes, |_, left| left)?;
    }
    wire.send(Header { kind: Kind::End, ..header }, &[])
}

// Chunks that need not be sent because the same bytes are on this host: shards of the same step of ranks that hold the same
// parameters, and unchanged parts of an older step.
//
// A chunk counts as the same if its length and checksum in the owner's manifest equal those of a chunk in a local manifest. It is
// compared with the owner's checksum while it is copied, as if it were received over the wire. If the local bytes have changed since they
// were sealed, the owner sends the chunk.

/// Maximum time that the owner waits while chunks are copied. The rest is sent over the wire.
const MAX_COPY_TIME: Duration = Duration::from_secs(2);

/// Maximum number of shards to search for chunks: those of the step first, then older ones of the same rank.
const MAX_SEARCHED_SHARDS: usize = 16;

/// Fills the chunks of an upload that are already on this host. Returns the number of bytes.
pub(crate) fn fill(shared: &Shared, upload: &IncomingShard) -> u64 {
    let began = Instant::now();
    let sources = probably_equal(shared, &upload.sealed.shard);
    let mut places: HashMap<(u32, u64), (usize, u64)> = HashMap::new();
    for (number, opened) in sources.iter().enumerate() {
        let chunks = (0..opened.sealed.chunks()).filter_map(|index| opened.sealed.chunk(index));
        chunks.for_each(|(offset, length, sum)| {
            places.entry((length, sum)).or_insert((number, offset));
        });
    }
    let (mut bytes, mut buffer) = (0, vec![0; READ_BYTES]);
    for index in upload.missing() {
        let Some((offset, length, sum)) = upload.sealed.chunk(index) else { continue };
        let Some(&(number, from)) = places.get(&(length, sum)) else { continue };
        if began.elapsed() > MAX_COPY_TIME {
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
fn probably_equal(shared: &Shared, wanted: &Shard) -> Vec<OpenShard> {
    let own = shared.own.list().into_iter().filter(|(.., good)| *good).map(|(shard, ..)| shard);
    let kept = shared.store.list().into_iter().filter(|(.., verified)| *verified).map(|(shard, ..)| shard);
    let mut shards: Vec<Shard> = own
        .chain(kept)
        .filter(|shard| {
            shard.key == wanted.key
                || (shard.key.run_id() == wanted.key.run_id() && shard.rank == wanted.rank)
        })
        .collect();
    shards.sort_by_key(|shard| {
        (shard.key != wanted.key, std::cmp::Reverse(shard.key.step), shard.root.clone())
    });
    shards.dedup_by(|a, b| a.root == b.root);
    shards
        .iter()
        .filter(|shard| shard.root != wanted.root)
        .take(MAX_SEARCHED_SHARDS)
        .filter_map(|shard| shared.open(&shard.root))
        .collect()
}

/// Copies a chunk and returns the checksum of the copied bytes.
fn copy(
    from: &dyn ReadAt,
    mut at: u64,
    claim: &ChunkClaim<'_>,
    (mut offset, length): (u64, u32),
    buffer: &mut [u8],
) -> io::Result<u64> {
    let mut hasher = XxHash3_64::new();
    if let Some(mut memory) = claim.memory(offset, length) {
        for piece in memory.bytes().chunks_mut(READ_BYTES) {
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

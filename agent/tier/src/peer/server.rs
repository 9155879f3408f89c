//! Requests that an agent serves: it stores replicas, returns them and reports what it has.

use std::hash::Hasher;
use std::sync::Arc;

use mainstay_checkpoint::decision::Decision;
use serde::de::DeserializeOwned;
use twox_hash::XxHash3_64;

use super::REPLICATE_NICE;
use super::divergence;
use super::error::{PeerError, Reason, Report};
use super::frame::{Header, Kind};
use super::message::{Decide, Dropped, Get, Wanted, Withdrawal};
use super::sealed::Sealed;
use super::service::Shared;
use super::store::{Offer, StoreError, Upload, Withdrawn};
use super::wire::{Frame, Wire};
use super::withdrawal::WithdrawalLock;
use crate::os::lower_priority;

/// Maximum number of chunks in flight on one connection.
const CREDITS: u32 = 4;

/// Serves one peer until it disconnects. Returns whether the stored shards may have changed: most peers only ask for the inventory.
pub(crate) fn converse(wire: &mut Wire, shared: &Shared) -> Result<bool, PeerError> {
    let mut changed = false;
    while let Some(frame) = wire.receive()? {
        let (header, message) = match frame {
            Frame::Message(header, message) => (header, message),
            Frame::Chunk(header) => return Err(unexpected(wire, header, Kind::Put)),
        };
        changed |= matches!(header.kind, Kind::Put | Kind::Drop | Kind::Announce);
        match header.kind {
            Kind::Put => put(wire, shared, header, message)?,
            Kind::Get => get(wire, shared, &message)?,
            Kind::List => wire.send_json(Header::of(Kind::Inventory), &shared.inventory())?,
            Kind::Decide => {
                let asked: Decide = read(wire, &message)?;
                match shared.lead(&asked.run, &asked.asker, &asked.distrusted) {
                    Ok(decision) => wire.send_json(Header::of(Kind::Decided), &decision)?,
                    Err(error) => report(wire, Header::of(Kind::Error), Reason::Other, &error.to_string())?,
                }
            }
            Kind::Announce => {
                let decision: Decision = read(wire, &message)?;
                let word = shared.decisions().report(&decision);
                wire.send_json(Header::of(Kind::Reported), &word)?;
            }
            Kind::Drop => {
                let asked: Withdrawal = read(wire, &message)?;
                let dropped = drop_for(shared, &asked, wire.is_tls());
                wire.send_json(Header::of(Kind::Dropped), &dropped)?;
            }
            _ => return Err(unexpected(wire, header, Kind::Put)),
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
            Withdrawn::Deleted => dropped.count += 1,
            Withdrawn::Refused => dropped.refused += 1,
            Withdrawn::NotHere => {}
        }
    }
    dropped
}

fn unexpected(wire: &Wire, header: Header, wanted: Kind) -> PeerError {
    PeerError::Unexpected { peer: wire.peer().to_owned(), got: header.kind, wanted }
}

fn read<T: DeserializeOwned>(wire: &Wire, message: &[u8]) -> Result<T, PeerError> {
    serde_json::from_slice(message)
        .map_err(|error| PeerError::Unreadable { peer: wire.peer().to_owned(), error: error.to_string() })
}

fn report(wire: &mut Wire, header: Header, reason: Reason, text: &str) -> Result<(), PeerError> {
    wire.send_json(Header { kind: Kind::Error, ..header }, &Report { reason, text: text.to_owned() })
}

/// Receives an offered shard. After a refusal the connection continues.
fn put(wire: &mut Wire, shared: &Shared, header: Header, manifest: Vec<u8>) -> Result<(), PeerError> {
    let lock = WithdrawalLock::from_words((header.offset, header.digest));
    let answer = Header { length: 0, offset: 0, digest: 0, ..header };
    let sealed = match Sealed::of(manifest) {
        Ok(sealed) => sealed,
        Err(error) => return report(wire, answer, Reason::Bad, &error.to_string()),
    };
    let of = &sealed.shard.of;
    if (header.key, header.attempt, header.step) != (sealed.key, of.attempt, of.step) {
        return report(wire, answer, Reason::Bad, "the header speaks of another shard than the manifest");
    }
    shared.compare_offered(&sealed);
    let root = sealed.shard.root.clone();
    match shared.store.offer(sealed, &shared.deletable(), lock) {
        Ok(Offer::Here) => wire.send(Header { kind: Kind::Stored, ..answer }, root.as_bytes()),
        Ok(Offer::Wanted(upload)) => {
            // The thread keeps this priority: a replicating peer requests nothing else over the same connection.
            lower_priority(REPLICATE_NICE, false);
            let _busy = shared.throttle.begin_to_receive();
            if upload.search_begins() {
                divergence::fill(shared, &upload);
            }
            let wanted = Wanted { chunks: upload.missing(), credits: CREDITS };
            wire.send_json(Header { kind: Kind::Wanted, ..answer }, &wanted)?;
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
fn take(wire: &mut Wire, shared: &Shared, answer: Header, upload: &Arc<Upload>) -> Result<(), PeerError> {
    let mut buffer = Vec::new();
    loop {
        match wire.receive()? {
            Some(Frame::Chunk(header)) => take_chunk(wire, answer, upload, header, &mut buffer)?,
            Some(Frame::Message(header, _)) if header.kind == Kind::Commit => {
                return match shared.store.commit(upload) {
                    Ok(()) => {
                        shared.count_taken(upload.sealed.shard.bytes);
                        let root = upload.sealed.shard.root.clone();
                        wire.send(Header { kind: Kind::Stored, ..answer }, root.as_bytes())
                    }
                    Err(error) => report(wire, answer, Reason::Disk, &error.to_string()),
                };
            }
            // The end of one of several connections of this shard.
            Some(Frame::Message(header, _)) if header.kind == Kind::End => return Ok(()),
            Some(Frame::Message(header, _)) => return Err(unexpected(wire, header, Kind::Chunk)),
            None => return Ok(()),
        }
    }
}

fn take_chunk(
    wire: &mut Wire,
    answer: Header,
    upload: &Upload,
    header: Header,
    buffer: &mut Vec<u8>,
) -> Result<(), PeerError> {
    let sealed = &upload.sealed;
    let fits = sealed.chunk(header.chunk) == Some((header.offset, header.length, header.digest));
    if !fits || (header.key, header.attempt) != (sealed.key, sealed.shard.of.attempt) {
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
    let asked: Get = read(wire, message)?;
    let Some(opened) = shared.open(&asked.root) else {
        return report(wire, Header::of(Kind::Error), Reason::NotHere, "that shard is not here");
    };
    let sealed = &opened.sealed;
    let of = Header {
        attempt: sealed.shard.of.attempt,
        step: sealed.shard.of.step,
        key: sealed.key,
        ..Header::of(Kind::Manifest)
    };
    if !opened.fits() {
        return report(wire, of, Reason::Corrupt, "its file is not as long as its manifest says");
    }
    wire.send(of, &sealed.manifest)?;
    for index in asked.from..asked.to.unwrap_or(u32::MAX).min(sealed.chunks()) {
        let Some((offset, length, digest)) = sealed.chunk(index) else { break };
        opened.pin();
        let header = Header { kind: Kind::Chunk, offset, length, digest, chunk: index, ..of };
        wire.send_chunk(header, &opened.bytes, |_, left| left)?;
    }
    wire.send(Header { kind: Kind::End, ..of }, &[])
}

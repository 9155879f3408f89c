//! Requests of an agent to others: store a shard, return one, list what they have.

mod fetch;
mod upload;

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use mainstay_checkpoint::decision::{Decision, Word};

use self::fetch::Fetch;
use self::upload::Upload;
use super::credentials::Credentials;
use super::error::PeerError;
use super::frame::{Header, Kind};
use super::message::{Decide, Dropped, Get, Inventory, Wanted, Withdrawal};
use super::pace::Limit;
use super::sealed::Sealed;
use super::wire::{Frame, Timeouts, Wire};
use super::withdrawal::WithdrawalLock;
use crate::bytes::Bytes;
use crate::os::Lent;

/// A peer below this rate is too slow, bytes per second.
const SLOWEST: u64 = 1 << 20;

/// How to reach other agents.
#[derive(Debug)]
pub struct Asking<'a> {
    /// Credentials of this agent.
    pub pass: &'a Credentials,
    /// Time limits.
    pub patience: Timeouts,
}

/// How a shard is sent.
pub struct Sending<'a> {
    /// Rate limit over all transfers.
    pub limit: &'a Limit,
    /// Connections for one shard, 1 to 4.
    pub streams: usize,
    /// Called before each chunk or part of one, to show that the file is still in use.
    pub going: &'a (dyn Fn() + Sync),
    /// The lock that protects the replica from deletion.
    pub lock: Option<WithdrawalLock>,
}

impl std::fmt::Debug for Sending<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sending")
            .field("limit", self.limit)
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}

/// The result of sending a shard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sent {
    /// Bytes sent; 0 if the peer already had the shard.
    pub bytes: u64,
    /// The time it took.
    pub took: Duration,
}

impl Asking<'_> {
    fn connect(&self, address: &str) -> Result<Wire, PeerError> {
        Wire::connect(address, self.pass, self.patience)
    }

    /// Asks `address` for its inventory.
    ///
    /// # Errors
    /// The connection fails, or the answer is not valid.
    pub fn list(&self, address: &str) -> Result<Inventory, PeerError> {
        let mut wire = self.connect(address)?;
        wire.send(Header::of(Kind::List), &[])?;
        wire.expect_json(Kind::Inventory)
    }

    /// Asks the leader `address` to which step `run` goes back. The leader asks other agents, those that are silent twice, so
    /// more time is allowed.
    ///
    /// # Errors
    /// The connection fails, or the answer is not valid.
    pub fn decide(
        &self,
        address: &str,
        run: &str,
        asker: &str,
        distrusted: Vec<(String, String)>,
    ) -> Result<Decision, PeerError> {
        let patience =
            Timeouts { stall: (self.patience.stall + self.patience.connect * 4) * 2, ..self.patience };
        let mut wire = Wire::connect(address, self.pass, patience)?;
        let asked = Decide { run: run.to_owned(), asker: asker.to_owned(), distrusted };
        wire.send_json(Header::of(Kind::Decide), &asked)?;
        wire.expect_json(Kind::Decided)
    }

    /// Sends a decision to `address`.
    ///
    /// # Errors
    /// The connection fails, or the answer is not valid.
    pub fn report(&self, address: &str, decision: &Decision) -> Result<Word, PeerError> {
        let mut wire = self.connect(address)?;
        wire.send_json(Header::of(Kind::Announce), decision)?;
        wire.expect_json(Kind::Reported)
    }

    /// Withdraws replicas at `address`. With `everything`, it also deletes what its own ranks have written of these shards. Returns how
    /// many there were, and how many it keeps for other hosts.
    ///
    /// # Errors
    /// The connection fails, or the answer is not valid.
    pub(crate) fn forget(&self, address: &str, what: &Withdrawal) -> Result<Dropped, PeerError> {
        let mut wire = self.connect(address)?;
        wire.send_json(Header::of(Kind::Drop), what)?;
        wire.expect_json(Kind::Dropped)
    }

    /// Sends a shard to `address` for storage.
    ///
    /// # Errors
    /// It refuses, or the bytes in `from` no longer match the manifest ([`PeerError::Corrupt`]).
    pub fn put(
        &self,
        address: &str,
        sealed: &Sealed,
        from: &Bytes,
        how: &Sending<'_>,
    ) -> Result<Sent, PeerError> {
        let began = Instant::now();
        let Some((mut first, wanted)) = self.offer(address, sealed, how.lock)? else {
            return Ok(Sent { bytes: 0, took: began.elapsed() });
        };
        let chunks: Vec<u32> =
            wanted.chunks.into_iter().filter(|index| sealed.chunk(*index).is_some()).collect();
        let bytes = chunks
            .iter()
            .filter_map(|index| sealed.chunk(*index))
            .map(|(_, length, _)| u64::from(length))
            .sum();
        let streams = how.streams.clamp(1, 4).min(chunks.len().max(1));
        let upload = Upload {
            sealed,
            bytes: from,
            how,
            began,
            credits: wanted.credits.max(1),
            stall: self.patience.stall,
            sending: AtomicUsize::new(streams),
            left: Mutex::new(chunks.into()),
        };
        let sent = std::thread::scope(|scope| {
            let others: Vec<_> = (1..streams).map(|_| scope.spawn(|| self.help(address, &upload))).collect();
            let own = upload.send(&mut first);
            others.into_iter().fold(own, |all, other| {
                all.and(
                    other
                        .join()
                        .unwrap_or_else(|_| Err(PeerError::Local("a sending thread crashed".to_owned()))),
                )
            })
        });
        sent?;
        first.send(header_of(sealed, Kind::Commit), &[])?;
        let (_, root) = first.expect(Kind::Stored)?;
        check_root(&first, sealed, &root)?;
        Ok(Sent { bytes, took: began.elapsed() })
    }

    /// Offers a shard; none if the peer already has it.
    fn offer(
        &self,
        address: &str,
        sealed: &Sealed,
        lock: Option<WithdrawalLock>,
    ) -> Result<Option<(Wire, Wanted)>, PeerError> {
        let mut wire = self.connect(address)?;
        let (offset, digest) = lock.map_or((0, 0), |lock| lock.words());
        wire.send(Header { offset, digest, ..header_of(sealed, Kind::Put) }, &sealed.manifest)?;
        match wire.receive()? {
            Some(Frame::Message(header, message)) if header.kind == Kind::Stored => {
                check_root(&wire, sealed, &message)?;
                Ok(None)
            }
            Some(Frame::Message(header, message)) if header.kind == Kind::Wanted => {
                let wanted = serde_json::from_slice(&message).map_err(|error| PeerError::Unreadable {
                    peer: address.to_owned(),
                    error: error.to_string(),
                })?;
                Ok(Some((wire, wanted)))
            }
            Some(Frame::Message(header, message)) if header.kind == Kind::Error => {
                Err(PeerError::reported(address, &message))
            }
            Some(Frame::Message(header, _) | Frame::Chunk(header)) => Err(PeerError::Unexpected {
                peer: address.to_owned(),
                got: header.kind,
                wanted: Kind::Wanted,
            }),
            None => Err(PeerError::lost(address, std::io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// Runs one more connection for a shard that is being sent.
    fn help(&self, address: &str, upload: &Upload<'_>) -> Result<(), PeerError> {
        let Some((mut wire, _)) = self.offer(address, upload.sealed, upload.how.lock)? else { return Ok(()) };
        upload.send(&mut wire)?;
        wire.send(header_of(upload.sealed, Kind::End), &[])
    }

    /// Fetches a shard over `streams` parallel connections, 1 to 4. `begin` gets its manifest first, then `write` gets each part with its
    /// offset, from all connections.
    ///
    /// # Errors
    /// The peer does not have it, or sends something else.
    pub fn get(
        &self,
        address: &str,
        root: &str,
        target: &mut dyn Target,
        streams: usize,
    ) -> Result<u64, PeerError> {
        let unreadable = |error: String| PeerError::Unreadable { peer: address.to_owned(), error };
        let mut first = self.connect(address)?;
        // Only the manifest: it shows what to divide between the connections.
        first.send_json(Header::of(Kind::Get), &Get { root: root.to_owned(), from: 0, to: Some(0) })?;
        let (_, manifest) = first.expect(Kind::Manifest)?;
        first.expect(Kind::End)?;
        let sealed = Sealed::of(manifest).map_err(|error| unreadable(error.to_string()))?;
        if sealed.shard.root != root {
            return Err(unreadable("it sent another shard than was asked for".to_owned()));
        }
        target.begin(&sealed)?;
        let streams = streams.clamp(1, 4).min(sealed.chunks().max(1) as usize);
        let fetch = Fetch::new(&sealed, &*target, streams, self.patience.stall);
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..streams)
                .map(|_| scope.spawn(|| self.connect(address).and_then(|mut wire| fetch.run(&mut wire))))
                .collect();
            let own = fetch.run(&mut first);
            others.into_iter().fold(own, |all, other| {
                let other = other
                    .join()
                    .unwrap_or_else(|_| Err(PeerError::Local("a receiving thread crashed".to_owned())));
                Ok(all? + other?)
            })
        })
    }
}

/// The destination of a fetched shard.
pub trait Target: Sync {
    /// Called when the manifest is valid, before the first byte.
    ///
    /// # Errors
    /// There is no room for it.
    fn begin(&mut self, sealed: &Sealed) -> Result<(), PeerError>;

    /// Writes a part of the bytes; called from several threads. The bytes are verified only when all have arrived.
    ///
    /// # Errors
    /// They cannot be written.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerError>;

    /// The memory for a part of the bytes, if it is mapped; otherwise they are written.
    fn memory(&self, _offset: u64, _length: u32) -> Option<Lent<'_>> {
        None
    }
}

fn header_of(sealed: &Sealed, kind: Kind) -> Header {
    let of = &sealed.shard.of;
    Header { attempt: of.attempt, step: of.step, key: sealed.key, ..Header::of(kind) }
}

fn check_root(wire: &Wire, sealed: &Sealed, root: &[u8]) -> Result<(), PeerError> {
    if root == sealed.shard.root.as_bytes() {
        return Ok(());
    }
    let error = "it stored something else than was sent".to_owned();
    Err(PeerError::Unreadable { peer: wire.peer().to_owned(), error })
}

/// Fails for a peer that accepts too little for too long, even if it never stalls.
fn check_speed(peer: &str, began: Instant, bytes: u64, grace: Duration, floor: u64) -> Result<(), PeerError> {
    let passed = began.elapsed();
    if passed > grace + Duration::from_secs(bytes / floor.max(1)) {
        return Err(PeerError::Slow { peer: peer.to_owned(), bytes, seconds: passed.as_secs() });
    }
    Ok(())
}

//! What an agent asks of others: to keep a shard, to give one back, to tell what they have.

mod fetch;
mod upload;

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use mainstay_core::checkpoint::decision::{Decision, Word};

use self::fetch::Fetch;
use self::upload::Upload;
use super::error::PeerError;
use super::frame::{Header, Kind};
use super::message::{Decide, Dropped, Get, Inventory, Wanted, Withdrawal};
use super::pace::Limit;
use super::pass::Pass;
use super::sealed::Sealed;
use super::wire::{Frame, Patience, Wire};
use super::withdrawal::WithdrawalLock;
use crate::bytes::Bytes;
use crate::os::Lent;

/// Below this a peer counts as too slow, bytes a second.
const SLOWEST: u64 = 1 << 20;

/// How to reach others.
#[derive(Debug)]
pub struct Asking<'a> {
    /// What shows that this agent may.
    pub pass: &'a Pass,
    /// How long is waited.
    pub patience: Patience,
}

/// How a shard is sent.
pub struct Sending<'a> {
    /// What all sending together may not exceed.
    pub limit: &'a Limit,
    /// Connections for one shard, 1 to 4.
    pub streams: usize,
    /// Is called before each chunk, or piece of one: the file is still needed.
    pub going: &'a (dyn Fn() + Sync),
    /// Who may have it deleted there.
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

/// A shard was sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sent {
    /// Bytes that went; 0 if it was there already.
    pub bytes: u64,
    /// The time it took.
    pub took: Duration,
}

impl Asking<'_> {
    fn connect(&self, address: &str) -> Result<Wire, PeerError> {
        Wire::connect(address, self.pass, self.patience)
    }

    /// What does `address` have?
    ///
    /// # Errors
    /// It does not answer as it should.
    pub fn list(&self, address: &str) -> Result<Inventory, PeerError> {
        let mut wire = self.connect(address)?;
        wire.send(Header::of(Kind::List), &[])?;
        wire.expect_json(Kind::Inventory)
    }

    /// Asks `address`, who leads, to which step `run` goes back. It asks others in turn, so more time is allowed.
    ///
    /// # Errors
    /// It does not answer as it should.
    pub fn decide(
        &self,
        address: &str,
        run: &str,
        asker: &str,
        distrusted: Vec<(String, String)>,
    ) -> Result<Decision, PeerError> {
        let patience = Patience { stall: self.patience.stall + self.patience.connect * 4, ..self.patience };
        let mut wire = Wire::connect(address, self.pass, patience)?;
        let asked = Decide { run: run.to_owned(), asker: asker.to_owned(), distrusted };
        wire.send_json(Header::of(Kind::Decide), &asked)?;
        wire.expect_json(Kind::Decided)
    }

    /// Tells `address` a decision.
    ///
    /// # Errors
    /// It does not answer as it should.
    pub fn report(&self, address: &str, decision: &Decision) -> Result<Word, PeerError> {
        let mut wire = self.connect(address)?;
        wire.send_json(Header::of(Kind::Announce), decision)?;
        wire.expect_json(Kind::Reported)
    }

    /// Tells `address` that it need not keep replicas any more. With `everything` it deletes what its own ranks have written of these
    /// shards too. How many there were, and how many it keeps for other hosts.
    ///
    /// # Errors
    /// It does not answer as it should.
    pub(crate) fn forget(&self, address: &str, what: &Withdrawal) -> Result<Dropped, PeerError> {
        let mut wire = self.connect(address)?;
        wire.send_json(Header::of(Kind::Drop), what)?;
        wire.expect_json(Kind::Dropped)
    }

    /// Gives `address` a shard to keep.
    ///
    /// # Errors
    /// It does not take it, or the bytes in `from` are not those of the manifest any more ([`PeerError::Corrupt`]).
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
                all.and(other.join().unwrap_or_else(|_| {
                    Err(PeerError::Local("a sending thread ended in disorder".to_owned()))
                }))
            })
        });
        sent?;
        first.send(header_of(sealed, Kind::Commit), &[])?;
        let (_, root) = first.expect(Kind::Stored)?;
        check_root(&first, sealed, &root)?;
        Ok(Sent { bytes, took: began.elapsed() })
    }

    /// Offers a shard: none if it lies there already.
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

    /// One more connection for a shard that is being sent.
    fn help(&self, address: &str, upload: &Upload<'_>) -> Result<(), PeerError> {
        let Some((mut wire, _)) = self.offer(address, upload.sealed, upload.how.lock)? else { return Ok(()) };
        upload.send(&mut wire)?;
        wire.send(header_of(upload.sealed, Kind::End), &[])
    }

    /// Gets a shard back over so many connections at once, 1 to 4: `begin` gets its manifest first, then `write` each piece with its
    /// place, from all connections.
    ///
    /// # Errors
    /// It is not there, or what comes is not what was asked for.
    pub fn get(
        &self,
        address: &str,
        root: &str,
        target: &mut dyn Target,
        streams: usize,
    ) -> Result<u64, PeerError> {
        let unreadable = |error: String| PeerError::Unreadable { peer: address.to_owned(), error };
        let mut first = self.connect(address)?;
        // Nothing but the manifest: it tells what there is to be shared out.
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
                let other = other.join().unwrap_or_else(|_| {
                    Err(PeerError::Local("a receiving thread ended in disorder".to_owned()))
                });
                Ok(all? + other?)
            })
        })
    }
}

/// Where a shard goes that is got back.
pub trait Target: Sync {
    /// Its manifest is good, and its bytes come now.
    ///
    /// # Errors
    /// There is no room for it.
    fn begin(&mut self, sealed: &Sealed) -> Result<(), PeerError>;

    /// Some of its bytes, from several threads at once. They are known to be right only when all have come.
    ///
    /// # Errors
    /// They cannot be written.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerError>;

    /// The memory in which some of them are to lie, where it is mapped; else they are written.
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

/// A peer that takes next to nothing for long is given up, though it never stalls.
fn check_speed(peer: &str, began: Instant, bytes: u64, grace: Duration, floor: u64) -> Result<(), PeerError> {
    let passed = began.elapsed();
    if passed > grace + Duration::from_secs(bytes / floor.max(1)) {
        return Err(PeerError::Slow { peer: peer.to_owned(), bytes, seconds: passed.as_secs() });
    }
    Ok(())
}

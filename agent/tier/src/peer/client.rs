//! What an agent asks of others: to keep a shard, to give one back, to tell what they have.

use std::collections::VecDeque;
use std::hash::Hasher;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use mainstay_core::checkpoint::backoff::Backoff;
use mainstay_core::checkpoint::decision::{Decision, Word};
use twox_hash::XxHash3_64;

use super::error::{PeerError, Reason};
use super::frame::{Header, Kind};
use super::message::{Decide, Dropped, Get, Inventory, Wanted, Withdrawal};
use super::pace::{Limit, pace};
use super::pass::Pass;
use super::sealed::Sealed;
use super::wire::{Frame, Patience, Wire};
use super::withdrawal::WithdrawalLock;
use crate::bytes::Bytes;
use crate::os::{Lent, monotonic_ms, signs};

/// A chunk that came wrong is sent once more, and then once more; a third time is no accident.
const TRIES: u32 = 3;

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
    pub fn tell(&self, address: &str, decision: &Decision) -> Result<Word, PeerError> {
        let mut wire = self.connect(address)?;
        wire.send_json(Header::of(Kind::Tell), decision)?;
        wire.expect_json(Kind::Told)
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
        let job = Job {
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
            let others: Vec<_> = (1..streams).map(|_| scope.spawn(|| self.help(address, &job))).collect();
            let own = job.send(&mut first);
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
    fn help(&self, address: &str, job: &Job<'_>) -> Result<(), PeerError> {
        let Some((mut wire, _)) = self.offer(address, job.sealed, job.how.lock)? else { return Ok(()) };
        job.send(&mut wire)?;
        wire.send(header_of(job.sealed, Kind::End), &[])
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
        let share = sealed.chunks().div_ceil(4 * streams as u32).clamp(1, MOST_CHUNKS);
        let fetch = Fetch { sealed: &sealed, target: &*target, share, next: AtomicU32::new(0), asking: self };
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

/// Chunks that are asked for at once at most.
const MOST_CHUNKS: u32 = 64;

/// A shard that is being got back over some connections.
struct Fetch<'a> {
    sealed: &'a Sealed,
    target: &'a dyn Target,
    /// Chunks that a connection asks for at a time.
    share: u32,
    next: AtomicU32,
    asking: &'a Asking<'a>,
}

impl Fetch<'_> {
    /// Gets shares while there are any; its bytes.
    fn run(&self, wire: &mut Wire) -> Result<u64, PeerError> {
        let (began, mut bytes) = (Instant::now(), 0);
        let mut buffer = Vec::new();
        loop {
            let from = self.next.fetch_add(self.share, Ordering::Relaxed);
            let to = from.saturating_add(self.share).min(self.sealed.chunks());
            if from >= to {
                return Ok(bytes);
            }
            let done = self.get(wire, from..to, &mut buffer, (began, bytes));
            if done.is_err() {
                // One share less is no shard: the others need not come.
                self.next.store(self.sealed.chunks(), Ordering::Relaxed);
            }
            bytes += done?;
        }
    }

    fn get(
        &self,
        wire: &mut Wire,
        chunks: std::ops::Range<u32>,
        buffer: &mut Vec<u8>,
        (began, before): (Instant, u64),
    ) -> Result<u64, PeerError> {
        let peer = wire.peer().to_owned();
        let unreadable = |error: String| PeerError::Unreadable { peer: peer.clone(), error };
        let root = self.sealed.shard.root.clone();
        wire.send_json(Header::of(Kind::Get), &Get { root, from: chunks.start, to: Some(chunks.end) })?;
        if wire.expect(Kind::Manifest)?.1 != self.sealed.manifest {
            return Err(unreadable("it sent another manifest than before".to_owned()));
        }
        let mut bytes = 0;
        for index in chunks {
            let Some(Frame::Chunk(header)) = wire.receive()? else {
                return Err(unreadable(format!("chunk {index} did not come")));
            };
            let due = self.sealed.chunk(index);
            if header.chunk != index
                || due.map(|(offset, length, _)| (offset, length)) != Some((header.offset, header.length))
            {
                return Err(unreadable(format!("another chunk came where {index} was due")));
            }
            let mut hasher = XxHash3_64::new();
            if let Some(mut memory) = self.target.memory(header.offset, header.length) {
                wire.read_chunk_into(memory.bytes(), |piece| hasher.write(piece))?;
            } else {
                let mut offset = header.offset;
                wire.read_chunk(header.length, buffer, |piece| {
                    hasher.write(piece);
                    self.target.write(offset, piece)?;
                    offset += piece.len() as u64;
                    Ok(())
                })?;
            }
            if due.map(|(_, _, sum)| sum) != Some(hasher.finish()) {
                return Err(PeerError::Corrupt { peer, chunk: index });
            }
            bytes += u64::from(header.length);
            check_speed(&peer, began, before + bytes, self.asking.patience.stall, SLOWEST)?;
        }
        wire.expect(Kind::End)?;
        Ok(bytes)
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

/// A shard that is being sent over some connections.
struct Job<'a> {
    sealed: &'a Sealed,
    bytes: &'a Bytes,
    how: &'a Sending<'a>,
    began: Instant,
    credits: u32,
    /// How long the peer waits for the next bytes.
    stall: Duration,
    /// Connections that have not come to their end.
    sending: AtomicUsize,
    left: Mutex<VecDeque<u32>>,
}

impl Job<'_> {
    fn next(&self) -> Option<u32> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Sends chunks while there are any, as many at once as the peer gives credit for.
    fn send(&self, wire: &mut Wire) -> Result<(), PeerError> {
        let peer = wire.peer().to_owned();
        let mut way = self.how.limit.way(&peer);
        let sent = self.send_by(wire, &mut way);
        self.how.limit.keep_way(&peer, way);
        self.sending.fetch_sub(1, Ordering::Relaxed);
        sent
    }

    /// Has the kernel spread what one connection sends; a little faster than its part of the limit, or what waits in the socket would grow
    /// until the other side has heard nothing for too long.
    fn spread(&self, stream: &TcpStream) {
        let rate = self.how.limit.rate();
        pace(stream, rate.saturating_add(rate / 4) / self.sending.load(Ordering::Relaxed).max(1) as u64);
    }

    fn send_by(&self, wire: &mut Wire, way: &mut Backoff) -> Result<(), PeerError> {
        let mut on_the_way = 0;
        let mut bytes = 0;
        let mut failures = 0;
        loop {
            match self.next() {
                Some(index) => {
                    bytes += self.send_chunk(wire, way, index)?;
                    if let Some(signs) = signs(wire.stream()) {
                        way.saw(monotonic_ms(), signs);
                    }
                    on_the_way += 1;
                }
                None if on_the_way == 0 => return Ok(()),
                None => {}
            }
            if on_the_way >= self.credits || (on_the_way > 0 && self.is_empty()) {
                on_the_way -= 1;
                if let Some(wrong) = answer(wire)? {
                    failures += 1;
                    self.again(wire, wrong, failures)?;
                }
            }
            let floor = if self.how.limit.rate() == 0 {
                SLOWEST
            } else {
                // A full link may have it at a sixteenth of the limit.
                SLOWEST.min(self.how.limit.rate() / 256).max(1)
            };
            check_speed(wire.peer(), self.began, bytes, Duration::from_secs(30), floor)?;
        }
    }

    fn is_empty(&self) -> bool {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    fn send_chunk(&self, wire: &mut Wire, way: &Backoff, index: u32) -> Result<u64, PeerError> {
        let Some((offset, length, digest)) = self.sealed.chunk(index) else { return Ok(0) };
        let header = Header { offset, length, digest, chunk: index, ..header_of(self.sealed, Kind::Chunk) };
        wire.send_chunk(header, self.bytes, |stream, left| {
            (self.how.going)();
            self.spread(stream);
            let piece = self.how.limit.piece(way, self.stall, left);
            let wait = self.how.limit.take_by(way, piece, Instant::now());
            if !wait.is_zero() {
                std::thread::sleep(wait);
            }
            piece
        })?;
        Ok(u64::from(length))
    }

    /// A chunk arrived wrong: if it is right here, it is sent again.
    fn again(&self, wire: &Wire, chunk: u32, failures: u32) -> Result<(), PeerError> {
        let good = self
            .sealed
            .chunk_is_good(self.bytes, chunk, &mut Vec::new())
            .map_err(|error| PeerError::Local(format!("reading a shard: {error}")))?;
        if !good {
            return Err(PeerError::Corrupt { peer: "this host".to_owned(), chunk });
        }
        if failures >= TRIES {
            return Err(PeerError::Corrupt { peer: wire.peer().to_owned(), chunk });
        }
        self.left.lock().unwrap_or_else(PoisonError::into_inner).push_back(chunk);
        Ok(())
    }
}

/// What the peer says of a chunk: none if it was taken, its number if it arrived wrong.
fn answer(wire: &mut Wire) -> Result<Option<u32>, PeerError> {
    match wire.receive()? {
        Some(Frame::Message(header, _)) if header.kind == Kind::Taken => Ok(None),
        Some(Frame::Message(header, message)) if header.kind == Kind::Error => {
            match PeerError::reported(wire.peer(), &message) {
                PeerError::Reported { reason: Reason::Corrupt, .. } => Ok(Some(header.chunk)),
                other => Err(other),
            }
        }
        Some(Frame::Message(header, _) | Frame::Chunk(header)) => {
            Err(PeerError::Unexpected { peer: wire.peer().to_owned(), got: header.kind, wanted: Kind::Taken })
        }
        None => Err(PeerError::lost(wire.peer(), std::io::ErrorKind::UnexpectedEof.into())),
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

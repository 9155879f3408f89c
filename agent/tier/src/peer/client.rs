//! Requests of an agent to others: store a shard, return one, list what they have.

use std::collections::VecDeque;
use std::hash::Hasher;
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mainstay_checkpoint::backoff::Backoff;
use mainstay_checkpoint::decision::{Decision, DecisionReply};
use twox_hash::XxHash3_64;

use crate::lock;
use crate::os::{MappedRange, monotonic_ms, signs};
use crate::peer::credentials::Credentials;
use crate::peer::error::{PeerError, Reason};
use crate::peer::frame::{Header, Kind};
use crate::peer::message::{Decide, Dropped, Get, Inventory, MissingChunks, Withdrawal};
use crate::peer::pace::{Limit, pace};
use crate::peer::wire::{Frame, Timeouts, Wire};
use crate::peer::withdrawal::WithdrawalLock;
use crate::seal::Bytes;
use crate::seal::SealedShard;

/// A peer below this rate is too slow, bytes per second.
const MIN_BYTES_PER_S: u64 = 1 << 20;

/// How to reach other agents.
#[derive(Debug)]
pub struct PeerClient<'a> {
    /// Credentials of this agent.
    pub pass: &'a Credentials,
    /// Time limits.
    pub patience: Timeouts,
}

/// How a shard is sent.
pub struct SendOptions<'a> {
    /// Rate limit over all transfers.
    pub limit: &'a Limit,
    /// Connections for one shard, 1 to 4.
    pub streams: usize,
    /// Called before each chunk or part of one, to show that the file is still in use.
    pub going: &'a (dyn Fn() + Sync),
    /// The lock that protects the replica from deletion.
    pub lock: Option<WithdrawalLock>,
}

impl std::fmt::Debug for SendOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sending")
            .field("limit", self.limit)
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}

/// The result of sending a shard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SendResult {
    /// Bytes sent; 0 if the peer already had the shard.
    pub bytes: u64,
    /// The time it took.
    pub took: Duration,
}

impl PeerClient<'_> {
    fn connect(&self, address: &str) -> Result<Wire, PeerError> {
        Wire::connect(address, self.pass, self.patience)
    }

    /// Asks `address` for its inventory.
    pub fn list(&self, address: &str) -> Result<Inventory, PeerError> {
        let mut wire = self.connect(address)?;
        wire.send(Header::of(Kind::List), &[])?;
        wire.expect_json(Kind::Inventory)
    }

    /// Asks the leader `address` to which step `run` goes back. The leader asks other agents, those that are silent twice, so
    /// more time is allowed.
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
    pub fn announce(&self, address: &str, decision: &Decision) -> Result<DecisionReply, PeerError> {
        let mut wire = self.connect(address)?;
        wire.send_json(Header::of(Kind::Announce), decision)?;
        wire.expect_json(Kind::Announced)
    }

    /// Withdraws replicas at `address`. With `everything`, it also deletes what its own ranks have written of these shards. Returns how
    /// many there were, and how many it keeps for other hosts.
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
        sealed: &SealedShard,
        from: &Bytes,
        how: &SendOptions<'_>,
    ) -> Result<SendResult, PeerError> {
        let began = Instant::now();
        let Some((mut first, wanted)) = self.offer(address, sealed, how.lock)? else {
            return Ok(SendResult { bytes: 0, took: began.elapsed() });
        };
        let chunks: Vec<u32> =
            wanted.chunks.into_iter().filter(|index| sealed.chunk(*index).is_some()).collect();
        let bytes = chunks
            .iter()
            .filter_map(|index| sealed.chunk(*index))
            .map(|(_, length, _)| u64::from(length))
            .sum();
        let streams = how.streams.clamp(1, 4).min(chunks.len().max(1));
        let upload = OutgoingShard {
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
        first.send(shard_header(sealed, Kind::Commit), &[])?;
        let (_, root) = first.expect(Kind::Stored)?;
        check_root(&first, sealed, &root)?;
        Ok(SendResult { bytes, took: began.elapsed() })
    }

    /// Offers a shard; none if the peer already has it.
    fn offer(
        &self,
        address: &str,
        sealed: &SealedShard,
        lock: Option<WithdrawalLock>,
    ) -> Result<Option<(Wire, MissingChunks)>, PeerError> {
        let mut wire = self.connect(address)?;
        let (offset, digest) = lock.map_or((0, 0), |lock| lock.to_header());
        wire.send(Header { offset, digest, ..shard_header(sealed, Kind::Put) }, &sealed.manifest)?;
        match wire.receive()? {
            Some(Frame::Message(header, message)) if header.kind == Kind::Stored => {
                check_root(&wire, sealed, &message)?;
                Ok(None)
            }
            Some(Frame::Message(header, message)) if header.kind == Kind::Missing => {
                let wanted = wire.parse(&message)?;
                Ok(Some((wire, wanted)))
            }
            other => Err(wire.unexpected(other, Kind::Missing)),
        }
    }

    /// Runs one more connection for a shard that is being sent.
    fn help(&self, address: &str, upload: &OutgoingShard<'_>) -> Result<(), PeerError> {
        let Some((mut wire, _)) = self.offer(address, upload.sealed, upload.how.lock)? else { return Ok(()) };
        upload.send(&mut wire)?;
        wire.send(shard_header(upload.sealed, Kind::End), &[])
    }

    /// Fetches a shard over `streams` parallel connections, 1 to 4. `begin` gets its manifest first, then `write` gets each part with its
    /// offset, from all connections.
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
        let sealed = SealedShard::of(manifest).map_err(|error| unreadable(error.to_string()))?;
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
    fn begin(&mut self, sealed: &SealedShard) -> Result<(), PeerError>;

    /// Writes a part of the bytes; called from several threads. The bytes are verified only when all have arrived.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerError>;

    /// The memory for a part of the bytes, if it is mapped; otherwise they are written.
    fn memory(&self, _offset: u64, _length: u32) -> Option<MappedRange<'_>> {
        None
    }
}

fn shard_header(sealed: &SealedShard, kind: Kind) -> Header {
    let key = &sealed.shard.key;
    Header { attempt: key.attempt, step: key.step, key: sealed.key, ..Header::of(kind) }
}

fn check_root(wire: &Wire, sealed: &SealedShard, root: &[u8]) -> Result<(), PeerError> {
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

// Sends a shard to a peer over one or more connections.

/// Number of times a chunk is sent if it arrives damaged: a third failure is no accident.
const MAX_TRIES: u32 = 3;

/// A shard that is being sent over one or more connections.
pub struct OutgoingShard<'a> {
    /// The shard.
    pub sealed: &'a SealedShard,
    /// Its bytes.
    pub bytes: &'a Bytes,
    /// How it is sent.
    pub how: &'a SendOptions<'a>,
    /// Start time.
    pub began: Instant,
    /// Number of chunks that the peer accepts before it confirms one.
    pub credits: u32,
    /// How long the peer waits for the next bytes.
    pub stall: Duration,
    /// Number of open connections.
    pub sending: AtomicUsize,
    /// Chunks that were not sent yet.
    pub left: Mutex<VecDeque<u32>>,
}

impl OutgoingShard<'_> {
    fn next(&self) -> Option<u32> {
        lock(&self.left).pop_front()
    }

    /// Sends chunks until none are left, as many at once as the peer gives credit for.
    pub fn send(&self, wire: &mut Wire) -> Result<(), PeerError> {
        let peer = wire.peer().to_owned();
        let mut way = self.how.limit.way(&peer);
        let sent = self.send_by(wire, &mut way);
        self.how.limit.keep_way(&peer, way);
        self.sending.fetch_sub(1, Ordering::Relaxed);
        sent
    }

    /// Lets the kernel pace one connection, slightly faster than its part of the limit: otherwise data would accumulate in the socket
    /// until the other side has received nothing for too long.
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
                MIN_BYTES_PER_S
            } else {
                // On a full link it may be at a sixteenth of the limit.
                MIN_BYTES_PER_S.min(self.how.limit.rate() / 256).max(1)
            };
            check_speed(wire.peer(), self.began, bytes, Duration::from_secs(30), floor)?;
        }
    }

    fn is_empty(&self) -> bool {
        lock(&self.left).is_empty()
    }

    fn send_chunk(&self, wire: &mut Wire, way: &mut Backoff, index: u32) -> Result<u64, PeerError> {
        let Some((offset, length, digest)) = self.sealed.chunk(index) else { return Ok(0) };
        let header =
            Header { offset, length, digest, chunk: index, ..shard_header(self.sealed, Kind::Chunk) };
        wire.send_chunk(header, self.bytes, |stream, left| {
            (self.how.going)();
            self.spread(stream);
            // Also within a chunk: if a chunk takes long, so would the detection of a lost share.
            if let Some(signs) = signs(stream) {
                way.record(monotonic_ms(), signs);
            }
            let piece = self.how.limit.piece(way, self.stall, left);
            let wait = self.how.limit.take_by(way, piece, Instant::now());
            if !wait.is_zero() {
                std::thread::sleep(wait);
            }
            piece
        })?;
        Ok(u64::from(length))
    }

    /// Handles a chunk that arrived damaged: if it is intact here, it is sent again.
    fn again(&self, wire: &Wire, chunk: u32, failures: u32) -> Result<(), PeerError> {
        let good = self
            .sealed
            .chunk_is_good(self.bytes, chunk, &mut Vec::new())
            .map_err(|error| PeerError::Local(format!("reading a shard: {error}")))?;
        if !good {
            return Err(PeerError::Corrupt { peer: "this host".to_owned(), chunk });
        }
        if failures >= MAX_TRIES {
            return Err(PeerError::Corrupt { peer: wire.peer().to_owned(), chunk });
        }
        lock(&self.left).push_back(chunk);
        Ok(())
    }
}

/// Receives the peer's answer to a chunk: none if it was accepted, its number if it arrived damaged.
fn answer(wire: &mut Wire) -> Result<Option<u32>, PeerError> {
    match wire.receive()? {
        Some(Frame::Message(header, _)) if header.kind == Kind::Taken => Ok(None),
        other => {
            let chunk = if let Some(Frame::Message(header, _)) = &other { header.chunk } else { 0 };
            match wire.unexpected(other, Kind::Taken) {
                PeerError::Reported { reason: Reason::Corrupt, .. } => Ok(Some(chunk)),
                error => Err(error),
            }
        }
    }
}

// Fetches a shard from a peer over one or more connections.

/// Maximum number of chunks per request.
const MAX_CHUNKS: u32 = 64;

/// A shard that is being fetched over one or more connections.
pub struct Fetch<'a> {
    sealed: &'a SealedShard,
    target: &'a dyn Target,
    /// Number of chunks that a connection requests at a time.
    share: u32,
    next: AtomicU32,
    stall: Duration,
}

impl<'a> Fetch<'a> {
    /// For `streams` connections. A peer may send almost nothing for `stall` before it counts as too slow.
    pub fn new(
        sealed: &'a SealedShard,
        target: &'a dyn Target,
        streams: usize,
        stall: Duration,
    ) -> Fetch<'a> {
        let share = sealed.chunks().div_ceil(4 * streams as u32).clamp(1, MAX_CHUNKS);
        Fetch { sealed, target, share, next: AtomicU32::new(0), stall }
    }

    /// Fetches shares until none are left. Returns the bytes received over this connection.
    ///
    /// # Errors
    /// The peer sends something else or is too slow, or the bytes cannot be written.
    pub fn run(&self, wire: &mut Wire) -> Result<u64, PeerError> {
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
                // Without this share the shard is incomplete: do not fetch the others.
                self.next.store(self.sealed.chunks(), Ordering::Relaxed);
            }
            bytes += done?;
        }
    }

    fn get(
        &self,
        wire: &mut Wire,
        chunks: Range<u32>,
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
            check_speed(&peer, began, before + bytes, self.stall, MIN_BYTES_PER_S)?;
        }
        wire.expect(Kind::End)?;
        Ok(bytes)
    }
}

//! Sends a shard to a peer over one or more connections.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use mainstay_checkpoint::backoff::Backoff;

use super::{SLOWEST, Sending, check_speed, header_of};
use crate::bytes::Bytes;
use crate::os::{monotonic_ms, signs};
use crate::peer::error::{PeerError, Reason};
use crate::peer::frame::{Header, Kind};
use crate::peer::pace::pace;
use crate::peer::sealed::Sealed;
use crate::peer::wire::{Frame, Wire};

/// Number of times a chunk is sent if it arrives damaged: a third failure is no accident.
const TRIES: u32 = 3;

/// A shard that is being sent over one or more connections.
pub struct Upload<'a> {
    /// The shard.
    pub sealed: &'a Sealed,
    /// Its bytes.
    pub bytes: &'a Bytes,
    /// How it is sent.
    pub how: &'a Sending<'a>,
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

impl Upload<'_> {
    fn next(&self) -> Option<u32> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Sends chunks until none are left, as many at once as the peer gives credit for.
    ///
    /// # Errors
    /// The peer is lost, refuses or is too slow, or the bytes no longer match the manifest.
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
                SLOWEST
            } else {
                // On a full link it may be at a sixteenth of the limit.
                SLOWEST.min(self.how.limit.rate() / 256).max(1)
            };
            check_speed(wire.peer(), self.began, bytes, Duration::from_secs(30), floor)?;
        }
    }

    fn is_empty(&self) -> bool {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    fn send_chunk(&self, wire: &mut Wire, way: &mut Backoff, index: u32) -> Result<u64, PeerError> {
        let Some((offset, length, digest)) = self.sealed.chunk(index) else { return Ok(0) };
        let header = Header { offset, length, digest, chunk: index, ..header_of(self.sealed, Kind::Chunk) };
        wire.send_chunk(header, self.bytes, |stream, left| {
            (self.how.going)();
            self.spread(stream);
            // Also within a chunk: if a chunk takes long, so would the detection of a lost share.
            if let Some(signs) = signs(stream) {
                way.saw(monotonic_ms(), signs);
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
        if failures >= TRIES {
            return Err(PeerError::Corrupt { peer: wire.peer().to_owned(), chunk });
        }
        self.left.lock().unwrap_or_else(PoisonError::into_inner).push_back(chunk);
        Ok(())
    }
}

/// Receives the peer's answer to a chunk: none if it was accepted, its number if it arrived damaged.
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

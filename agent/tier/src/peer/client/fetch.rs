//! Fetches a shard from a peer over one or more connections.

use std::hash::Hasher;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use twox_hash::XxHash3_64;

use super::{SLOWEST, Target, check_speed};
use crate::peer::error::PeerError;
use crate::peer::frame::{Header, Kind};
use crate::peer::message::Get;
use crate::peer::sealed::Sealed;
use crate::peer::wire::{Frame, Wire};

/// Maximum number of chunks per request.
const MOST_CHUNKS: u32 = 64;

/// A shard that is being fetched over one or more connections.
pub struct Fetch<'a> {
    sealed: &'a Sealed,
    target: &'a dyn Target,
    /// Number of chunks that a connection requests at a time.
    share: u32,
    next: AtomicU32,
    stall: Duration,
}

impl<'a> Fetch<'a> {
    /// For `streams` connections. A peer may send almost nothing for `stall` before it counts as too slow.
    pub fn new(sealed: &'a Sealed, target: &'a dyn Target, streams: usize, stall: Duration) -> Fetch<'a> {
        let share = sealed.chunks().div_ceil(4 * streams as u32).clamp(1, MOST_CHUNKS);
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
            check_speed(&peer, began, before + bytes, self.stall, SLOWEST)?;
        }
        wire.expect(Kind::End)?;
        Ok(bytes)
    }
}

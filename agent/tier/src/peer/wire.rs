//! One connection between two agents: frames are signed and checked, and every wait has a timeout. Its start: `greeting`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::channel::Channel;
use super::error::PeerError;
use super::frame::{self, HEADER_BYTES, Header, Kind, MAX_MESSAGE, SIGNED_BYTES};
use super::token::Signer;
use crate::bytes::Bytes;
use crate::os::Outgoing;
use crate::seal::{PIECE, ReadAt};

/// Time limits.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For a connection and the handshake.
    pub connect: Duration,
    /// For the next bytes, in either direction.
    pub stall: Duration,
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts { connect: Duration::from_secs(3), stall: Duration::from_secs(10) }
    }
}

/// A connection to another, authenticated agent.
pub struct Wire {
    channel: Channel,
    /// The peer, for errors.
    peer: String,
    outgoing: Signer,
    incoming: Signer,
    /// Buffer for outgoing bytes that are copied.
    copied: Vec<u8>,
    /// Whether third parties may change data in transit: it leaves this host without TLS. Chunks then have their own codes.
    is_exposed: bool,
    /// The code over the chunk that is being read.
    reading: Option<blake3::Hasher>,
}

/// Size of a code, bytes.
const CODE_BYTES: usize = HEADER_BYTES - SIGNED_BYTES;

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// A received frame.
#[derive(Debug)]
pub enum Frame {
    /// A complete message.
    Message(Header, Vec<u8>),
    /// The header of a chunk; its bytes must be read with [`Wire::read_chunk`].
    Chunk(Header),
}

impl Wire {
    /// A connection after its greeting.
    pub(super) fn over(channel: Channel, peer: String, outgoing: Signer, incoming: Signer) -> Wire {
        let is_exposed = channel.plain().is_some_and(|socket| {
            // Both ends see the same two addresses and reach the same conclusion.
            !matches!((socket.local_addr(), socket.peer_addr()), (Ok(own), Ok(other)) if own.ip() == other.ip())
        });
        Wire { channel, peer, outgoing, incoming, copied: Vec::new(), is_exposed, reading: None }
    }

    /// The peer.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Whether the other side has presented a certificate.
    pub(super) fn is_tls(&self) -> bool {
        self.channel.plain().is_none()
    }

    /// The socket.
    pub fn stream(&self) -> &TcpStream {
        self.channel.stream()
    }

    /// Sends a message.
    pub fn send(&mut self, header: Header, message: &[u8]) -> Result<(), PeerError> {
        let length = u32::try_from(message.len()).ok().filter(|length| *length <= MAX_MESSAGE);
        let Some(length) = length else { return Err(PeerError::TooLong { bytes: message.len() }) };
        let mut bytes = Vec::with_capacity(HEADER_BYTES + message.len());
        bytes.extend_from_slice(&self.signed(Header { length, ..header }, message));
        bytes.extend_from_slice(message);
        self.channel.write_all(&bytes).map_err(|source| PeerError::lost(&self.peer, source))
    }

    /// Sends a message in JSON.
    pub fn send_json(&mut self, header: Header, message: &impl Serialize) -> Result<(), PeerError> {
        let text = serde_json::to_vec(message).map_err(|error| PeerError::Local(error.to_string()))?;
        self.send(header, &text)
    }

    /// Sends a chunk; if it is in one file and stays on this host, without copying it through this process. Before each part,
    /// `allow` gets the number of remaining bytes, may block, and returns how many may be sent now.
    pub fn send_chunk(
        &mut self,
        header: Header,
        bytes: &Bytes,
        mut allow: impl FnMut(&TcpStream, u64) -> u64,
    ) -> Result<(), PeerError> {
        let (mut at, mut left) = (header.offset, u64::from(header.length));
        let mut allowed = |channel: &Channel, left: u64| match left {
            0 => 0,
            _ => allow(channel.stream(), left).clamp(1, left),
        };
        let mut now = allowed(&self.channel, left);
        let header = Header { code: self.is_exposed, ..header };
        self.send_header(&header)?;
        let mut code = self.is_exposed.then(|| self.outgoing.begin(&frame::encode(&header)));
        while now > 0 {
            match (bytes, self.channel.plain()) {
                (Bytes::File(file, memory), Some(socket)) if !self.is_exposed => {
                    self.hand_over(socket, (file, memory.as_ref()), at, now)?;
                }
                // The hashed bytes are the sent bytes, even if the file changes meanwhile.
                _ => self.copy_piece(bytes, at, now, code.as_mut())?,
            }
            (at, left) = (at + now, left - now);
            now = allowed(&self.channel, left);
        }
        let Some(code) = code else { return Ok(()) };
        let sent = self.channel.write_all(&code.finalize().as_bytes()[..CODE_BYTES]);
        sent.map_err(|source| PeerError::lost(&self.peer, source))
    }

    /// Sends the header of a chunk in one packet with the first bytes.
    fn send_header(&mut self, header: &Header) -> Result<(), PeerError> {
        let signed = self.signed(*header, &[]);
        let sent = match self.channel.plain() {
            None => Ok(0),
            Some(socket) => {
                let flags = rustix::net::SendFlags::MORE | rustix::net::SendFlags::NOSIGNAL;
                rustix::net::send(socket, &signed, flags).map_err(io::Error::from)
            }
        };
        sent.and_then(|sent| self.channel.write_all(&signed[sent..]))
            .map_err(|source| PeerError::lost(&self.peer, source))
    }

    /// Lets the kernel send a part of a file, or of its memory.
    fn hand_over(
        &self,
        socket: &TcpStream,
        (file, memory): (&File, Option<&Outgoing>),
        mut at: u64,
        bytes: u64,
    ) -> Result<(), PeerError> {
        let end = at + bytes;
        while at < end {
            let left = usize::try_from(end - at).unwrap_or(usize::MAX);
            let sent = match memory {
                // Cheaper than `sendfile`, which handles each page separately (`bench replicate`).
                Some(memory) => memory.send(socket, at, left),
                None => send_file(socket, file, at, left),
            };
            match sent {
                Ok(sent) => at += sent as u64,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    _ if is_shorter(&error) => return Err(PeerError::Local(SHORTER.to_owned())),
                    _ => return Err(PeerError::lost(&self.peer, error)),
                },
            }
        }
        Ok(())
    }

    /// Sends a part of a shard through this process: it is in several files, or needs encryption or a code.
    fn copy_piece(
        &mut self,
        bytes: &Bytes,
        mut at: u64,
        count: u64,
        mut code: Option<&mut blake3::Hasher>,
    ) -> Result<(), PeerError> {
        self.copied.resize(PIECE, 0);
        let end = at + count;
        while at < end {
            let piece = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
            let piece = &mut self.copied[..piece];
            let read = bytes.read_exact_at(piece, at);
            read.map_err(|error| PeerError::Local(format!("reading a shard: {error}")))?;
            if let Some(code) = &mut code {
                code.update(piece);
            }
            let sent = self.channel.write_all(piece);
            sent.map_err(|source| PeerError::lost(&self.peer, source))?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn signed(&mut self, header: Header, message: &[u8]) -> [u8; HEADER_BYTES] {
        let encoded = frame::encode(&header);
        let code = self.outgoing.sign(&encoded, message);
        let mut bytes = [0; HEADER_BYTES];
        bytes[..SIGNED_BYTES].copy_from_slice(&encoded);
        bytes[SIGNED_BYTES..].copy_from_slice(&code.as_bytes()[..HEADER_BYTES - SIGNED_BYTES]);
        bytes
    }

    /// Receives the next frame; none if the other side closed the connection between two frames.
    pub fn receive(&mut self) -> Result<Option<Frame>, PeerError> {
        let mut bytes = [0; HEADER_BYTES];
        if !self.read_header(&mut bytes)? {
            return Ok(None);
        }
        let mut signed = [0; SIGNED_BYTES];
        signed.copy_from_slice(&bytes[..SIGNED_BYTES]);
        let header = frame::decode(&signed).map_err(|error| PeerError::frame(&self.peer, error))?;
        let mut message = Vec::new();
        if header.kind != Kind::Chunk {
            // Allocate only as much memory as data actually arrives.
            let limit = u64::from(header.length);
            (&mut self.channel)
                .take(limit)
                .read_to_end(&mut message)
                .map_err(|source| PeerError::lost(&self.peer, source))?;
            if message.len() as u64 != limit {
                return Err(PeerError::lost(&self.peer, io::ErrorKind::UnexpectedEof.into()));
            }
        }
        let code = self.incoming.sign(&signed, &message);
        self.compare(&code, &bytes[SIGNED_BYTES..])?;
        Ok(Some(if header.kind == Kind::Chunk {
            // Do not read a chunk that should have a code and has none.
            if self.is_exposed && !header.code {
                return Err(PeerError::Forged { peer: self.peer.clone() });
            }
            self.reading = header.code.then(|| self.incoming.begin(&signed));
            Frame::Chunk(header)
        } else {
            Frame::Message(header, message)
        }))
    }

    fn compare(&self, code: &blake3::Hash, came: &[u8]) -> Result<(), PeerError> {
        let differs = code.as_bytes().iter().zip(came).fold(0, |all, (a, b)| all | (a ^ b));
        if differs != 0 { Err(PeerError::Forged { peer: self.peer.clone() }) } else { Ok(()) }
    }

    /// Checks the code behind a chunk after all its bytes have arrived.
    fn end_chunk(&mut self) -> Result<(), PeerError> {
        let Some(code) = self.reading.take() else { return Ok(()) };
        let mut came = [0; CODE_BYTES];
        self.channel.read_exact(&mut came).map_err(|source| PeerError::lost(&self.peer, source))?;
        self.compare(&code.finalize(), &came)
    }

    fn read_header(&mut self, bytes: &mut [u8; HEADER_BYTES]) -> Result<bool, PeerError> {
        let mut filled = 0;
        while filled < bytes.len() {
            match self.channel.read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(PeerError::lost(&self.peer, io::ErrorKind::UnexpectedEof.into())),
                Ok(more) => filled += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(PeerError::lost(&self.peer, error)),
            }
        }
        Ok(true)
    }

    /// Reads the bytes of a chunk in parts and passes each on while it is in the cache.
    ///
    /// # Errors
    /// The connection is lost, `take` fails, or the code does not match: then discard all bytes of the chunk.
    pub fn read_chunk(
        &mut self,
        length: u32,
        buffer: &mut Vec<u8>,
        mut take: impl FnMut(&[u8]) -> Result<(), PeerError>,
    ) -> Result<(), PeerError> {
        buffer.resize(PIECE, 0);
        let mut left = length as usize;
        while left > 0 {
            let piece = &mut buffer[..left.min(PIECE)];
            self.channel.read_exact(piece).map_err(|source| PeerError::lost(&self.peer, source))?;
            if let Some(code) = &mut self.reading {
                code.update(piece);
            }
            take(piece)?;
            left -= piece.len();
        }
        self.end_chunk()
    }

    /// Reads the bytes of a chunk into their final place and passes each part on while it is in the cache.
    pub fn read_chunk_into(
        &mut self,
        memory: &mut [u8],
        mut show: impl FnMut(&[u8]),
    ) -> Result<(), PeerError> {
        for piece in memory.chunks_mut(PIECE) {
            self.channel.read_exact(piece).map_err(|source| PeerError::lost(&self.peer, source))?;
            if let Some(code) = &mut self.reading {
                code.update(piece);
            }
            show(piece);
        }
        self.end_chunk()
    }

    /// Receives the next message, which must be of `kind`. An error that the other side reports is returned as an error.
    pub fn expect(&mut self, kind: Kind) -> Result<(Header, Vec<u8>), PeerError> {
        match self.receive()? {
            Some(Frame::Message(header, message)) if header.kind == kind => Ok((header, message)),
            other => Err(self.unexpected(other, kind)),
        }
    }

    /// The error for a frame that is not the `wanted` one: the error that the other side reports, if it is one.
    pub(super) fn unexpected(&self, got: Option<Frame>, wanted: Kind) -> PeerError {
        match got {
            Some(Frame::Message(header, message)) if header.kind == Kind::Error => {
                PeerError::reported(&self.peer, &message)
            }
            Some(Frame::Message(header, _) | Frame::Chunk(header)) => {
                PeerError::Unexpected { peer: self.peer.clone(), got: header.kind, wanted }
            }
            None => PeerError::lost(&self.peer, io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// A received message in JSON.
    pub(super) fn parse<T: DeserializeOwned>(&self, message: &[u8]) -> Result<T, PeerError> {
        serde_json::from_slice(message)
            .map_err(|error| PeerError::Unreadable { peer: self.peer.clone(), error: error.to_string() })
    }

    /// Same as [`Wire::expect`], decoded as JSON.
    pub fn expect_json<T: DeserializeOwned>(&mut self, kind: Kind) -> Result<T, PeerError> {
        let (_, message) = self.expect(kind)?;
        self.parse(&message)
    }
}

/// Message for a file that is too short.
const SHORTER: &str = "the file is shorter than its manifest says";

fn send_file(stream: &TcpStream, file: &File, mut offset: u64, length: usize) -> io::Result<usize> {
    match rustix::fs::sendfile(stream, file, Some(&mut offset), length)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        sent => Ok(sent),
    }
}

/// Whether bytes of the file are missing: it ended, or its memory is gone.
fn is_shorter(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::UnexpectedEof
        || error.raw_os_error() == Some(rustix::io::Errno::FAULT.raw_os_error())
}

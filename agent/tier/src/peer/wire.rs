//! One connection between two agents: the handshake, and frames that are signed, checked and never waited for without end.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::PeerError;
use super::frame::{self, HEADER_BYTES, Header, Kind, MAGIC, MAX_MESSAGE, SIGNED_BYTES, VERSION};
use super::token::{NONCE_BYTES, Signer, Token, nonce};
use crate::bytes::Bytes;
use crate::seal::ReadAt;

/// Bytes that are read and hashed at a time: they stay in the cache of the core.
pub(crate) const PIECE: usize = 256 << 10;

/// First words of both sides: magic, version, three bytes of zero, nonce.
const GREETING_BYTES: usize = 8 + NONCE_BYTES;

/// How long is waited.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For a connection and the handshake.
    pub connect: Duration,
    /// For the next bytes, in either direction.
    pub stall: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { connect: Duration::from_secs(3), stall: Duration::from_secs(10) }
    }
}

/// A connection to another agent, which has shown that it knows the token.
pub struct Wire {
    stream: TcpStream,
    /// Who is at the other end, for errors.
    peer: String,
    outgoing: Signer,
    incoming: Signer,
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// What came.
#[derive(Debug)]
pub enum Frame {
    /// A message, whole.
    Message(Header, Vec<u8>),
    /// The header of a chunk; its bytes are to be read with [`Wire::read_chunk`].
    Chunk(Header),
}

impl Wire {
    /// Connects to `address`, a name or number with a port.
    ///
    /// # Errors
    /// Nobody answers, it is no agent, it speaks another version or does not know the token.
    pub fn connect(address: &str, token: &Token, patience: Patience) -> Result<Wire, PeerError> {
        let gone = |source| PeerError::unreachable(address, source);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for resolved in address.to_socket_addrs().map_err(gone)? {
            match TcpStream::connect_timeout(&resolved, patience.connect) {
                Ok(stream) => return Wire::greet(stream, address, token, patience),
                Err(error) => last = error,
            }
        }
        Err(gone(last))
    }

    fn greet(
        mut stream: TcpStream,
        peer: &str,
        token: &Token,
        patience: Patience,
    ) -> Result<Wire, PeerError> {
        let lost = |source| PeerError::lost(peer, source);
        set_timeouts(&stream, patience.connect).map_err(lost)?;
        let own = nonce().map_err(lost)?;
        stream.write_all(&greeting(&own)).map_err(lost)?;
        let theirs = read_greeting(&mut stream, peer)?;
        stream.write_all(token.prove("client", &own, &theirs).as_bytes()).map_err(lost)?;
        let mut answer = [0; 33];
        // One that is refused finds the connection closed, or the word for it.
        stream.read_exact(&mut answer[..1]).map_err(|_| PeerError::refused(peer))?;
        if answer[0] != 1 {
            return Err(PeerError::refused(peer));
        }
        stream.read_exact(&mut answer[1..]).map_err(lost)?;
        if token.prove("server", &own, &theirs)
            != blake3::Hash::from_slice(&answer[1..]).unwrap_or_else(|_| [0; 32].into())
        {
            return Err(PeerError::Impostor { peer: peer.to_owned() });
        }
        set_timeouts(&stream, patience.stall).map_err(lost)?;
        Ok(Wire {
            stream,
            peer: peer.to_owned(),
            outgoing: Signer::new(token.prove("client's frames", &own, &theirs)),
            incoming: Signer::new(token.prove("server's frames", &own, &theirs)),
        })
    }

    /// Takes up a connection that came.
    ///
    /// # Errors
    /// It is no agent, speaks another version or does not know the token.
    pub fn accept(mut stream: TcpStream, token: &Token, patience: Patience) -> Result<Wire, PeerError> {
        let peer = stream
            .peer_addr()
            .map_or_else(|_| "a peer".to_owned(), |address: SocketAddr| address.to_string());
        let lost = |source| PeerError::lost(&peer, source);
        set_timeouts(&stream, patience.connect).map_err(lost)?;
        let own = nonce().map_err(lost)?;
        let mut bytes = [0; GREETING_BYTES];
        stream.read_exact(&mut bytes).map_err(lost)?;
        // It is told our version even if its own is another: its operator should see both.
        stream.write_all(&greeting(&own)).map_err(lost)?;
        let theirs = parse_greeting(&bytes, &peer)?;
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).map_err(lost)?;
        if token.prove("client", &theirs, &own) != blake3::Hash::from(proof) {
            let _ = stream.write_all(&[0]);
            return Err(PeerError::WrongToken { peer });
        }
        let mut answer = [1; 33];
        answer[1..].copy_from_slice(token.prove("server", &theirs, &own).as_bytes());
        stream.write_all(&answer).map_err(lost)?;
        set_timeouts(&stream, patience.stall).map_err(lost)?;
        Ok(Wire {
            stream,
            outgoing: Signer::new(token.prove("server's frames", &theirs, &own)),
            incoming: Signer::new(token.prove("client's frames", &theirs, &own)),
            peer,
        })
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The socket.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The connection is lost, or takes nothing for too long.
    pub fn send(&mut self, header: Header, message: &[u8]) -> Result<(), PeerError> {
        let length = u32::try_from(message.len()).ok().filter(|length| *length <= MAX_MESSAGE);
        let Some(length) = length else { return Err(PeerError::TooLong { bytes: message.len() }) };
        let mut bytes = Vec::with_capacity(HEADER_BYTES + message.len());
        bytes.extend_from_slice(&self.signed(Header { length, ..header }, message));
        bytes.extend_from_slice(message);
        self.stream.write_all(&bytes).map_err(|source| PeerError::lost(&self.peer, source))
    }

    /// Sends a message in JSON.
    ///
    /// # Errors
    /// As for [`Wire::send`].
    pub fn send_json(&mut self, header: Header, message: &impl Serialize) -> Result<(), PeerError> {
        let text = serde_json::to_vec(message).map_err(|error| PeerError::Local(error.to_string()))?;
        self.send(header, &text)
    }

    /// Sends a chunk from a file or its memory, without copying it through this process.
    ///
    /// # Errors
    /// The connection is lost, or the file is shorter than the chunk.
    pub fn send_chunk(&mut self, header: Header, bytes: &Bytes) -> Result<(), PeerError> {
        let signed = self.signed(header, &[]);
        let lost = |source| PeerError::lost(&self.peer, source);
        rustix::net::send(
            &self.stream,
            &signed,
            rustix::net::SendFlags::MORE | rustix::net::SendFlags::NOSIGNAL,
        )
        .map_err(io::Error::from)
        .and_then(|sent| (&self.stream).write_all(&signed[sent..]))
        .map_err(lost)?;
        let (file, memory) = match bytes {
            Bytes::File(file, memory) => (file, memory),
            Bytes::Pack(_) => return self.copy_chunk(&header, bytes),
        };
        let mut offset = header.offset;
        let end = offset + u64::from(header.length);
        while offset < end {
            let left = usize::try_from(end - offset).unwrap_or(usize::MAX);
            let sent = match memory {
                // Less work than `sendfile`, which takes up each page by itself (`bench replicate`).
                Some(memory) => memory.send(&self.stream, offset, left),
                None => send_file(&self.stream, file, offset, left),
            };
            match sent {
                Ok(sent) => offset += sent as u64,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return Err(lost(io::ErrorKind::TimedOut.into())),
                    _ if is_shorter(&error) => return Err(PeerError::Local(SHORTER.to_owned())),
                    _ => return Err(lost(error)),
                },
            }
        }
        Ok(())
    }

    /// The bytes of a chunk that lie in several files.
    fn copy_chunk(&mut self, header: &Header, bytes: &Bytes) -> Result<(), PeerError> {
        let mut buffer = vec![0; PIECE];
        let mut offset = header.offset;
        let end = offset + u64::from(header.length);
        while offset < end {
            let piece = usize::try_from(end - offset).unwrap_or(PIECE).min(PIECE);
            let read = bytes.read_exact_at(&mut buffer[..piece], offset);
            read.map_err(|error| PeerError::Local(format!("reading a shard: {error}")))?;
            let sent = (&self.stream).write_all(&buffer[..piece]);
            sent.map_err(|source| PeerError::lost(&self.peer, source))?;
            offset += piece as u64;
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

    /// The next frame; none when the other side closed the connection between two.
    ///
    /// # Errors
    /// The connection is lost, nothing comes for too long, or what comes is not what the other side signed.
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
            // Only as much memory as really comes.
            let limit = u64::from(header.length);
            (&self.stream)
                .take(limit)
                .read_to_end(&mut message)
                .map_err(|source| PeerError::lost(&self.peer, source))?;
            if message.len() as u64 != limit {
                return Err(PeerError::lost(&self.peer, io::ErrorKind::UnexpectedEof.into()));
            }
        }
        let code = self.incoming.sign(&signed, &message);
        let differs = code.as_bytes().iter().zip(&bytes[SIGNED_BYTES..]).fold(0, |all, (a, b)| all | (a ^ b));
        if differs != 0 {
            return Err(PeerError::Forged { peer: self.peer.clone() });
        }
        Ok(Some(if header.kind == Kind::Chunk {
            Frame::Chunk(header)
        } else {
            Frame::Message(header, message)
        }))
    }

    fn read_header(&mut self, bytes: &mut [u8; HEADER_BYTES]) -> Result<bool, PeerError> {
        let mut filled = 0;
        while filled < bytes.len() {
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(PeerError::lost(&self.peer, io::ErrorKind::UnexpectedEof.into())),
                Ok(more) => filled += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(PeerError::lost(&self.peer, error)),
            }
        }
        Ok(true)
    }

    /// Reads the bytes of a chunk piece by piece, each while it is in the cache.
    ///
    /// # Errors
    /// The connection is lost, or `take` fails.
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
            self.stream.read_exact(piece).map_err(|source| PeerError::lost(&self.peer, source))?;
            take(piece)?;
            left -= piece.len();
        }
        Ok(())
    }

    /// Reads the bytes of a chunk to where they stay, and shows each piece while it is in the cache.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn read_chunk_into(
        &mut self,
        memory: &mut [u8],
        mut show: impl FnMut(&[u8]),
    ) -> Result<(), PeerError> {
        for piece in memory.chunks_mut(PIECE) {
            self.stream.read_exact(piece).map_err(|source| PeerError::lost(&self.peer, source))?;
            show(piece);
        }
        Ok(())
    }

    /// The next message, which must be of `kind`; an error that the other side reports is returned as one.
    ///
    /// # Errors
    /// The connection is lost, or something else came.
    pub fn expect(&mut self, kind: Kind) -> Result<(Header, Vec<u8>), PeerError> {
        match self.receive()? {
            Some(Frame::Message(header, message)) if header.kind == kind => Ok((header, message)),
            Some(Frame::Message(header, message)) if header.kind == Kind::Error => {
                Err(PeerError::reported(&self.peer, &message))
            }
            Some(Frame::Message(header, _) | Frame::Chunk(header)) => {
                Err(PeerError::Unexpected { peer: self.peer.clone(), got: header.kind, wanted: kind })
            }
            None => Err(PeerError::lost(&self.peer, io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// As [`Wire::expect`], read as JSON.
    ///
    /// # Errors
    /// Also: it cannot be read.
    pub fn expect_json<T: DeserializeOwned>(&mut self, kind: Kind) -> Result<T, PeerError> {
        let (_, message) = self.expect(kind)?;
        serde_json::from_slice(&message)
            .map_err(|error| PeerError::Unreadable { peer: self.peer.clone(), error: error.to_string() })
    }
}

/// What is said of a file that has not as many bytes as it must.
const SHORTER: &str = "the file is shorter than its manifest says";

fn send_file(stream: &TcpStream, file: &File, mut offset: u64, length: usize) -> io::Result<usize> {
    match rustix::fs::sendfile(stream, file, Some(&mut offset), length)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        sent => Ok(sent),
    }
}

/// Whether bytes of the file are not there: it ended, or its memory is gone.
fn is_shorter(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::UnexpectedEof
        || error.raw_os_error() == Some(rustix::io::Errno::FAULT.raw_os_error())
}

fn set_timeouts(stream: &TcpStream, patience: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))
}

fn greeting(nonce: &[u8; NONCE_BYTES]) -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4] = VERSION;
    bytes[8..].copy_from_slice(nonce);
    bytes
}

fn read_greeting(stream: &mut TcpStream, peer: &str) -> Result<[u8; NONCE_BYTES], PeerError> {
    let mut bytes = [0; GREETING_BYTES];
    stream.read_exact(&mut bytes).map_err(|source| PeerError::lost(peer, source))?;
    parse_greeting(&bytes, peer)
}

fn parse_greeting(bytes: &[u8; GREETING_BYTES], peer: &str) -> Result<[u8; NONCE_BYTES], PeerError> {
    let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
    if magic != MAGIC {
        return Err(PeerError::frame(peer, frame::FrameError::Magic(magic)));
    }
    if bytes[4] != VERSION {
        return Err(PeerError::frame(peer, frame::FrameError::Version(bytes[4])));
    }
    let mut nonce = [0; NONCE_BYTES];
    nonce.copy_from_slice(&bytes[8..]);
    Ok(nonce)
}

//! One connection between two agents: frames are signed and checked, and every wait has a timeout. Its start: `greeting`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use rustls::Connection;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::os::SendMapping;
use crate::peer::credentials::Credentials;
use crate::peer::error::PeerError;
use crate::peer::frame::{
    self, FrameError, HEADER_BYTES, Header, Kind, MAGIC, MAX_MESSAGE, SIGNED_BYTES, VERSION,
};
use crate::peer::tls;
use crate::peer::token::{NONCE_BYTES, Signer, nonce};
use crate::seal::{Bytes, READ_BYTES, ReadAt};

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
    pub(super) fn new(channel: Channel, peer: String, outgoing: Signer, incoming: Signer) -> Wire {
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
                    self.send_by_kernel(socket, (file, memory.as_ref()), at, now)?;
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
    fn send_by_kernel(
        &self,
        socket: &TcpStream,
        (file, memory): (&File, Option<&SendMapping>),
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
                    _ if is_shorter(&error) => return Err(PeerError::Local(TOO_SHORT.to_owned())),
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
        self.copied.resize(READ_BYTES, 0);
        let end = at + count;
        while at < end {
            let piece = usize::try_from(end - at).unwrap_or(READ_BYTES).min(READ_BYTES);
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

    fn compare(&self, code: &blake3::Hash, received: &[u8]) -> Result<(), PeerError> {
        let differs = code.as_bytes().iter().zip(received).fold(0, |all, (a, b)| all | (a ^ b));
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
        buffer.resize(READ_BYTES, 0);
        let mut left = length as usize;
        while left > 0 {
            let piece = &mut buffer[..left.min(READ_BYTES)];
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
        for piece in memory.chunks_mut(READ_BYTES) {
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
                PeerError::from_report(&self.peer, &message)
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
const TOO_SHORT: &str = "the file is shorter than its manifest says";

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

// The byte stream between two agents: a TCP connection, with TLS if it is configured. Code that reads and writes does not depend on
// which.

/// Maximum number of bytes that a refused peer may still send before the connection is closed.
const MAX_BYTES_AFTER_REFUSAL: u64 = 64 << 10;

/// A byte stream to and from a peer.
pub(super) struct Channel {
    socket: Socket,
    tls: Option<Box<Tls>>,
}

/// The underlying connection.
struct Socket {
    stream: TcpStream,
    /// Time limit of one step of the greeting, and the deadline of the whole greeting.
    greeting: Option<(Duration, Instant)>,
}

/// TLS, and received bytes that are not decrypted yet.
struct Tls {
    connection: Connection,
    incoming: ReadBuffer,
}

/// Read buffer: TLS takes a few KiB at a time, the socket returns more at once.
struct ReadBuffer {
    buffer: Vec<u8>,
    from: usize,
    to: usize,
    /// The first received bytes.
    first: [u8; 4],
}

impl Channel {
    /// A channel whose greeting must end by `until` and each step of it within `step`.
    pub(super) fn new(stream: TcpStream, step: Duration, until: Instant) -> Channel {
        Channel { socket: Socket { stream, greeting: Some((step, until)) }, tls: None }
    }

    /// Ends the greeting: from now on the other side may be silent for `stall`.
    pub(super) fn settle(&mut self, stall: Duration) -> io::Result<()> {
        self.socket.greeting = None;
        self.socket.stream.set_read_timeout(Some(stall))?;
        self.socket.stream.set_write_timeout(Some(stall))
    }

    /// The socket.
    pub(super) fn stream(&self) -> &TcpStream {
        &self.socket.stream
    }

    /// The socket, if it is not encrypted.
    pub(super) fn plain(&self) -> Option<&TcpStream> {
        self.tls.is_none().then_some(&self.socket.stream)
    }

    /// The first received byte, which stays in the socket.
    pub(super) fn peek(&self) -> io::Result<u8> {
        self.socket.limit_timeouts()?;
        let mut first = [0];
        match self.socket.stream.peek(&mut first)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(first[0]),
        }
    }

    /// Starts TLS. An error includes the first received bytes, which show what kind of peer it is.
    pub(super) fn secure(&mut self, connection: Connection) -> Result<(), ([u8; 4], io::Error)> {
        let incoming = ReadBuffer { buffer: vec![0; READ_BYTES], from: 0, to: 0, first: [0; 4] };
        let mut tls = Box::new(Tls { connection, incoming });
        let Tls { connection, incoming } = &mut *tls;
        let done = connection.complete_io(&mut BufferedSocket { incoming, socket: &self.socket }).map(drop);
        let first = tls.incoming.first;
        self.tls = Some(tls);
        done.map_err(|error| (first, error))
    }

    /// A secret that only the two ends of this connection share; none without TLS.
    pub(super) fn secret(&self) -> io::Result<Option<[u8; 32]>> {
        let Some(tls) = &self.tls else { return Ok(None) };
        let secret = tls.connection.export_keying_material([0; 32], b"EXPORTER-mainstay-peers", None);
        secret.map(Some).map_err(io::Error::other)
    }

    /// Closes the connection so that the other side receives the last bytes: closing with unread bytes in it would discard them.
    pub(super) fn close(mut self) {
        let _ = self.socket.stream.shutdown(Shutdown::Write);
        let _ = io::copy(&mut Read::take(&self.socket, MAX_BYTES_AFTER_REFUSAL), &mut io::sink());
        // Nothing more is sent over TLS.
        self.tls = None;
    }
}

impl Read for Channel {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&self.socket).read(into),
            Some(tls) => {
                let Tls { connection, incoming } = &mut **tls;
                let mut filled = BufferedSocket { incoming, socket: &self.socket };
                loop {
                    match connection.reader().read(into) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            connection.complete_io(&mut filled)?;
                        }
                        // The peer closed without close_notify. Frames contain their length, so truncation is always detected.
                        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                        read => return read,
                    }
                }
            }
        }
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&self.socket).write(bytes),
            Some(tls) => {
                let Tls { connection, incoming } = &mut **tls;
                let taken = connection.writer().write(bytes)?;
                connection.complete_io(&mut BufferedSocket { incoming, socket: &self.socket })?;
                Ok(taken)
            }
        }
    }

    /// Nothing is buffered.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let Some(tls) = &mut self.tls else { return };
        // Send close_notify without waiting.
        if self.socket.stream.set_nonblocking(true).is_ok() {
            tls.connection.send_close_notify();
            let _ = tls.connection.write_tls(&mut &self.socket);
        }
    }
}

impl Socket {
    /// Limits the socket's timeouts to the rest of the greeting.
    fn limit_timeouts(&self) -> io::Result<()> {
        let Some((step, until)) = self.greeting else { return Ok(()) };
        let left = until.saturating_duration_since(Instant::now()).min(step);
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.set_write_timeout(Some(left))
    }
}

impl Read for &Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.limit_timeouts()?;
        let count = (&self.stream).read(into)?;
        // The sender interprets a late acknowledgement as a full link (`checkpoint::backoff`). If the kernel does not support the option,
        // it acknowledges as usual.
        let _ = rustix::net::sockopt::set_tcp_quickack(&self.stream, true);
        Ok(count)
    }
}

impl Write for &Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.limit_timeouts()?;
        (&self.stream).write(bytes)
    }

    fn write_vectored(&mut self, bytes: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.limit_timeouts()?;
        (&self.stream).write_vectored(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Received bytes, and the socket for more.
struct BufferedSocket<'a> {
    incoming: &'a mut ReadBuffer,
    socket: &'a Socket,
}

impl Read for BufferedSocket<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let (incoming, mut from) = (&mut *self.incoming, self.socket);
        if incoming.from == incoming.to {
            let is_first = incoming.to == 0;
            incoming.to = from.read(&mut incoming.buffer)?;
            incoming.from = 0;
            if is_first && incoming.to >= incoming.first.len() {
                incoming.first.copy_from_slice(&incoming.buffer[..4]);
            }
        }
        let count = into.len().min(incoming.to - incoming.from);
        into[..count].copy_from_slice(&incoming.buffer[incoming.from..incoming.from + count]);
        incoming.from += count;
        Ok(count)
    }
}

impl Write for BufferedSocket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut socket = self.socket;
        socket.write(bytes)
    }

    fn write_vectored(&mut self, bytes: &[io::IoSlice<'_>]) -> io::Result<usize> {
        let mut socket = self.socket;
        socket.write_vectored(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// The start of a connection between two agents: both authenticate.
//
// With certificates, TLS comes first (`tls`). Then both sides send a nonce and prove over both nonces that they know the token
// (`token`). Everything has a deadline: a client that connects and sends nothing, or sends slowly, occupies a connection for seconds only.

/// Size of the first message of both sides: magic, version, three bytes of zero, nonce.
const GREETING_BYTES: usize = 8 + NONCE_BYTES;

/// Maximum number of unsent bytes in a connection's send queue. Bytes that wait there longer have left the CPU caches when they are sent,
/// and are late when the rate limit is lowered (`TCP_NOTSENT_LOWAT`, tcp(7); it does not limit bytes in flight).
const MAX_UNSENT_BYTES: u32 = 64 << 10;

/// Time limit of the whole greeting, as a multiple of the limit of one step.
const MAX_GREETING_STEPS: u32 = 3;

impl Wire {
    /// Connects to `address`, a host name or IP address with a port.
    ///
    /// # Errors
    /// Nothing answers, it is not an agent, has another protocol version, or authentication fails.
    pub fn connect(address: &str, pass: &Credentials, patience: Timeouts) -> Result<Wire, PeerError> {
        let gone = |source| PeerError::unreachable(address, source);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for resolved in address.to_socket_addrs().map_err(gone)? {
            match TcpStream::connect_timeout(&resolved, patience.connect) {
                Ok(stream) => return greet(stream, address, pass, patience),
                Err(error) => last = error,
            }
        }
        Err(gone(last))
    }

    /// Accepts an incoming connection.
    pub fn accept(stream: TcpStream, pass: &Credentials, patience: Timeouts) -> Result<Wire, PeerError> {
        let peer = stream
            .peer_addr()
            .map_or_else(|_| "a peer".to_owned(), |address: SocketAddr| address.to_string());
        let lost = |source| tls::stream_error(&peer, source);
        let mut channel = begin(stream, patience).map_err(lost)?;
        let own = nonce().map_err(lost)?;
        let is_tls = channel.peek().map_err(lost)? == HANDSHAKE;
        match pass.tls() {
            Some(tls) if is_tls => {
                if let Err((first, error)) = channel.secure(tls.from(&peer)?) {
                    channel.close();
                    return Err(tls::handshake_error(&peer, first, error));
                }
            }
            // Our greeting shows the client that this agent has no TLS.
            None if is_tls => {
                let _ = channel.write_all(&greeting(&own));
                channel.close();
                return Err(PeerError::SpeaksTls { peer });
            }
            _ => {}
        }
        let mut bytes = [0; GREETING_BYTES];
        channel.read_exact(&mut bytes).map_err(lost)?;
        // Send our version even if the client's differs, so that its operator sees both.
        channel.write_all(&greeting(&own)).map_err(lost)?;
        let theirs = parse_greeting(&bytes, &peer)?;
        let mut proof = [0; 32];
        channel.read_exact(&mut proof).map_err(lost)?;
        if pass.tls().is_some() && !is_tls {
            let _ = channel.write_all(&[NEEDS_TLS]);
            return Err(PeerError::SpeaksPlainly { peer });
        }
        let token = pass.session(&channel, &peer)?;
        if token.prove("client", &theirs, &own) != blake3::Hash::from(proof) {
            let _ = channel.write_all(&[REFUSED]);
            return Err(PeerError::WrongToken { peer });
        }
        let mut answer = [TAKEN; 33];
        answer[1..].copy_from_slice(token.prove("server", &theirs, &own).as_bytes());
        channel.write_all(&answer).map_err(lost)?;
        channel.settle(patience.stall).map_err(lost)?;
        let outgoing = Signer::new(token.prove("server's frames", &theirs, &own));
        let incoming = Signer::new(token.prove("client's frames", &theirs, &own));
        Ok(Wire::new(channel, peer, outgoing, incoming))
    }
}

/// Answer to a proof: wrong.
const REFUSED: u8 = 0;

/// Answer to a proof: correct.
const TAKEN: u8 = 1;

/// Answer to a proof: not checked because this agent requires TLS.
const NEEDS_TLS: u8 = 2;

/// First byte of a TLS handshake.
const HANDSHAKE: u8 = 0x16;

fn greet(stream: TcpStream, peer: &str, pass: &Credentials, patience: Timeouts) -> Result<Wire, PeerError> {
    let lost = |source| tls::stream_error(peer, source);
    let mut channel = begin(stream, patience).map_err(lost)?;
    if let Some(tls) = pass.tls() {
        channel.secure(tls.to(peer)?).map_err(|(first, error)| tls::handshake_error(peer, first, error))?;
    }
    let token = pass.session(&channel, peer)?;
    let own = nonce().map_err(lost)?;
    channel.write_all(&greeting(&own)).map_err(lost)?;
    let mut bytes = [0; GREETING_BYTES];
    channel.read_exact(&mut bytes).map_err(lost)?;
    let theirs = parse_greeting(&bytes, peer)?;
    channel.write_all(token.prove("client", &own, &theirs).as_bytes()).map_err(lost)?;
    let mut answer = [0; 33];
    // On refusal the peer closes the connection or sends a code for it.
    channel.read_exact(&mut answer[..1]).map_err(|_| PeerError::refused(peer))?;
    match answer[0] {
        TAKEN => {}
        NEEDS_TLS => return Err(PeerError::SpeaksTls { peer: peer.to_owned() }),
        _ => return Err(PeerError::refused(peer)),
    }
    channel.read_exact(&mut answer[1..]).map_err(lost)?;
    if token.prove("server", &own, &theirs)
        != blake3::Hash::from_slice(&answer[1..]).unwrap_or_else(|_| [0; 32].into())
    {
        return Err(PeerError::Impostor { peer: peer.to_owned() });
    }
    channel.settle(patience.stall).map_err(lost)?;
    let outgoing = Signer::new(token.prove("client's frames", &own, &theirs));
    let incoming = Signer::new(token.prove("server's frames", &own, &theirs));
    Ok(Wire::new(channel, peer.to_owned(), outgoing, incoming))
}

fn begin(stream: TcpStream, patience: Timeouts) -> io::Result<Channel> {
    stream.set_nodelay(true)?;
    socket2::SockRef::from(&stream).set_tcp_notsent_lowat(MAX_UNSENT_BYTES)?;
    Ok(Channel::new(stream, patience.connect, Instant::now() + patience.connect * MAX_GREETING_STEPS))
}

fn greeting(nonce: &[u8; NONCE_BYTES]) -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4] = VERSION;
    bytes[8..].copy_from_slice(nonce);
    bytes
}

fn parse_greeting(bytes: &[u8; GREETING_BYTES], peer: &str) -> Result<[u8; NONCE_BYTES], PeerError> {
    let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
    if magic != MAGIC {
        return Err(PeerError::frame(peer, FrameError::Magic(magic)));
    }
    if bytes[4] != VERSION {
        return Err(PeerError::frame(peer, FrameError::Version(bytes[4])));
    }
    let mut nonce = [0; NONCE_BYTES];
    nonce.copy_from_slice(&bytes[8..]);
    Ok(nonce)
}

//! The byte stream between two agents: a TCP connection, with TLS if it is configured. Code that reads and writes does not depend on
//! which.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use crate::seal::PIECE;
use rustls::Connection;

/// Maximum number of bytes that a refused peer may still send before the connection is closed.
const LAST_WORDS: u64 = 64 << 10;

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
    incoming: Incoming,
}

/// Read buffer: TLS takes a few KiB at a time, the socket returns more at once.
struct Incoming {
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
        self.socket.hurry()?;
        let mut first = [0];
        match self.socket.stream.peek(&mut first)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(first[0]),
        }
    }

    /// Starts TLS. An error includes the first received bytes, which show what kind of peer it is.
    pub(super) fn secure(&mut self, connection: Connection) -> Result<(), ([u8; 4], io::Error)> {
        let incoming = Incoming { buffer: vec![0; PIECE], from: 0, to: 0, first: [0; 4] };
        let mut tls = Box::new(Tls { connection, incoming });
        let Tls { connection, incoming } = &mut *tls;
        let done = connection.complete_io(&mut Filled { incoming, socket: &self.socket }).map(drop);
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
    pub(super) fn part(mut self) {
        let _ = self.socket.stream.shutdown(Shutdown::Write);
        let _ = io::copy(&mut Read::take(&self.socket, LAST_WORDS), &mut io::sink());
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
                let mut filled = Filled { incoming, socket: &self.socket };
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
                connection.complete_io(&mut Filled { incoming, socket: &self.socket })?;
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
    fn hurry(&self) -> io::Result<()> {
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
        self.hurry()?;
        let count = (&self.stream).read(into)?;
        // The sender interprets a late acknowledgement as a full link (`checkpoint::backoff`). If the kernel does not support the option,
        // it acknowledges as usual.
        let _ = rustix::net::sockopt::set_tcp_quickack(&self.stream, true);
        Ok(count)
    }
}

impl Write for &Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.hurry()?;
        (&self.stream).write(bytes)
    }

    fn write_vectored(&mut self, bytes: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.hurry()?;
        (&self.stream).write_vectored(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Received bytes, and the socket for more.
struct Filled<'a> {
    incoming: &'a mut Incoming,
    socket: &'a Socket,
}

impl Read for Filled<'_> {
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

impl Write for Filled<'_> {
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

//! The bytes between two agents: a TCP connection, with TLS over it where the configuration has it. Whoever reads and writes need
//! not know which.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use crate::seal::PIECE;
use rustls::Connection;

/// What one who is refused may still send before the connection is cut under it, bytes.
const LAST_WORDS: u64 = 64 << 10;

/// Bytes to and from a peer.
pub(super) struct Channel {
    socket: Socket,
    tls: Option<Box<Tls>>,
}

/// The connection below.
struct Socket {
    stream: TcpStream,
    /// How long one step of the greeting may take, and by when all of it must be over.
    greeting: Option<(Duration, Instant)>,
}

/// TLS, and what came and is not decrypted yet.
struct Tls {
    connection: Connection,
    incoming: Incoming,
}

/// TLS takes a few KiB at a time; the socket gives more at once.
struct Incoming {
    buffer: Vec<u8>,
    from: usize,
    to: usize,
    /// The first bytes that came at all.
    first: [u8; 4],
}

impl Channel {
    /// A channel whose greeting ends by `until`, each step of it after `step` at most.
    pub(super) fn new(stream: TcpStream, step: Duration, until: Instant) -> Channel {
        Channel { socket: Socket { stream, greeting: Some((step, until)) }, tls: None }
    }

    /// The greeting is over: from now on the other side may be silent for `stall`.
    pub(super) fn settle(&mut self, stall: Duration) -> io::Result<()> {
        self.socket.greeting = None;
        self.socket.stream.set_read_timeout(Some(stall))?;
        self.socket.stream.set_write_timeout(Some(stall))
    }

    /// The socket.
    pub(super) fn stream(&self) -> &TcpStream {
        &self.socket.stream
    }

    /// The socket, where bytes go over it as they are.
    pub(super) fn plain(&self) -> Option<&TcpStream> {
        self.tls.is_none().then_some(&self.socket.stream)
    }

    /// The first byte that comes, which is left where it is.
    pub(super) fn peek(&self) -> io::Result<u8> {
        self.socket.hurry()?;
        let mut first = [0];
        match self.socket.stream.peek(&mut first)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(first[0]),
        }
    }

    /// Goes on by TLS. The first bytes that came are told with what went wrong, for they tell who is there.
    pub(super) fn secure(&mut self, connection: Connection) -> Result<(), ([u8; 4], io::Error)> {
        let incoming = Incoming { buffer: vec![0; PIECE], from: 0, to: 0, first: [0; 4] };
        let mut tls = Box::new(Tls { connection, incoming });
        let done = tls.shake_hands(&self.socket);
        let first = tls.incoming.first;
        self.tls = Some(tls);
        done.map_err(|error| (first, error))
    }

    /// A secret of the two ends of this connection alone; none without TLS.
    pub(super) fn secret(&self) -> io::Result<Option<[u8; 32]>> {
        let Some(tls) = &self.tls else { return Ok(None) };
        let secret = tls.connection.export_keying_material([0; 32], b"EXPORTER-mainstay-peers", None);
        secret.map(Some).map_err(io::Error::other)
    }

    /// Lets the other side hear what was said last: a connection that is cut while bytes wait in it takes them along.
    pub(super) fn part(mut self) {
        let _ = self.socket.stream.shutdown(Shutdown::Write);
        let _ = io::copy(&mut Read::take(&self.socket, LAST_WORDS), &mut io::sink());
        // Nothing more is to be said over it.
        self.tls = None;
    }
}

impl Read for Channel {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&self.socket).read(into),
            Some(tls) => tls.read(&self.socket, into),
        }
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&self.socket).write(bytes),
            Some(tls) => tls.write(&self.socket, bytes),
        }
    }

    /// There is nothing that has not gone.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let Some(tls) = &mut self.tls else { return };
        // A farewell, for which nobody waits.
        if self.socket.stream.set_nonblocking(true).is_ok() {
            tls.connection.send_close_notify();
            let _ = tls.give(&self.socket);
        }
    }
}

impl Socket {
    /// Nothing is waited for beyond the end of the greeting.
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
        // The sender takes a late acknowledgement for a full link (`checkpoint::backoff`). Where the kernel does not know the option, it
        // acknowledges as it does.
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

impl Tls {
    fn shake_hands(&mut self, socket: &Socket) -> io::Result<()> {
        loop {
            self.give(socket)?;
            if !self.connection.is_handshaking() {
                return Ok(());
            }
            if self.take(socket)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn read(&mut self, socket: &Socket, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.take(socket)?,
                // It went without a farewell. Frames tell how long they are: nothing is cut short unseen.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                read => return read,
            };
            self.give(socket)?;
        }
    }

    fn write(&mut self, socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.connection.writer().write(bytes)?;
        self.give(socket)?;
        Ok(taken)
    }

    /// Takes in what has come; 0 if nothing comes any more.
    fn take(&mut self, socket: &Socket) -> io::Result<usize> {
        let came = self.connection.read_tls(&mut Filled { incoming: &mut self.incoming, socket })?;
        if let Err(error) = self.connection.process_new_packets() {
            // The other side is told why.
            let _ = self.give(socket);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        Ok(came)
    }

    /// Sends what is to be sent.
    fn give(&mut self, mut socket: &Socket) -> io::Result<()> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut socket) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// What has come, and the socket for more.
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

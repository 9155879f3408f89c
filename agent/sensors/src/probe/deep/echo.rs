//! TCP round trips: a server that echoes, and a client that verifies the echo and measures.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mainstay_health::host::preflight::deep::{Measured, Probed, What};

use super::buffer::{difference, fill};

/// The first message of both sides.
const HELLO: &[u8; 16] = b"mainstay-echo 1\n";
/// Clients at a time.
const CALLERS: usize = 16;
/// How long either side may be silent.
const SILENCE: Duration = Duration::from_secs(10);
const BLOCK: usize = 256 << 10;
const PING: usize = 64;
const PINGS: usize = 50;
/// How long to send.
const WINDOW: Duration = Duration::from_millis(500);

/// Echoes for all clients, forever.
///
/// # Errors
/// Clients can no longer be accepted.
pub fn serve(listener: &TcpListener) -> io::Result<()> {
    let callers = Arc::new(AtomicUsize::new(0));
    loop {
        let (stream, _) = listener.accept()?;
        if callers.fetch_add(1, Ordering::AcqRel) >= CALLERS {
            callers.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let done = callers.clone();
        let echo = move || {
            // A client that hangs up is no error of ours.
            let _ = echo(stream);
            done.fetch_sub(1, Ordering::AcqRel);
        };
        if std::thread::Builder::new().name("echo".to_owned()).spawn(echo).is_err() {
            callers.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn echo(mut stream: TcpStream) -> io::Result<()> {
    prepare(&stream)?;
    let mut hello = [0; HELLO.len()];
    stream.read_exact(&mut hello)?;
    if hello != *HELLO {
        return Ok(());
    }
    stream.write_all(HELLO)?;
    let mut block = vec![0; BLOCK];
    loop {
        match stream.read(&mut block)? {
            0 => return stream.shutdown(Shutdown::Write),
            length => stream.write_all(&block[..length])?,
        }
    }
}

/// Probes TCP to this host itself.
pub(super) fn loopback() -> Probed {
    let listening =
        TcpListener::bind("127.0.0.1:0").and_then(|listener| Ok((listener.local_addr()?, listener)));
    let (address, listener) = match listening {
        Ok(listening) => listening,
        Err(error) => return Probed::Refused(format!("listening on 127.0.0.1: {error}")),
    };
    // It ends with this process.
    std::thread::spawn(move || serve(&listener));
    ask(&address.to_string())
}

/// Probes TCP to a peer that runs `mainstay check --listen`.
pub(super) fn ask(peer: &str) -> Probed {
    let addresses = match peer.to_socket_addrs() {
        Ok(addresses) => addresses,
        Err(error) => return Probed::Untried(format!("{peer} is not an address: {error}")),
    };
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpStream::connect_timeout(&address, SILENCE) {
            Ok(stream) => return measure(stream).unwrap_or_else(|error| lost(peer, &error)),
            Err(error) => last = error,
        }
    }
    Probed::Refused(format!("{peer} cannot be reached: {last}"))
}

fn lost(peer: &str, error: &io::Error) -> Probed {
    match error.kind() {
        io::ErrorKind::InvalidData => Probed::Untried(format!("{peer} is no `mainstay check --listen`")),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            Probed::Refused(format!("{peer} was silent for {} s", SILENCE.as_secs()))
        }
        _ => Probed::Refused(format!("the connection to {peer} broke: {error}")),
    }
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))
}

fn measure(mut stream: TcpStream) -> io::Result<Probed> {
    prepare(&stream)?;
    stream.write_all(HELLO)?;
    let mut hello = [0; HELLO.len()];
    stream.read_exact(&mut hello).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => io::ErrorKind::InvalidData.into(),
        _ => error,
    })?;
    if hello != *HELLO {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let round_trip = pings(&mut stream)?;
    let began = Instant::now();
    let mut out = stream.try_clone()?;
    let sender = std::thread::spawn(move || send(&mut out, began));
    let (mut block, mut received, mut held) = (vec![0; BLOCK], 0_u64, 0);
    loop {
        // Only complete words are compared; a partial one waits for its rest.
        let length = stream.read(&mut block[held..])?;
        if length == 0 {
            break;
        }
        let whole = (held + length) / 8 * 8;
        if let Some(place) = difference(&block[..whole], PING as u64, received) {
            return Ok(Probed::Wrong(format!("byte {place} came back different from what was sent")));
        }
        received += whole as u64;
        block.copy_within(whole..held + length, 0);
        held = held + length - whole;
    }
    let seconds = began.elapsed().as_secs_f64();
    let sent = sender.join().map_err(|_| io::Error::other("the sender crashed"))??;
    if sent != received {
        return Ok(Probed::Wrong(format!("{received} bytes came back of {sent}")));
    }
    Ok(Probed::Done(vec![
        Measured { what: What::Stream, value: received as f64 / seconds },
        Measured { what: What::RoundTrip, value: round_trip },
    ]))
}

/// The median of several round trips, in seconds.
fn pings(stream: &mut TcpStream) -> io::Result<f64> {
    let mut times = Vec::with_capacity(PINGS);
    let mut ping = [0; PING];
    for _ in 0..PINGS {
        let began = Instant::now();
        stream.write_all(&ping)?;
        stream.read_exact(&mut ping)?;
        times.push(began.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[PINGS / 2])
}

/// Sends the pattern until the window is over; returns the number of bytes.
fn send(stream: &mut TcpStream, began: Instant) -> io::Result<u64> {
    let (mut block, mut sent) = (vec![0; BLOCK], 0);
    while began.elapsed() < WINDOW {
        fill(&mut block, PING as u64, sent);
        stream.write_all(&block)?;
        sent += BLOCK as u64;
    }
    stream.shutdown(Shutdown::Write)?;
    Ok(sent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(answer: impl FnOnce(TcpStream) + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || answer(listener.accept().unwrap().0));
        address
    }

    #[test]
    fn what_is_sent_comes_back_and_is_measured() {
        let Probed::Done(measured) = loopback() else { panic!("not done") };
        assert!(measured.iter().all(|measured| measured.value > 0.0), "{measured:?}");
    }

    #[test]
    fn a_peer_without_echo_is_untried_and_one_that_is_gone_refuses() {
        let other = server(|mut stream| {
            let _ = stream.write_all(b"HTTP/1.1 400 no\r\n");
        });
        assert!(matches!(ask(&other), Probed::Untried(_)));
        let gone = {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().to_string()
        };
        assert!(matches!(ask(&gone), Probed::Refused(_)));
        assert!(matches!(ask("no address"), Probed::Untried(_)));
    }

    #[test]
    fn a_byte_that_comes_back_changed_is_wrong() {
        let address = server(|mut stream| {
            let mut hello = [0; HELLO.len()];
            stream.read_exact(&mut hello).unwrap();
            stream.write_all(&hello).unwrap();
            let mut ping = [0; PING];
            for _ in 0..PINGS {
                stream.read_exact(&mut ping).unwrap();
                stream.write_all(&ping).unwrap();
            }
            stream.read_exact(&mut ping).unwrap();
            ping[9] ^= 1;
            let _ = stream.write_all(&ping);
            let _ = io::copy(&mut stream, &mut io::sink());
        });
        let Probed::Wrong(answer) = ask(&address) else { panic!("a changed byte was not noticed") };
        testing::snapshot!("errors", "echo: a byte that comes back changed is wrong", answer);
    }
}

//! The connections of a TCP listener. Their number is limited for each source and in all. A new one beyond a limit
//! closes the one that has been silent for longest: connections that only exist keep no probe and no scraper out.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::socket::{Shutdown, shutdown};

use super::connection_limits::{ALL, MAX_CONNECTIONS_PER_SOURCE, OnReceive};

/// The connections that are open.
#[derive(Clone, Debug, Default)]
pub(super) struct TcpConnections(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// By the number of the connection.
    open: Mutex<BTreeMap<u64, Open>>,
    /// Counts connections and receptions.
    turn: AtomicU64,
    /// Whether a closed connection was logged since there was last room: one line for each flood.
    is_reported: std::sync::atomic::AtomicBool,
}

#[derive(Debug)]
struct Open {
    source: IpAddr,
    fd: RawFd,
    /// The turn at which something was received last.
    received: Arc<AtomicU64>,
}

impl TcpConnections {
    /// Adds a connection of this address; closes another one if there are too many.
    pub(super) fn add(&self, address: IpAddr, socket: &impl AsRawFd) -> TcpConnection {
        let source = source_of(address);
        let number = self.0.turn.fetch_add(1, Ordering::Relaxed);
        let received = Arc::new(AtomicU64::new(number));
        let mut open = self.0.lock();
        let of_source = open.values().filter(|connection| connection.source == source).count();
        let is_full = of_source >= MAX_CONNECTIONS_PER_SOURCE || open.len() >= ALL;
        if is_full {
            let among = |of: &Open| of_source < MAX_CONNECTIONS_PER_SOURCE || of.source == source;
            let silent = open.iter().filter(|(_, of)| among(of));
            let silent =
                silent.min_by_key(|(_, of)| of.received.load(Ordering::Relaxed)).map(|(number, _)| *number);
            if let Some(silent) = silent.and_then(|number| open.remove(&number)) {
                // It is open: whoever closes it removes it from here first. Its reader sees the end.
                let _ = shutdown(silent.fd, Shutdown::Both);
            }
        }
        if is_full && !self.0.is_reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(%source, each = MAX_CONNECTIONS_PER_SOURCE, most = ALL, "the longest silent connections of callers of the API are closed: this address or all have the most");
        } else if !is_full {
            self.0.is_reported.store(false, Ordering::Relaxed);
        }
        open.insert(number, Open { source, fd: socket.as_raw_fd(), received: Arc::clone(&received) });
        TcpConnection { shared: Arc::clone(&self.0), number, received }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All addresses of the loopback network are the same host's.
fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        own if own.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        other => other,
    }
}

/// One of the connections. Must be dropped before its socket is closed.
#[derive(Debug)]
pub struct TcpConnection {
    shared: Arc<Shared>,
    number: u64,
    received: Arc<AtomicU64>,
}

impl OnReceive for TcpConnection {
    fn received(&self) {
        self.received.store(self.shared.turn.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Drop for TcpConnection {
    fn drop(&mut self) {
        self.shared.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// The two ends of a new connection.
    fn pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        caller.set_nonblocking(true).unwrap();
        (caller, listener.accept().unwrap().0)
    }

    fn is_open(mut caller: &TcpStream) -> bool {
        matches!(caller.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    #[test]
    fn a_new_connection_closes_the_one_of_its_source_that_is_silent_for_longest() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connections = TcpConnections::default();
        let add = |address: &str| {
            let (caller, socket) = pair(&listener);
            (connections.add(address.parse().unwrap(), &socket), caller, socket)
        };
        let other = add("192.0.2.1");
        let mut held: Vec<_> =
            (0..MAX_CONNECTIONS_PER_SOURCE).map(|number| add(&format!("127.0.{number}.1"))).collect();
        assert!(held.iter().all(|(_, caller, _)| is_open(caller)));
        held[0].0.received();
        held.push(add("::1"));
        let closed: Vec<_> = held.iter().map(|(_, caller, _)| !is_open(caller)).collect();
        assert_eq!(closed.iter().position(|closed| *closed), Some(1));
        assert_eq!(closed.iter().filter(|closed| **closed).count(), 1);
        assert!(is_open(&other.1), "another address has its own");
        drop((held, other));
        assert!(connections.0.lock().is_empty());
    }

    #[test]
    fn all_sources_together_are_bounded() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (_caller, socket) = pair(&listener);
        let connections = TcpConnections::default();
        let address = |number: usize| IpAddr::from([10, 0, (number / 100) as u8, (number % 100) as u8]);
        let _held: Vec<_> = (0..ALL + 5).map(|number| connections.add(address(number), &socket)).collect();
        assert_eq!(connections.0.lock().len(), ALL);
    }
}

//! Limits how many connections, or open calls, each source may have at once. A source that uses all of its places locks
//! out no other.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use nix::sys::resource::{Resource, getrlimit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// Connections of one source: one user on a Unix socket, one address elsewhere.
pub(super) const MAX_CONNECTIONS_PER_SOURCE: usize = 128;

/// Connections of all sources of one listener.
pub(super) const ALL: usize = 1024;

/// The share of the files that this process may have open which the connections of a listener get at most: a launcher
/// without file descriptors starts no ranks.
const SHARE_OF_FILES: u64 = 4;

/// The connections that are open, by source.
#[derive(Debug)]
pub(super) struct ConnectionLimits<S> {
    taken: Arc<Mutex<BTreeMap<S, usize>>>,
    each: usize,
    all: usize,
    /// Whether a refusal was logged since there was last room: one line for each flood.
    is_reported: bool,
}

impl<S: Ord + Copy + Display> ConnectionLimits<S> {
    /// For the connections of a listener.
    pub(super) fn of_a_listener() -> ConnectionLimits<S> {
        let (each, all) = limits(getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(files, _)| files));
        ConnectionLimits::new(each, all)
    }

    pub(super) fn new(each: usize, all: usize) -> ConnectionLimits<S> {
        ConnectionLimits { taken: Arc::default(), each, all, is_reported: false }
    }

    /// A place for one more connection of this source, until it is dropped. Sources with `is_free` have places in
    /// addition to the limit of all: an operator can connect when others have used up everything.
    pub(super) fn take(&mut self, source: S, is_free: bool) -> Option<ConnectionPermit<S>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = taken.values().sum();
        let of_source = taken.entry(source).or_insert(0);
        if *of_source >= self.each || (all >= self.all && !is_free) {
            if *of_source == 0 {
                taken.remove(&source);
            }
            if !self.is_reported {
                let (each, most) = (self.each, self.all);
                tracing::warn!(%source, each, most, "a caller of the API was turned away: it or all callers have the most connections or open calls");
                self.is_reported = true;
            }
            return None;
        }
        *of_source += 1;
        self.is_reported = false;
        Some(ConnectionPermit { taken: Arc::clone(&self.taken), source })
    }
}

/// The connections of one source and of all in a process that may have this many files open.
fn limits(files: u64) -> (usize, usize) {
    let most = usize::try_from(files / SHARE_OF_FILES).unwrap_or(usize::MAX);
    (MAX_CONNECTIONS_PER_SOURCE.min(most), ALL.min(most))
}

/// One connection's place.
#[derive(Debug)]
pub struct ConnectionPermit<S: Ord> {
    taken: Arc<Mutex<BTreeMap<S, usize>>>,
    source: S,
}

impl<S: Ord> Drop for ConnectionPermit<S> {
    fn drop(&mut self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_source) = taken.get_mut(&self.source) {
            *of_source -= 1;
            if *of_source == 0 {
                taken.remove(&self.source);
            }
        }
    }
}

/// The place of a connection, which is told when something was received.
pub trait OnReceive {
    /// Something was received.
    fn received(&self) {}
}

impl<S: Ord> OnReceive for ConnectionPermit<S> {}

/// A connection that holds its place. The place is given back first.
#[derive(Debug)]
pub struct Placed<IO, P> {
    place: P,
    inner: IO,
}

impl<IO, P> Placed<IO, P> {
    pub(super) fn new(inner: IO, place: P) -> Placed<IO, P> {
        Placed { place, inner }
    }
}

impl<IO: Connected, P> Connected for Placed<IO, P> {
    type ConnectInfo = IO::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
    }
}

impl<IO: AsyncRead + Unpin, P: OnReceive + Unpin> AsyncRead for Placed<IO, P> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.place.received();
        }
        polled
    }
}

impl<IO: AsyncWrite + Unpin, P: Unpin> AsyncWrite for Placed<IO, P> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL, ConnectionLimits, MAX_CONNECTIONS_PER_SOURCE, limits};

    #[test]
    fn a_source_that_takes_all_of_its_places_keeps_no_other_out() {
        let mut places = ConnectionLimits::new(2, 3);
        let held = [places.take(7, false), places.take(7, false)];
        assert!(held.iter().all(Option::is_some));
        assert!(places.take(7, false).is_none());
        let other = places.take(8, false);
        assert!(other.is_some());
        assert!(places.take(9, false).is_none(), "all places are taken");
        let free = places.take(9, true);
        assert!(free.is_some(), "but for those who have places of their own");
        drop((held, other, free));
        assert!(places.take(7, false).is_some());
        assert_eq!(places.taken.lock().unwrap().len(), 0, "a source without connections is forgotten");
    }

    #[test]
    fn connections_leave_file_descriptors_for_other_work() {
        assert_eq!(limits(64), (16, 16));
        assert_eq!(limits(1024), (MAX_CONNECTIONS_PER_SOURCE, 256));
        assert_eq!(limits(u64::MAX), (MAX_CONNECTIONS_PER_SOURCE, ALL));
    }
}

//! What the callers of one listener may hold at once: each source a share, and all together a limit. A source that has
//! used up its share waits for itself and keeps no other out.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::http::Extensions;
use tokio::sync::Notify;
use tonic::transport::server::UdsConnectInfo;

use super::certificate::TcpCallerInfo;

/// Who calls: one user on a Unix socket, one address elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    User(u32),
    Address(IpAddr),
    /// A connection about which the kernel says nothing.
    Unknown,
}

impl Source {
    /// The source of a request, by its connection.
    pub(super) fn from_connection(request: &Extensions) -> Source {
        let user = request.get::<UdsConnectInfo>().and_then(|connection| connection.peer_cred);
        let address = || request.get::<TcpCallerInfo>().and_then(|caller| caller.address);
        match user {
            Some(credentials) => Source::User(credentials.uid()),
            None => address().map_or(Source::Unknown, |address| Source::Address(address.ip())),
        }
    }

    /// Whether the limit of all sources does not apply: an operator is answered when others have used up everything.
    pub(super) fn is_free(self) -> bool {
        matches!(self, Source::User(uid) if uid == 0 || uid == nix::unistd::geteuid().as_raw())
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::User(uid) => write!(f, "user {uid}"),
            Source::Address(address) => address.fmt(f),
            Source::Unknown => f.write_str("an unknown caller"),
        }
    }
}

/// The shares of all sources. Clones are the same shares.
#[derive(Clone, Debug)]
pub(super) struct Shares(Arc<ShareState>);

#[derive(Debug)]
struct ShareState {
    each: usize,
    all: usize,
    taken: Mutex<BTreeMap<Source, usize>>,
    /// Something was given back.
    returned: Notify,
    /// The most that was taken since [`Shares::is_drained`] last reported.
    peak: AtomicUsize,
    /// Nothing is taken any more.
    drained: Notify,
}

/// Users of this host are few, so each may take this part of its share also when all is used up.
const GUARANTEED: usize = 8;

impl Shares {
    pub(super) fn new(each: usize, all: usize) -> Shares {
        Shares(Arc::new(ShareState {
            each,
            all,
            taken: Mutex::default(),
            returned: Notify::new(),
            peak: AtomicUsize::new(0),
            drained: Notify::new(),
        }))
    }

    /// Takes this much, once it is available. A source that holds nothing may take more than its share.
    pub(super) async fn take(&self, source: Source, amount: usize) -> Share {
        loop {
            let mut returned = std::pin::pin!(self.0.returned.notified());
            // Before the check: what is returned after it wakes this.
            returned.as_mut().enable();
            if let Some(share) = self.try_take(source, amount) {
                return share;
            }
            returned.await;
        }
    }

    /// Takes this much, if it is available now.
    pub(super) fn try_take(&self, source: Source, amount: usize) -> Option<Share> {
        {
            let taken = self.0.taken();
            let all: usize = taken.values().sum();
            let own = taken.get(&source).copied().unwrap_or(0);
            let has_room = own == 0 || own.saturating_add(amount) <= self.0.each;
            let guaranteed = match source {
                Source::User(_) => self.0.each / GUARANTEED,
                Source::Address(_) | Source::Unknown => 0,
            };
            let have_room = all == 0
                || all.saturating_add(amount) <= self.0.all
                || source.is_free()
                || own.saturating_add(amount) <= guaranteed;
            if !(has_room && have_room) {
                return None;
            }
        }
        Some(self.add(source, amount))
    }

    /// Takes this much in any case: it is held already.
    pub(super) fn add(&self, source: Source, amount: usize) -> Share {
        let mut taken = self.0.taken();
        *taken.entry(source).or_insert(0) += amount;
        self.0.peak.fetch_max(taken.values().sum(), Ordering::Relaxed);
        drop(taken);
        Share { of: Arc::clone(&self.0), source, amount }
    }
}

impl Shares {
    /// Waits until all is given back, after at least this much was taken.
    pub(super) async fn is_drained(&self, least: usize) {
        loop {
            self.0.drained.notified().await;
            if self.0.peak.load(Ordering::Relaxed) >= least && self.0.taken().is_empty() {
                self.0.peak.store(0, Ordering::Relaxed);
                return;
            }
        }
    }
}

impl ShareState {
    fn taken(&self) -> MutexGuard<'_, BTreeMap<Source, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a source has taken, until this is dropped.
#[derive(Debug)]
pub(super) struct Share {
    of: Arc<ShareState>,
    source: Source,
    amount: usize,
}

impl Share {
    /// Gives back all but this much.
    pub(super) fn shrink(&mut self, amount: usize) {
        let surplus = self.amount.saturating_sub(amount);
        self.amount -= surplus;
        let mut taken = self.of.taken();
        if let Some(of_source) = taken.get_mut(&self.source) {
            *of_source -= surplus;
            if *of_source == 0 {
                taken.remove(&self.source);
            }
        }
        let is_empty = taken.is_empty();
        drop(taken);
        self.of.returned.notify_waiters();
        if is_empty {
            // Kept for a waiter that comes later.
            self.of.drained.notify_one();
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Source = Source::User(61_001);
    const B: Source = Source::User(61_002);

    #[test]
    fn a_source_that_uses_up_its_share_keeps_no_other_out() {
        let shares = Shares::new(80, 100);
        let held = [shares.try_take(A, 50), shares.try_take(A, 30)];
        assert!(held.iter().all(Option::is_some));
        assert!(shares.try_take(A, 1).is_none());
        let other = shares.try_take(B, 20);
        assert!(other.is_some() && shares.try_take(Source::Unknown, 1).is_none(), "all is used up");
        assert!(shares.try_take(Source::User(61_003), 10).is_some(), "but for a part that each user has");
        assert!(shares.try_take(Source::User(0), 80).is_some(), "and for operators");
        drop((held, other));
        assert!(shares.try_take(Source::Unknown, 1000).is_some(), "alone, more than a share is possible");
        assert!(shares.0.taken().is_empty(), "a source that holds nothing is forgotten");
    }

    #[tokio::test]
    async fn the_end_of_much_is_reported_and_that_of_little_is_not() {
        let shares = Shares::new(100, 100);
        let is_drained = async |shares: &Shares| {
            // All that it waits for has happened.
            tokio::select! {
                biased;
                () = shares.is_drained(50) => true,
                () = std::future::ready(()) => false,
            }
        };
        drop(shares.try_take(A, 49));
        assert!(!is_drained(&shares).await);
        let (one, two) = (shares.try_take(A, 30), shares.try_take(B, 20));
        drop(one);
        assert!(!is_drained(&shares).await, "one is still held");
        drop(two);
        assert!(is_drained(&shares).await);
        drop(shares.try_take(A, 1));
        assert!(!is_drained(&shares).await, "it was reported");
    }

    #[tokio::test]
    async fn who_waits_goes_on_when_something_is_given_back() {
        let shares = Shares::new(10, 100);
        let mut held = shares.take(A, 10).await;
        let waiting = tokio::spawn({
            let shares = shares.clone();
            async move { shares.take(A, 6).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        held.shrink(4);
        drop(waiting.await);
        assert!(shares.try_take(A, 7).is_none());
        assert!(shares.try_take(A, 6).is_some());
    }
}

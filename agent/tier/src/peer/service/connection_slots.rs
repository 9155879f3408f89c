//! Limits for connections of peers. Unauthenticated peers have few slots per address, so that one host without credentials
//! cannot block others.

use std::collections::{BTreeMap, HashMap};
use std::mem::{Discriminant, discriminant};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::lock;
use crate::peer::error::PeerError;

/// Maximum number of connections served at once.
const MAX_CONNECTIONS: usize = 256;

/// Maximum number of unauthenticated connections per address. More if several peers have that address, as several
/// launchers on one host do, since each of them may connect at the same moment.
const MAX_GREETING_EACH: usize = 16;

/// Maximum number of unauthenticated connections of all addresses. No address has more than half of them.
const MAX_GREETING: usize = 128;

fn max_greeting(peers: usize) -> usize {
    peers.clamp(MAX_GREETING_EACH, MAX_GREETING / 2)
}

/// The slots of a service.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionSlots(Arc<Mutex<TakenSlots>>);

#[derive(Debug, Default)]
struct TakenSlots {
    all: usize,
    greeting: BTreeMap<Option<IpAddr>, usize>,
}

impl ConnectionSlots {
    /// A slot for one more connection from this address, which has `peers` peers. It is held until it is dropped.
    pub(super) fn take(&self, host: Option<IpAddr>, peers: usize) -> Option<ConnectionSlot> {
        let mut taken = lock(&self.0);
        let greeting: usize = taken.greeting.values().sum();
        let each = taken.greeting.get(&host).copied().unwrap_or(0);
        if taken.all >= MAX_CONNECTIONS || greeting >= MAX_GREETING || each >= max_greeting(peers) {
            return None;
        }
        taken.all += 1;
        taken.greeting.insert(host, each + 1);
        Some(ConnectionSlot { slots: self.clone(), host, is_greeting: true })
    }
}

/// The slot of one connection. It is released even if its thread panics.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    slots: ConnectionSlots,
    host: Option<IpAddr>,
    is_greeting: bool,
}

impl ConnectionSlot {
    /// Records that the other side is authenticated.
    pub(super) fn mark_authenticated(&mut self) {
        if std::mem::take(&mut self.is_greeting) {
            let mut taken = lock(&self.slots.0);
            taken.end_greeting(self.host);
        }
    }
}

impl TakenSlots {
    fn end_greeting(&mut self, host: Option<IpAddr>) {
        if let Some(each) = self.greeting.get_mut(&host) {
            *each -= 1;
            if *each == 0 {
                self.greeting.remove(&host);
            }
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut taken = lock(&self.slots.0);
        taken.all -= 1;
        if self.is_greeting {
            taken.end_greeting(self.host);
        }
    }
}

// Refused peers: reported once, not every second as long as a configuration is wrong.

/// Time after which the same refusal of the same host is reported again.
const REPORT_INTERVAL: Duration = Duration::from_secs(600);

/// Maximum number of remembered refusals; beyond that, peers with ever new addresses are reported each time.
const MAX_REFUSALS: usize = 256;

/// The refused host and the reason.
type RefusedPeer = (Option<IpAddr>, Discriminant<PeerError>);

/// Recent refusals.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<HashMap<RefusedPeer, Instant>>);

impl Refusals {
    /// Whether to report that `host` was refused for this reason.
    pub(super) fn is_news(&self, host: Option<IpAddr>, why: &PeerError, now: Instant) -> bool {
        let mut recent = lock(&self.0);
        recent.retain(|_, since| now.saturating_duration_since(*since) < REPORT_INTERVAL);
        let what = (host, discriminant(why));
        let is_news = !recent.contains_key(&what);
        if is_news && recent.len() < MAX_REFUSALS {
            recent.insert(what, now);
        }
        is_news
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::{ConnectionSlot, ConnectionSlots, MAX_CONNECTIONS, MAX_GREETING, MAX_GREETING_EACH};

    fn host(last: u8) -> Option<IpAddr> {
        Some(Ipv4Addr::new(10, 0, 0, last).into())
    }

    #[test]
    fn a_host_that_never_authenticates_does_not_block_others() {
        let slots = ConnectionSlots::default();
        let silent: Vec<ConnectionSlot> =
            (0..MAX_GREETING_EACH).map(|_| slots.take(host(1), 1).unwrap()).collect();
        assert!(slots.take(host(1), 1).is_none());
        let mut other = slots.take(host(2), 1).unwrap();
        other.mark_authenticated();
        drop(silent);
        assert!(slots.take(host(1), 1).is_some());
    }

    #[test]
    fn all_peers_of_one_address_may_greet_at_the_same_moment() {
        let slots = ConnectionSlots::default();
        let peers = MAX_GREETING / 2;
        let greeting: Vec<ConnectionSlot> = (0..peers).map(|_| slots.take(host(1), peers).unwrap()).collect();
        assert!(slots.take(host(1), 10 * peers).is_none(), "half is left for others");
        assert!(slots.take(host(2), 0).is_some());
        drop(greeting);
    }

    #[test]
    fn slots_are_released_after_a_panic() {
        let slots = ConnectionSlots::default();
        for _ in 0..MAX_CONNECTIONS + 1 {
            let slot = slots.take(host(1), 1).unwrap();
            let thread = std::thread::spawn(move || {
                let _slot = slot;
                std::panic::panic_any("as a parser might");
            });
            assert!(thread.join().is_err());
        }
        let mut known: Vec<ConnectionSlot> = Vec::new();
        while let Some(mut slot) = slots.take(host(1), 1) {
            slot.mark_authenticated();
            known.push(slot);
        }
        assert_eq!(known.len(), MAX_CONNECTIONS);
    }
}

#[cfg(test)]
mod refusals_tests {
    use super::*;

    #[test]
    fn the_same_refusal_is_reported_once_in_a_while_and_another_at_once() {
        let (refusals, begin) = (Refusals::default(), Instant::now());
        let peer = || "10.0.0.1:40000".to_owned();
        let (wrong, plain) =
            (PeerError::WrongToken { peer: peer() }, PeerError::SpeaksPlainly { peer: peer() });
        let (one, other) = (Some(IpAddr::from([10, 0, 0, 1])), Some(IpAddr::from([10, 0, 0, 2])));
        assert!(refusals.is_news(one, &wrong, begin));
        assert!(!refusals.is_news(one, &wrong, begin + REPORT_INTERVAL / 2));
        assert!(refusals.is_news(one, &plain, begin) && refusals.is_news(other, &wrong, begin));
        assert!(refusals.is_news(one, &wrong, begin + REPORT_INTERVAL));
        // The number of remembered refusals is limited.
        for host in 0..2_000_u32 {
            refusals.is_news(Some(IpAddr::from(host.to_be_bytes())), &wrong, begin + REPORT_INTERVAL);
        }
        assert_eq!(refusals.0.lock().unwrap().len(), MAX_REFUSALS);
    }
}

//! Limits for connections of peers. Unauthenticated peers have few slots per address, so that one host without credentials
//! cannot block others.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of connections served at once.
const ALL: usize = 256;

/// Maximum number of unauthenticated connections per address. More if several peers have that address, as several
/// launchers on one host do, since each of them may connect at the same moment.
const GREETING_EACH: usize = 16;

/// Maximum number of unauthenticated connections of all addresses. No address has more than half of them.
const GREETING: usize = 128;

fn greeting_of(peers: usize) -> usize {
    peers.clamp(GREETING_EACH, GREETING / 2)
}

/// The slots of a service.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionSlots(Arc<Mutex<Taken>>);

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    greeting: BTreeMap<Option<IpAddr>, usize>,
}

impl ConnectionSlots {
    /// A slot for one more connection from this address, which has `peers` peers. It is held until it is dropped.
    pub(super) fn take(&self, host: Option<IpAddr>, peers: usize) -> Option<ConnectionSlot> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let greeting: usize = taken.greeting.values().sum();
        let each = taken.greeting.get(&host).copied().unwrap_or(0);
        if taken.all >= ALL || greeting >= GREETING || each >= greeting_of(peers) {
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
    pub(super) fn is_known(&mut self) {
        if std::mem::take(&mut self.is_greeting) {
            let mut taken = self.slots.0.lock().unwrap_or_else(PoisonError::into_inner);
            taken.greeted(self.host);
        }
    }
}

impl Taken {
    fn greeted(&mut self, host: Option<IpAddr>) {
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
        let mut taken = self.slots.0.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        if self.is_greeting {
            taken.greeted(self.host);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::{ALL, ConnectionSlot, ConnectionSlots, GREETING, GREETING_EACH};

    fn host(last: u8) -> Option<IpAddr> {
        Some(Ipv4Addr::new(10, 0, 0, last).into())
    }

    #[test]
    fn a_host_that_never_authenticates_does_not_block_others() {
        let slots = ConnectionSlots::default();
        let silent: Vec<ConnectionSlot> =
            (0..GREETING_EACH).map(|_| slots.take(host(1), 1).unwrap()).collect();
        assert!(slots.take(host(1), 1).is_none());
        let mut other = slots.take(host(2), 1).unwrap();
        other.is_known();
        drop(silent);
        assert!(slots.take(host(1), 1).is_some());
    }

    #[test]
    fn all_peers_of_one_address_may_greet_at_the_same_moment() {
        let slots = ConnectionSlots::default();
        let peers = GREETING / 2;
        let greeting: Vec<ConnectionSlot> = (0..peers).map(|_| slots.take(host(1), peers).unwrap()).collect();
        assert!(slots.take(host(1), 10 * peers).is_none(), "half is left for others");
        assert!(slots.take(host(2), 0).is_some());
        drop(greeting);
    }

    #[test]
    fn slots_are_released_after_a_panic() {
        let slots = ConnectionSlots::default();
        for _ in 0..ALL + 1 {
            let slot = slots.take(host(1), 1).unwrap();
            let thread = std::thread::spawn(move || {
                let _slot = slot;
                std::panic::panic_any("as a parser might");
            });
            assert!(thread.join().is_err());
        }
        let mut known: Vec<ConnectionSlot> = Vec::new();
        while let Some(mut slot) = slots.take(host(1), 1) {
            slot.is_known();
            known.push(slot);
        }
        assert_eq!(known.len(), ALL);
    }
}

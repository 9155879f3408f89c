//! Refused peers: reported once, not every second as long as a configuration is wrong.

use std::collections::HashMap;
use std::mem::{Discriminant, discriminant};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::peer::error::PeerError;

/// Time after which the same refusal of the same host is reported again.
const AGAIN: Duration = Duration::from_secs(600);

/// Maximum number of remembered refusals; beyond that, peers with ever new addresses are reported each time.
const MOST: usize = 256;

/// The refused host and the reason.
type Refused = (Option<IpAddr>, Discriminant<PeerError>);

/// Recent refusals.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<HashMap<Refused, Instant>>);

impl Refusals {
    /// Whether to report that `host` was refused for this reason.
    pub(super) fn is_news(&self, host: Option<IpAddr>, why: &PeerError, now: Instant) -> bool {
        let mut reported = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        reported.retain(|_, since| now.saturating_duration_since(*since) < AGAIN);
        let what = (host, discriminant(why));
        let is_news = !reported.contains_key(&what);
        if is_news && reported.len() < MOST {
            reported.insert(what, now);
        }
        is_news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_refusal_is_reported_once_in_a_while_and_another_at_once() {
        let (refusals, begin) = (Refusals::default(), Instant::now());
        let peer = || "10.0.0.1:40000".to_owned();
        let (wrong, plain) =
            (PeerError::WrongToken { peer: peer() }, PeerError::SpeaksPlainly { peer: peer() });
        let (one, other) = (Some(IpAddr::from([10, 0, 0, 1])), Some(IpAddr::from([10, 0, 0, 2])));
        assert!(refusals.is_news(one, &wrong, begin));
        assert!(!refusals.is_news(one, &wrong, begin + AGAIN / 2));
        assert!(refusals.is_news(one, &plain, begin) && refusals.is_news(other, &wrong, begin));
        assert!(refusals.is_news(one, &wrong, begin + AGAIN));
        // The number of remembered refusals is limited.
        for host in 0..2_000_u32 {
            refusals.is_news(Some(IpAddr::from(host.to_be_bytes())), &wrong, begin + AGAIN);
        }
        assert_eq!(refusals.0.lock().unwrap().len(), MOST);
    }
}

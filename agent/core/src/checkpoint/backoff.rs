//! How fast replicas may go while training uses the same links: less when the links show that they are full, a little more each time
//! that they do not. Additive increase, multiplicative decrease (Chiu and Jain, 1989), by the delay and the losses that the sender's
//! own connections see.

/// The least share of the limit: replicas that never come are of no use.
pub const LEAST: f64 = 1.0 / 16.0;

/// What is left of the share after a sign of a full link.
const DECREASE: f64 = 0.7;

/// What is added to the share after a look without one.
const INCREASE: f64 = 0.02;

/// Looks are that far apart at least, milliseconds: what was changed must be seen first.
const APART_MS: u64 = 100;

/// A round trip that takes so much longer than the shortest one, also less its usual deviation, is a sign of a full link: the queue of one
/// is there for all packets, a late acknowledgement (RFC 1122, 4.2.3.2) for the last one of many...
const LONGER: f64 = 2.0;

/// ...if that is more than so many microseconds: within a host, and with a processor that is busy, it comes to that easily.
const AT_LEAST_US: u32 = 2_000;

/// By so much the shortest round trip is forgotten with each look, for paths change.
const FORGET: f64 = 1.001;

/// What a connection shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionSample {
    /// Its round trip, smoothed, microseconds.
    pub round_trip_us: u32,
    /// The mean deviation of its round trips, microseconds.
    pub deviation_us: u32,
    /// Segments that it has sent again since it began.
    pub sent_again: u32,
}

/// The share of a limit that one connection may use at present.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    share: f64,
    shortest_us: f64,
    sent_again: u32,
    looked_ms: Option<u64>,
}

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff { share: 1.0, shortest_us: f64::INFINITY, sent_again: 0, looked_ms: None }
    }
}

impl Backoff {
    /// The share, from [`LEAST`] to 1.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// A new connection: what it has sent again begins at none; the link is the same.
    pub fn reconnected(&mut self) {
        self.sent_again = 0;
    }

    /// Sees what a connection shows at `now`, in milliseconds.
    pub fn saw(&mut self, now_ms: u64, signs: ConnectionSample) {
        let round_trip = f64::from(signs.round_trip_us);
        if signs.round_trip_us > 0 {
            self.shortest_us = (self.shortest_us * FORGET).min(round_trip);
        }
        if self.looked_ms.is_some_and(|before| now_ms < before.saturating_add(APART_MS)) {
            return;
        }
        self.looked_ms = Some(now_ms);
        let at_least = round_trip - f64::from(signs.deviation_us);
        let is_late =
            at_least > LONGER * self.shortest_us && at_least > self.shortest_us + f64::from(AT_LEAST_US);
        let is_lossy = signs.sent_again > self.sent_again;
        self.sent_again = signs.sent_again;
        self.share = if is_late || is_lossy { self.share * DECREASE } else { self.share + INCREASE };
        self.share = self.share.clamp(LEAST, 1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signs(round_trip_us: u32, sent_again: u32) -> ConnectionSample {
        ConnectionSample { round_trip_us, deviation_us: 0, sent_again }
    }

    /// So many looks, as far apart as they are to be.
    fn after(backoff: &mut Backoff, from: u64, looks: u64, what: impl Fn(u64) -> ConnectionSample) -> f64 {
        (0..looks).for_each(|look| backoff.saw((from + look) * APART_MS, what(look)));
        backoff.share()
    }

    #[test]
    fn a_quiet_link_is_used_in_full() {
        let mut backoff = Backoff::default();
        assert_eq!(after(&mut backoff, 0, 100, |look| signs(100 + look as u32 % 7, 0)), 1.0);
        assert_eq!(
            after(&mut backoff, 100, 100, |_| signs(1_500, 0)),
            1.0,
            "a busy processor is no full link"
        );
    }

    #[test]
    fn a_queue_or_a_loss_halves_it_in_two_looks_and_quiet_brings_it_back_slowly() {
        let mut backoff = Backoff::default();
        after(&mut backoff, 0, 10, |_| signs(500, 0));
        assert!(after(&mut backoff, 10, 2, |_| signs(9_000, 0)) < 0.5);
        assert!(after(&mut backoff, 12, 2, |_| signs(500, 0)) < 0.6);
        assert_eq!(after(&mut backoff, 14, 40, |_| signs(500, 0)), 1.0);
        assert!(after(&mut backoff, 54, 2, |look| signs(500, 1 + look as u32)) < 0.5);
        let lost = after(&mut backoff, 56, 1, |_| signs(500, 2));
        assert!(lost > 0.5, "what was lost before is no sign of now: {lost}");
    }

    #[test]
    fn a_few_late_acknowledgements_are_no_full_link() {
        let mut backoff = Backoff::default();
        after(&mut backoff, 0, 10, |_| signs(20, 0));
        // Seen on a busy host: one packet in eight was acknowledged after 40 ms, the others at once.
        let varies = |_| ConnectionSample { round_trip_us: 8_500, deviation_us: 7_400, sent_again: 0 };
        assert_eq!(after(&mut backoff, 10, 20, varies), 1.0);
        let queue = |_| ConnectionSample { round_trip_us: 8_500, deviation_us: 3_000, sent_again: 0 };
        assert!(after(&mut backoff, 30, 2, queue) < 0.5);
    }

    #[test]
    fn it_never_ends_and_follows_a_path_that_became_longer() {
        let mut backoff = Backoff::default();
        after(&mut backoff, 0, 10, |_| signs(500, 0));
        assert_eq!(after(&mut backoff, 10, 50, |_| signs(20_000, 0)), LEAST);
        assert_eq!(after(&mut backoff, 60, 5_000, |_| signs(20_000, 0)), 1.0);
    }

    #[test]
    fn looks_that_come_too_soon_change_nothing() {
        let mut backoff = Backoff::default();
        backoff.saw(0, signs(100, 0));
        (1..APART_MS).for_each(|now| backoff.saw(now, signs(90_000, 9)));
        assert_eq!(backoff.share(), 1.0);
    }
}

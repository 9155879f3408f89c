//! Limits the rate of replication while training uses the same links: lower at each sign of congestion, a little higher
//! without one. Additive increase, multiplicative decrease (Chiu and Jain, 1989), based on the delay and the losses of
//! the sender's own connections.

/// The minimum share of the limit: replicas that never arrive are useless.
pub const MIN_SHARE: f64 = 1.0 / 16.0;

/// Factor for the share after a sign of congestion.
const DECREASE: f64 = 0.7;

/// Increment of the share after a sample without one.
const INCREASE: f64 = 0.02;

/// Minimum time between two changes of the share, milliseconds: the effect of a change must be visible first.
const APART_MS: u64 = 100;

/// A link is congested if the round trip minus its mean deviation exceeds the shortest round trip by this factor. A
/// queue delays all packets, a delayed acknowledgement (RFC 1122, 4.2.3.2) only the last one of many...
const CONGESTED_FACTOR: f64 = 2.0;

/// ...and by this many microseconds: smaller delays are common within a host and on a busy processor.
const AT_LEAST_US: u32 = 2_000;

/// Growth factor of the shortest round trip per sample, because paths change.
const ROUND_TRIP_GROWTH: f64 = 1.001;

/// A sample of the state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionSample {
    /// The smoothed round trip time, microseconds.
    pub round_trip_us: u32,
    /// The mean deviation of the round trip time, microseconds.
    pub deviation_us: u32,
    /// Number of retransmitted segments since the connection was opened.
    pub sent_again: u32,
}

/// The share of a limit that one connection may currently use.
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
    /// The share, from [`MIN_SHARE`] to 1.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// Records a new connection on the same link: its count of retransmitted segments starts at zero.
    pub fn reconnected(&mut self) {
        self.sent_again = 0;
    }

    /// Records a sample of the connection at `now_ms`, milliseconds.
    pub fn record(&mut self, now_ms: u64, signs: ConnectionSample) {
        let round_trip = f64::from(signs.round_trip_us);
        if signs.round_trip_us > 0 {
            self.shortest_us = (self.shortest_us * ROUND_TRIP_GROWTH).min(round_trip);
        }
        if self.looked_ms.is_some_and(|before| now_ms < before.saturating_add(APART_MS)) {
            return;
        }
        self.looked_ms = Some(now_ms);
        let at_least = round_trip - f64::from(signs.deviation_us);
        let is_late = at_least > CONGESTED_FACTOR * self.shortest_us
            && at_least > self.shortest_us + f64::from(AT_LEAST_US);
        let is_lossy = signs.sent_again > self.sent_again;
        self.sent_again = signs.sent_again;
        self.share = if is_late || is_lossy { self.share * DECREASE } else { self.share + INCREASE };
        self.share = self.share.clamp(MIN_SHARE, 1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signs(round_trip_us: u32, sent_again: u32) -> ConnectionSample {
        ConnectionSample { round_trip_us, deviation_us: 0, sent_again }
    }

    /// The share after `looks` samples, each after the minimum time.
    fn after(backoff: &mut Backoff, from: u64, looks: u64, what: impl Fn(u64) -> ConnectionSample) -> f64 {
        (0..looks).for_each(|look| backoff.record((from + look) * APART_MS, what(look)));
        backoff.share()
    }

    #[test]
    fn an_idle_link_is_used_in_full() {
        let mut backoff = Backoff::default();
        assert_eq!(after(&mut backoff, 0, 100, |look| signs(100 + look as u32 % 7, 0)), 1.0);
        assert_eq!(
            after(&mut backoff, 100, 100, |_| signs(1_500, 0)),
            1.0,
            "a busy processor is not a congested link"
        );
    }

    #[test]
    fn two_samples_with_delay_or_loss_halve_the_share_and_it_recovers_slowly() {
        let mut backoff = Backoff::default();
        after(&mut backoff, 0, 10, |_| signs(500, 0));
        assert!(after(&mut backoff, 10, 2, |_| signs(9_000, 0)) < 0.5);
        assert!(after(&mut backoff, 12, 2, |_| signs(500, 0)) < 0.6);
        assert_eq!(after(&mut backoff, 14, 40, |_| signs(500, 0)), 1.0);
        assert!(after(&mut backoff, 54, 2, |look| signs(500, 1 + look as u32)) < 0.5);
        let lost = after(&mut backoff, 56, 1, |_| signs(500, 2));
        assert!(lost > 0.5, "an earlier loss counted again: {lost}");
    }

    #[test]
    fn a_few_delayed_acknowledgements_are_not_congestion() {
        let mut backoff = Backoff::default();
        after(&mut backoff, 0, 10, |_| signs(20, 0));
        // Measured on a busy host: one packet in eight was acknowledged after 40 ms, the others immediately.
        let varies = |_| ConnectionSample { round_trip_us: 8_500, deviation_us: 7_400, sent_again: 0 };
        assert_eq!(after(&mut backoff, 10, 20, varies), 1.0);
        let queue = |_| ConnectionSample { round_trip_us: 8_500, deviation_us: 3_000, sent_again: 0 };
        assert!(after(&mut backoff, 30, 2, queue) < 0.5);
    }

    #[test]
    fn the_share_keeps_its_minimum_and_adapts_to_a_longer_path() {
        let mut backoff = Backoff::default();
        after(&mut backoff, 0, 10, |_| signs(500, 0));
        assert_eq!(after(&mut backoff, 10, 50, |_| signs(20_000, 0)), MIN_SHARE);
        assert_eq!(after(&mut backoff, 60, 5_000, |_| signs(20_000, 0)), 1.0);
    }

    #[test]
    fn samples_that_arrive_too_soon_do_not_change_the_share() {
        let mut backoff = Backoff::default();
        backoff.record(0, signs(100, 0));
        (1..APART_MS).for_each(|now| backoff.record(now, signs(90_000, 9)));
        assert_eq!(backoff.share(), 1.0);
    }
}

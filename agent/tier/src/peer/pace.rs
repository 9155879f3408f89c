//! Rate limits: a token bucket over all replication, and the kernel's pacing for each connection.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use mainstay_checkpoint::backoff::Backoff;
use nix::libc;

use crate::lock;

/// Maximum silence while a chunk is sent slowly: the other side must not consider the sender dead.
const MAX_SILENCE: Duration = Duration::from_millis(250);

/// A peer waits this many times as long as one sender may be silent: several may share the limit and take turns.
const PEER_PATIENCE_FACTOR: u32 = 16;

/// A limit in bytes per second over all who share it.
#[derive(Debug)]
pub struct Limit {
    /// Bytes per second; 0: no limit.
    rate: u64,
    /// Bytes that may be sent at once.
    burst: u64,
    state: Mutex<Bucket>,
    /// State of the path to each peer, kept from one shard to the next.
    ways: Mutex<BTreeMap<String, Backoff>>,
}

#[derive(Debug)]
struct Bucket {
    /// Bytes that may be sent now; negative while sent bytes are being paid off.
    level: f64,
    at: Option<Instant>,
}

impl Limit {
    /// A limit of `rate` bytes per second; 0: no limit. A quarter of a second's worth may be sent at once.
    pub fn new(rate: u64) -> Limit {
        let burst = (rate / 4).max(1);
        let state = Mutex::new(Bucket { level: 0.0, at: None });
        Limit { rate, burst, state, ways: Mutex::default() }
    }

    /// Takes `bytes` from the bucket. Returns how long to wait before they are sent.
    pub fn take(&self, bytes: u64, now: Instant) -> Duration {
        if self.rate == 0 {
            return Duration::ZERO;
        }
        let mut bucket = lock(&self.state);
        let rate = self.rate as f64;
        let passed = bucket.at.map_or(0.25, |at| now.saturating_duration_since(at).as_secs_f64());
        bucket.at = Some(now);
        bucket.level = (bucket.level + passed * rate).min(self.burst as f64) - bytes as f64;
        if bucket.level >= 0.0 { Duration::ZERO } else { Duration::from_secs_f64(-bucket.level / rate) }
    }

    /// The known state of the path to a peer, for a new connection.
    pub(crate) fn way(&self, peer: &str) -> Backoff {
        let ways = lock(&self.ways);
        let mut way = ways.get(peer).copied().unwrap_or_default();
        way.reconnected();
        way
    }

    /// Stores the state of the path to a peer that a connection has measured.
    pub(crate) fn keep_way(&self, peer: &str, way: Backoff) {
        lock(&self.ways).insert(peer.to_owned(), way);
    }

    /// Same as [`Limit::take`], for a path of which only a share may be used.
    pub(crate) fn take_by(&self, way: &Backoff, bytes: u64, now: Instant) -> Duration {
        self.take((bytes as f64 / way.share()) as u64, now)
    }

    /// How many of the `left` bytes of a chunk may be taken at once for a peer that waits `stall` for the next bytes: few enough that
    /// it never waits that long.
    pub(crate) fn piece(&self, way: &Backoff, stall: Duration, left: u64) -> u64 {
        if self.rate == 0 {
            return left;
        }
        let silence = MAX_SILENCE.min(stall / PEER_PATIENCE_FACTOR).as_secs_f64();
        ((self.rate as f64 * way.share() * silence) as u64).clamp(1, left.max(1))
    }

    /// Bytes per second; 0: no limit.
    pub fn rate(&self) -> u64 {
        self.rate
    }
}

/// Lets the kernel spread the bytes of a connection over time, so that no bursts reach the switches. If the kernel cannot, only
/// the bucket limits.
pub(crate) fn pace(stream: &TcpStream, bytes_per_second: u64) {
    if let Ok(rate) = u32::try_from(bytes_per_second)
        && rate > 0
    {
        let length = libc::socklen_t::try_from(size_of::<u32>()).unwrap_or(4);
        // SAFETY: the descriptor is open as long as `stream` lives; the kernel reads `length` bytes of `rate`, which is a
        // u32, and keeps no pointer. Neither nix nor rustix has this option.
        let _ = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MAX_PACING_RATE,
                std::ptr::from_ref(&rate).cast(),
                length,
            )
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_checkpoint::backoff::ConnectionSample;

    #[test]
    fn the_average_over_many_takes_is_the_rate() {
        let limit = Limit::new(1000);
        let start = Instant::now();
        let mut now = start;
        for _ in 0..100 {
            now += limit.take(100, now);
        }
        let took = now.duration_since(start).as_secs_f64();
        assert!((9.7..=10.0).contains(&took), "{took}");
        assert_eq!(Limit::new(0).take(u64::MAX, now), Duration::ZERO);
    }

    #[test]
    fn at_any_rate_a_sender_is_silent_for_less_than_its_peer_waits() {
        let full = |look: u64| ConnectionSample {
            round_trip_us: if look == 0 { 100 } else { 50_000 },
            deviation_us: 1_000,
            sent_again: 0,
        };
        let mut slow = Backoff::default();
        (0..100).for_each(|look| slow.record(look * 100, full(look)));
        for (rate, stall_ms) in [(10_000, 10_000), (1 << 20, 500), (1 << 30, 10_000)] {
            for way in [Backoff::default(), slow] {
                let (limit, stall) = (Limit::new(rate), Duration::from_millis(stall_ms));
                let mut now = Instant::now();
                // Four connections take turns, each with its own chunk.
                let mut left = [4_u64 << 20; 4];
                while left.iter().any(|left| *left > 0) {
                    let mut longest = Duration::ZERO;
                    for left in left.iter_mut().filter(|left| **left > 0) {
                        let piece = limit.piece(&way, stall, *left);
                        longest = longest.max(limit.take_by(&way, piece, now));
                        *left -= piece;
                    }
                    assert!(longest <= stall / 2, "{longest:?} of {stall:?} at {rate}");
                    now += longest;
                }
            }
        }
        assert_eq!(Limit::new(0).piece(&slow, Duration::ZERO, 77), 77, "no limit, no pieces");
    }

    #[test]
    fn a_full_path_gets_its_share_and_is_remembered() {
        let limit = Limit::new(1000);
        let mut way = limit.way("peer");
        let full = |look: u64| ConnectionSample {
            round_trip_us: if look == 0 { 100 } else { 50_000 },
            deviation_us: 1_000,
            sent_again: 0,
        };
        (0..20).for_each(|look| way.record(look * 100, full(look)));
        limit.keep_way("peer", way);
        assert!(limit.way("peer").share() < 0.1);
        assert_eq!(limit.way("another").share(), 1.0);
        let (mut now, start) = (Instant::now(), Instant::now());
        for _ in 0..10 {
            now += limit.take_by(&way, 100, now);
        }
        assert!(now.duration_since(start).as_secs_f64() > 10.0, "a sixteenth of the rate");
    }

    #[test]
    fn a_connection_reports_its_round_trip_time() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let signs = crate::os::signs(&stream).unwrap();
        assert!(signs.round_trip_us > 0 && signs.sent_again == 0, "{signs:?}");
    }
}

//! How fast it may go: a bucket of tokens for all that is replicated, and the kernel's pacing for each connection.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::libc;

/// A limit in bytes a second over all who share it.
#[derive(Debug)]
pub struct Limit {
    /// Bytes a second; 0 for none.
    rate: u64,
    /// Bytes that may go at once.
    burst: u64,
    state: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    /// Bytes that may go now; below zero while what went is being paid off.
    level: f64,
    at: Option<Instant>,
}

impl Limit {
    /// A limit of `rate` bytes a second, without end if 0; a quarter of a second's worth may go at once.
    pub fn new(rate: u64) -> Limit {
        let burst = (rate / 4).max(1);
        Limit { rate, burst, state: Mutex::new(Bucket { level: 0.0, at: None }) }
    }

    /// Takes `bytes` and tells how long to wait before they are sent.
    pub fn take(&self, bytes: u64, now: Instant) -> Duration {
        if self.rate == 0 {
            return Duration::ZERO;
        }
        let mut bucket = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let rate = self.rate as f64;
        let passed = bucket.at.map_or(0.25, |at| now.saturating_duration_since(at).as_secs_f64());
        bucket.at = Some(now);
        bucket.level = (bucket.level + passed * rate).min(self.burst as f64) - bytes as f64;
        if bucket.level >= 0.0 { Duration::ZERO } else { Duration::from_secs_f64(-bucket.level / rate) }
    }

    /// Bytes a second, 0 for none.
    pub fn rate(&self) -> u64 {
        self.rate
    }
}

/// Lets the kernel spread what a connection sends over time, so that no bursts hit the switches. Where it cannot, the
/// bucket alone limits.
pub(crate) fn pace(stream: &TcpStream, bytes_per_second: u64) {
    if let Ok(rate) = u32::try_from(bytes_per_second)
        && rate > 0
    {
        let length = libc::socklen_t::try_from(size_of::<u32>()).unwrap_or(4);
        // SAFETY: the descriptor is open for as long as `stream` lives; the kernel reads `length` bytes of `rate`, which is a
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

    #[test]
    fn what_goes_over_many_takes_is_the_rate() {
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
}

//! Counters since the start.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sent shards.
    pub shards_sent: u64,
    /// Their bytes.
    pub bytes_sent: u64,
    /// Shards received for other hosts.
    pub shards_taken: u64,
    /// Their bytes.
    pub bytes_taken: u64,
    /// Failed tries to send.
    pub failures: u64,
    /// Copies that were found damaged.
    pub damaged: u64,
    /// Steps of which ranks saved different bytes although they declared them equal.
    pub divergences: u64,
}

/// The running counters.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) shards_sent: AtomicU64,
    pub(super) bytes_sent: AtomicU64,
    pub(super) shards_taken: AtomicU64,
    pub(super) bytes_taken: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) damaged: AtomicU64,
    pub(super) divergences: AtomicU64,
}

impl Counters {
    /// The current values.
    pub(super) fn now(&self) -> Counts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { shards_sent, bytes_sent, shards_taken, bytes_taken, failures, damaged, divergences } =
            self;
        Counts {
            shards_sent: of(shards_sent),
            bytes_sent: of(bytes_sent),
            shards_taken: of(shards_taken),
            bytes_taken: of(bytes_taken),
            failures: of(failures),
            damaged: of(damaged),
            divergences: of(divergences),
        }
    }
}

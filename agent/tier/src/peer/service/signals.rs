//! How the threads of a service wake each other.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::lock;

/// Signals between the threads.
#[derive(Debug)]
pub(super) struct Signals {
    stop: AtomicBool,
    nudged: Mutex<bool>,
    nudge: Condvar,
    changes: AtomicU64,
    /// Sizes of shards that may arrive soon.
    expected: Mutex<Vec<u64>>,
    expects: Condvar,
}

impl Default for Signals {
    /// The first look is due.
    fn default() -> Signals {
        Signals {
            stop: AtomicBool::new(false),
            nudged: Mutex::new(true),
            nudge: Condvar::new(),
            changes: AtomicU64::new(0),
            expected: Mutex::default(),
            expects: Condvar::new(),
        }
    }
}

impl Signals {
    /// Ends all threads.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake();
    }

    pub(super) fn stops(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Counts a possible change on this host: a step was sealed, a copy was added or removed, the peers changed.
    pub(super) fn count_change(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of possible changes.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    pub(super) fn wake(&self) {
        *lock(&self.nudged) = true;
        self.nudge.notify_all();
        drop(lock(&self.expected));
        self.expects.notify_all();
    }

    /// Waits for [`Signals::wake`], at most `longest`. Returns whether it was called.
    pub(super) fn wait(&self, longest: Duration) -> bool {
        let nudged = lock(&self.nudged);
        let waited = self.nudge.wait_timeout_while(nudged, longest, |nudged| !*nudged);
        let mut nudged = waited.unwrap_or_else(PoisonError::into_inner).0;
        std::mem::take(&mut *nudged)
    }

    /// Sets the sizes of shards that may arrive soon.
    pub(super) fn expect(&self, sizes: Vec<u64>) {
        *lock(&self.expected) = sizes;
        self.expects.notify_all();
    }

    /// Waits until the expected sizes differ from `seen`; none when the service stops.
    pub(super) fn expected_other_than(&self, seen: &[u64]) -> Option<Vec<u64>> {
        let sizes = lock(&self.expected);
        let same = |sizes: &mut Vec<u64>| sizes.as_slice() == seen && !self.stops();
        let sizes = self.expects.wait_while(sizes, same).unwrap_or_else(PoisonError::into_inner);
        (!self.stops()).then(|| sizes.clone())
    }
}

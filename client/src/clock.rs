//! The page's clock.

use nix::time::{ClockId, clock_gettime};

/// `CLOCK_MONOTONIC` in ns: answered by the vDSO without a system call.
#[inline]
pub(crate) fn now_ns() -> u64 {
    // This clock exists on every Linux; and a beat at time zero is better than none.
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

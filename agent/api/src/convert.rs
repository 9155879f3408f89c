//! Converts between the types of the core and of the API. Only this module knows both.

pub(super) mod checkpoint;
pub(super) mod device;
pub mod event;
pub(super) mod health;
pub mod preflight;
mod sentence;

use mainstay_model::time::{Mono, Span, Stamp, Wall};
use prost_types::{Duration, Timestamp};

const NANOS: i64 = 1_000_000_000;

pub(super) fn timestamp(wall: Wall) -> Timestamp {
    // The remainder of a division by 10^9 fits.
    Timestamp { seconds: wall.0.div_euclid(NANOS), nanos: wall.0.rem_euclid(NANOS) as i32 }
}

fn duration(span: Span) -> Duration {
    let seconds = i64::try_from(span.0 / NANOS as u64).unwrap_or(i64::MAX);
    Duration { seconds, nanos: (span.0 % NANOS as u64) as i32 }
}

/// The wall-clock time of a moment on the monotonic clock. None for a moment in the future: it is from an earlier
/// boot, whose monotonic clock counted differently.
fn wall_time(at: Mono, now: Stamp) -> Option<Timestamp> {
    let ago = age(at, now)?;
    let ago = i64::try_from(ago.0).ok()?;
    Some(timestamp(Wall(now.wall.0.saturating_sub(ago))))
}

fn age(at: Mono, now: Stamp) -> Option<Span> {
    (at <= now.mono).then(|| now.mono.since(at))
}

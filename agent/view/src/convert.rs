//! The API's messages from the types of the journal and of the view, and back: the only module that knows both.

pub mod books;
pub mod device;
pub mod event;
pub mod evidence;
pub mod failure;
pub mod health;
pub mod preflight;
mod sentence;

use mainstay_model::time::{Mono, Span, Stamp, Wall};
use prost_types::{Duration, Timestamp};
use serde::Serialize;

const NANOS: i64 = 1_000_000_000;

/// A wall-clock time as an API message.
pub fn timestamp(wall: Wall) -> Timestamp {
    // The remainder of a division by 10^9 fits.
    Timestamp { seconds: wall.0.div_euclid(NANOS), nanos: wall.0.rem_euclid(NANOS) as i32 }
}

/// A wall-clock time from an API message.
pub fn wall(time: &Timestamp) -> Wall {
    Wall(time.seconds.saturating_mul(NANOS).saturating_add(time.nanos.into()))
}

/// A duration as an API message.
pub fn duration(span: Span) -> Duration {
    let seconds = i64::try_from(span.0 / NANOS as u64).unwrap_or(i64::MAX);
    Duration { seconds, nanos: (span.0 % NANOS as u64) as i32 }
}

/// A duration from an API message; a negative one is 0.
pub fn span(duration: &Duration) -> Span {
    let nanoseconds = std::time::Duration::try_from(*duration).unwrap_or_default().as_nanos();
    Span(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
}

/// The name of a value in the journal.
fn serialized_name(value: &impl Serialize) -> String {
    let name = serde_json::to_value(value).ok();
    name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
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

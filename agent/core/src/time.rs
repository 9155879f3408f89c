//! Points and spans of time. There is no `now()` here: the shell reads the clock and passes it in.

use serde::{Deserialize, Serialize};

/// Nanoseconds of the host's `CLOCK_MONOTONIC`. Comparable within one boot of one host, and the only clock
/// that durations are computed from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Mono(pub u64);

impl Mono {
    /// A time that does not come.
    pub const NEVER: Mono = Mono(u64::MAX);

    /// The span since `earlier`; zero if `earlier` is in fact later.
    pub fn since(self, earlier: Mono) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }

    /// This point moved forward by `span`.
    pub fn after(self, span: Span) -> Mono {
        Mono(self.0.saturating_add(span.0))
    }
}

/// Nanoseconds since the Unix epoch, for people and for comparing hosts; it may jump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Wall(pub i64);

/// A length of time in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Span(pub u64);

impl Span {
    /// A span of whole seconds.
    pub const fn seconds(seconds: u64) -> Span {
        Span(seconds.saturating_mul(1_000_000_000))
    }

    /// A span of whole milliseconds.
    pub const fn millis(millis: u64) -> Span {
        Span(millis.saturating_mul(1_000_000))
    }

    /// The span in seconds, for people and figures.
    pub fn as_seconds(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// The sum, held at the largest span there is.
    pub fn plus(self, other: Span) -> Span {
        Span(self.0.saturating_add(other.0))
    }

    /// The difference, held at zero.
    pub fn minus(self, other: Span) -> Span {
        Span(self.0.saturating_sub(other.0))
    }
}

impl std::fmt::Display for Span {
    /// Milliseconds below one second, seconds above: "14 ms", "2.35 s".
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            ns if ns < 1_000_000_000 => write!(f, "{:.0} ms", ns as f64 / 1e6),
            ns => write!(f, "{:.2} s", ns as f64 / 1e9),
        }
    }
}

/// When something happened, on both clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// For durations and order on this host.
    pub mono: Mono,
    /// For people.
    pub wall: Wall,
}

//! Points and spans of time. There is no `now()` here: the caller reads the clock and passes the time.

use serde::{Deserialize, Serialize};

/// Nanoseconds of the host's `CLOCK_MONOTONIC`. Comparable within one boot of one host. The only clock used to compute durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Mono(pub u64);

impl Mono {
    /// A time that is never reached.
    pub const NEVER: Mono = Mono(u64::MAX);

    /// The span since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Mono) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }

    /// This point moved forward by `span`.
    pub fn after(self, span: Span) -> Mono {
        Mono(self.0.saturating_add(span.0))
    }
}

/// Nanoseconds since the Unix epoch, for display and for comparing hosts. It may jump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Wall(pub i64);

impl std::fmt::Display for Wall {
    /// In UTC: "2026-11-24 03:50:12 UTC".
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = self.0.div_euclid(1_000_000_000);
        let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        let (year, month, day) = civil(days);
        let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
        write!(f, "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
    }
}

/// Converts days since 1970-01-01 to year, month and day in the Gregorian calendar. The year starts in March internally, so that the
/// leap day is its last.
fn civil(days: i64) -> (i64, i64, i64) {
    const DAYS_OF_400_YEARS: i64 = 146_097;
    let shifted = days + 719_468; // Days from 0000-03-01 to 1970-01-01.
    let era = shifted.div_euclid(DAYS_OF_400_YEARS);
    let of_era = shifted.rem_euclid(DAYS_OF_400_YEARS);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// A duration in nanoseconds.
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

    /// Whether it has no length; by reference, as serde asks.
    pub fn is_zero(&self) -> bool {
        self.0 == 0
    }

    /// The span in seconds, for display.
    pub fn as_seconds(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// The sum, saturating at the maximum.
    pub fn plus(self, other: Span) -> Span {
        Span(self.0.saturating_add(other.0))
    }

    /// The difference, saturating at zero.
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
    /// For display.
    pub wall: Wall,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wall_clock_is_shown_in_utc() {
        let reported = |seconds: i64| Wall(seconds * 1_000_000_000).to_string();
        assert_eq!(reported(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(reported(951_827_696), "2000-02-29 12:34:56 UTC");
        assert_eq!(reported(1_795_492_212), "2026-11-24 03:50:12 UTC");
        assert_eq!(reported(-1), "1969-12-31 23:59:59 UTC");
    }
}

//! Points in time on the command line: `2h` (ago), a time such as `2026-11-29T12:00`, or `now`.

use mainstay_model::time::Wall;
use mainstay_model::units::Period;

/// A point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct When(pub(super) Wall);

impl When {
    /// Parses the written form; `now` is the present time.
    fn read(text: &str, now: Wall) -> Result<When, String> {
        if text == "now" {
            return Ok(When(now));
        }
        if let Ok(Period(ago)) = Period::parse(text) {
            return Ok(When(Wall(now.0.saturating_sub_unsigned(ago.0))));
        }
        let with_zone = text.parse::<jiff::Timestamp>().ok();
        let local = || {
            let civil = text.parse::<jiff::civil::DateTime>().ok()?;
            Some(civil.to_zoned(jiff::tz::TimeZone::system()).ok()?.timestamp())
        };
        let time = with_zone.or_else(local).ok_or_else(|| {
            format!(
                "{text:?} is not a time: write how long ago (2h, 7d), or 2026-11-29T12:00, or add Z for UTC"
            )
        })?;
        Ok(When(Wall(i64::try_from(time.as_nanosecond()).unwrap_or(i64::MAX))))
    }
}

impl std::str::FromStr for When {
    type Err = String;

    fn from_str(text: &str) -> Result<When, String> {
        When::read(text, mainstay_sys::clock::now().wall)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_how_long_ago_or_a_date() {
        const HOUR: i64 = 3_600_000_000_000;
        let now = Wall(1_796_000_000 * 1_000_000_000);
        let read = |text| When::read(text, now);
        assert_eq!(read("now"), Ok(When(now)));
        assert_eq!(read("2h"), Ok(When(Wall(now.0 - 2 * HOUR))));
        assert_eq!(read("7d"), Ok(When(Wall(now.0 - 7 * 24 * HOUR))));
        assert_eq!(read("2026-11-30T00:53:20Z"), Ok(When(now)));
        assert_eq!(read("2026-11-30T01:53:20+01:00"), Ok(When(now)));
        assert!(read("2026-11-30T00:53").is_ok() && read("2026-11-30").is_ok());
        assert!(read("yesterday").is_err() && read("").is_err());
    }
}

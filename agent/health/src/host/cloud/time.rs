//! Parses the clouds' time formats.

use mainstay_model::time::Wall;

const MONTHS: [&str; 12] =
    ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];

/// Parses a time as one of the clouds writes it: `2027-01-15T08:00:00Z`, also with a fraction or an offset instead of
/// the `Z`; `Fri, 15 Jan 2027 08:00:00 GMT`, also without the day. Times centuries away are valid.
pub(super) fn wall_of(text: &str) -> Option<Wall> {
    let text = text.trim();
    rfc3339(text).or_else(|| rfc2822(text))
}

fn rfc3339(text: &str) -> Option<Wall> {
    let (date, time) = text.split_once(['T', 't', ' '])?;
    let mut parts = date.split('-');
    let (year, month, day) =
        (digits(parts.next()?, 4)?, digits(parts.next()?, 2)?, digits(parts.next()?, 2)?);
    if parts.next().is_some() {
        return None;
    }
    let (clock, offset) = match time.find(['Z', 'z', '+', '-']) {
        Some(place) => (&time[..place], zone(&time[place..])?),
        None => return None,
    };
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let nanoseconds = fraction_of_a_second(fraction)?;
    wall(days(year, month, day)?, seconds(clock)? - offset, nanoseconds)
}

fn rfc2822(text: &str) -> Option<Wall> {
    let text = text.split_once(", ").map_or(text, |(_day, rest)| rest);
    let mut words = text.split_whitespace();
    let day = words.next().filter(|day| day.len() <= 2).and_then(number)?;
    let month = words.next()?.to_ascii_lowercase();
    let month = MONTHS.iter().position(|name| *name == month)? as i64 + 1;
    let year = digits(words.next()?, 4)?;
    let clock = seconds(words.next()?)?;
    let offset = zone(words.next()?)?;
    words.next().is_none().then(|| wall(days(year, month, day)?, clock - offset, 0))?
}

/// Seconds since midnight of `08:00:00`; a leap second is treated as the second before it.
fn seconds(clock: &str) -> Option<i64> {
    let mut parts = clock.split(':').map(|part| digits(part, 2));
    let (hour, minute, second) = (parts.next()??, parts.next()??, parts.next()??);
    let right = hour < 24 && minute < 60 && second <= 60 && parts.next().is_none();
    right.then_some(hour * 3600 + minute * 60 + second.min(59))
}

/// Seconds east of Greenwich of `Z`, `GMT`, `UTC`, `+01:00` and `+0100`.
fn zone(text: &str) -> Option<i64> {
    if ["Z", "GMT", "UTC"].iter().any(|name| text.eq_ignore_ascii_case(name)) {
        return Some(0);
    }
    let sign = if text.starts_with('-') { -1 } else { 1 };
    let rest = text.strip_prefix(['+', '-'])?;
    let (hours, minutes) = match rest.split_once(':') {
        Some(both) => both,
        None => (rest.get(..2)?, rest.get(2..)?),
    };
    let (hours, minutes) = (digits(hours, 2)?, digits(minutes, 2)?);
    (hours < 24 && minutes < 60).then_some(sign * (hours * 3600 + minutes * 60))
}

/// Nanoseconds of the digits after the point.
fn fraction_of_a_second(digits: &str) -> Option<i64> {
    let known = digits.get(..9).unwrap_or(digits);
    let places = u32::try_from(known.len()).ok()?;
    Some(number(known)? * 10_i64.pow(9_u32.checked_sub(places)?))
}

/// Days from 1970 to a date of the Gregorian calendar; `None` if there is no such date.
fn days(year: i64, month: i64, day: i64) -> Option<i64> {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let longest = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 if leap => 29,
        2 => 28,
        _ => return None,
    };
    if !(1..=longest).contains(&day) {
        return None;
    }
    // In years that start in March, the leap day is the last day.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leaps = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let of_year = (153 * month + 2) / 5 + day - 1;
    // From 1 March of the year 0 to 1 January 1970.
    Some(year * 365 + leaps + of_year - 719_468)
}

fn wall(days: i64, seconds: i64, nanoseconds: i64) -> Option<Wall> {
    let seconds = days * 86_400 + seconds;
    Some(Wall(seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)))
}

fn digits(text: &str, many: usize) -> Option<i64> {
    if text.len() == many { number(text) } else { None }
}

fn number(text: &str) -> Option<i64> {
    let right = (1..=9).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    if right { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(text: &str, seconds: Option<i64>) {
        assert_eq!(wall_of(text), seconds.map(|seconds| Wall(seconds * 1_000_000_000)), "{text}");
    }

    #[test]
    fn the_clouds_forms_are_read() {
        check("2027-01-15T08:00:00Z", Some(1_800_000_000));
        check("2027-01-15T09:00:00+01:00", Some(1_800_000_000));
        check("2027-01-15T00:00:00-0800", Some(1_800_000_000));
        check("Fri, 15 Jan 2027 08:00:00 GMT", Some(1_800_000_000));
        check("15 Jan 2027 08:00:00 GMT", Some(1_800_000_000));
        check("5 Feb 2024 08:00:00 +0000", Some(1_707_120_000));
        check("1970-01-01T00:00:00Z", Some(0));
        check("2000-02-29T12:00:00Z", Some(951_825_600));
        check("2024-12-31T23:59:60Z", Some(1_735_689_599));
        assert_eq!(wall_of("2027-01-15T08:00:00.25Z"), Some(Wall(1_800_000_000_250_000_000)));
        assert_eq!(wall_of("2027-01-15T08:00:00.1234567891Z"), Some(Wall(1_800_000_000_123_456_789)));
        assert_eq!(wall_of("9999-12-31T23:59:59Z"), Some(Wall(i64::MAX)));
    }

    #[test]
    fn what_is_no_time_is_none() {
        for text in [
            "",
            "soon",
            "2027-01-15",
            "2027-01-15T08:00:00",
            "2027-13-01T08:00:00Z",
            "2023-02-29T08:00:00Z",
            "2027-01-15T24:00:00Z",
            "+027-01-15T08:00:00Z",
            "32 Jan 2027 08:00:00 GMT",
            "15 Jam 2027 08:00:00 GMT",
            "15 Jan 2027 08:00:00 GMT and more",
        ] {
            check(text, None);
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_fail(text in any::<String>(), time in "[0-9]{0,5}-[0-9]{0,3}-[0-9]{0,3}T[0-9:.+Z-]{0,24}") {
            let _ = (wall_of(&text), wall_of(&time));
        }

        #[test]
        fn a_day_later_is_a_day_more(year in 1600i64..3000, month in 1i64..=12, day in 1i64..=27) {
            prop_assert_eq!(days(year, month, day + 1).unwrap() - days(year, month, day).unwrap(), 1);
        }
    }
}

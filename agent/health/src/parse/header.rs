//! Parses what `dmesg`, syslog daemons and `journalctl` put before a kernel line: times in a dozen forms, the host, the program.
//! Recognises lines of other programs, so that a program cannot forge kernel messages in a log that has both.

use super::record::Record;
use mainstay_model::time::Mono;

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];

/// Splits a line into its parts. The message of another program's line is empty.
pub(super) fn take_apart(line: &str) -> Record<'_> {
    let line =
        line.trim_start_matches(|letter: char| letter.is_whitespace() || letter == '\u{feff}').trim_end();
    let (priority, rest) = leading_priority(line).unwrap_or((None, line));
    let record = |at, message| Record { priority, sequence: None, at, message };
    if priority.is_some()
        && let Some(syslog) = rest.strip_prefix("1 ")
    {
        let (at, message) = times(rfc5424(syslog).unwrap_or(""));
        return record(at.0, message);
    }
    if let Some((by_kernel, message)) = of_talos(rest) {
        return record(None, if by_kernel { message } else { "" });
    }
    let ((at, stamped), rest) = times(decoded_facility(rest));
    let (again, message) = match of_kernel(rest) {
        Some(message) => times(message),
        // A line with a daemon's timestamp that the kernel did not write belongs to another program. Only the kernel adds its own
        // clock, and only the driver starts its lines like this.
        None if stamped && at.is_none() && !rest.starts_with("NVRM: ") => ((None, false), ""),
        None => ((None, false), rest),
    };
    record(at.or(again.0), repeated(message))
}

/// `<6>` at the start.
fn leading_priority(line: &str) -> Option<(Option<u8>, &str)> {
    let (number, rest) = line.strip_prefix('<')?.split_once('>')?;
    let number: u32 = number.parse().ok()?;
    Some((Some((number & 7) as u8), rest))
}

/// `kern  :err   : ` of `dmesg --decode`.
fn decoded_facility(line: &str) -> &str {
    const FACILITIES: [&str; 4] = ["kern", "user", "daemon", "syslog"];
    // `kern.err: ` of some daemons.
    if let Some((level, rest)) = line.strip_prefix("kern.").and_then(|rest| rest.split_once(": "))
        && level.bytes().all(|byte| byte.is_ascii_lowercase())
    {
        return rest;
    }
    let decoded = || {
        let (facility, rest) = line.split_once(':')?;
        let (level, rest) = rest.split_once(':')?;
        let level = level.trim();
        let right = FACILITIES.contains(&facility.trim())
            && !level.is_empty()
            && level.bytes().all(|byte| byte.is_ascii_lowercase());
        right.then(|| rest.trim_start())
    };
    decoded().unwrap_or(line)
}

/// Strips all leading times. Returns the kernel's own time, if any, whether a daemon stamped the line, and the rest.
fn times(line: &str) -> ((Option<Mono>, bool), &str) {
    let (mut at, mut stamped, mut rest) = (None, false, line);
    // A kernel that also logs the task or CPU uses a second pair of brackets.
    for _ in 0..4 {
        if let Some((time, after)) = bracketed(rest) {
            (at, rest) = (at.or(time), after);
        } else if let Some((after, by_daemon)) = date(rest) {
            (stamped, rest) = (stamped || by_daemon, after);
        } else if let Some(after) = of_stream(rest).filter(|_| stamped) {
            // A container's output is what its program read, so parsing starts again.
            (stamped, rest) = (false, decoded_facility(after));
        } else {
            break;
        }
    }
    ((at, stamped), rest)
}

/// `10.0.0.7: kern: warning: [2026-11-21T03:04:05.123Z]: …` of `talosctl dmesg`; without the host on the host itself. Returns whether
/// the kernel wrote it, and the message.
fn of_talos(line: &str) -> Option<(bool, &str)> {
    let (head, rest) = line.split_once(": [")?;
    let (time, message) = rest.split_once("]: ")?;
    let mut words = head.rsplit(':').map(str::trim);
    let (level, facility) = (words.next()?, words.next()?);
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase());
    (is_iso_date(time) && is_word(level) && is_word(facility)).then_some((facility == "kern", message))
}

/// `stderr F …`: a container's line in the log format of its runtime.
fn of_stream(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("stdout ").or_else(|| line.strip_prefix("stderr "))?;
    rest.strip_prefix("F ").or_else(|| rest.strip_prefix("P "))
}

/// `[   12.345678]`, `[12.345678 <    0.000012>]`, `[  +0.000012]`, `[Nov21 03:04]`, `[Tue Nov 21 03:04:05 2026]`,
/// `[ T1234]`; not `[Hardware Error]`.
fn bracketed(line: &str) -> Option<(Option<Mono>, &str)> {
    let (inside, rest) = line.strip_prefix('[')?.split_once(']')?;
    let first = inside.split_whitespace().next()?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let since_boot = seconds(first.split('@').next()?);
    let is_time = since_boot.is_some()
        || first.strip_prefix('+').is_some_and(|delta| seconds(delta).is_some())
        || first.strip_prefix(['T', 'C']).is_some_and(digits)
        || (DAYS.contains(&first) && inside.contains(':'))
        || first.get(..3).is_some_and(|month| MONTHS.contains(&month) && first.get(3..).is_some_and(digits))
        || is_iso_date(first);
    is_time.then(|| (since_boot, rest.trim_start()))
}

/// `12.345678`: seconds since the boot.
fn seconds(text: &str) -> Option<Mono> {
    let (seconds, fraction) = text.split_once('.')?;
    let digits = fraction.len();
    // `parse` alone would accept a sign.
    let right = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !(1..=9).contains(&digits) || !right(seconds) || !right(fraction) {
        return None;
    }
    let seconds: u64 = seconds.parse().ok()?;
    let fraction: u64 = fraction.parse().ok()?;
    let nanos = fraction * 10u64.pow(9 - digits as u32);
    Some(Mono(seconds.saturating_mul(1_000_000_000).saturating_add(nanos)))
}

fn is_iso_date(word: &str) -> bool {
    let bytes = word.as_bytes();
    bytes.len() >= 10 && bytes[4] == b'-' && bytes[7] == b'-' && bytes[..4].iter().all(u8::is_ascii_digit)
}

fn is_clock(word: &str) -> bool {
    let bytes = word.as_bytes();
    bytes.len() >= 8 && bytes[0].is_ascii_digit() && bytes[2] == b':' && bytes[5] == b':'
}

/// A date at the start. Returns the rest, and whether a daemon wrote it: `dmesg --time-format iso` has a comma before the microseconds,
/// and nothing between the time and the message.
fn date(line: &str) -> Option<(&str, bool)> {
    let (first, rest) = line.split_once(' ')?;
    let rest = rest.trim_start();
    if is_iso_date(first) && first.contains('T') {
        return Some((rest, !first.contains(',')));
    }
    let word = |text: &'_ str| text.split_whitespace().next().unwrap_or("").to_owned();
    let after = |text| -> Option<&str> { Some(str::split_once(text, ' ')?.1.trim_start()) };
    if is_iso_date(first) && is_clock(&word(rest)) {
        let rest = after(rest)?;
        // An optional time zone.
        let zoned = matches!(word(rest).as_str(), "UTC" | "GMT") || word(rest).starts_with(['+', '-']);
        return Some((if zoned { after(rest)? } else { rest }, true));
    }
    if DAYS.contains(&first) {
        return date(rest);
    }
    if MONTHS.contains(&first) {
        let mut rest = after(rest)?;
        if word(rest).len() == 4 && word(rest).parse::<u16>().is_ok() {
            rest = after(rest)?;
        }
        return is_clock(&word(rest)).then(|| after(rest)).flatten().map(|rest| (rest, true));
    }
    // Seconds since 1970, with a fraction.
    let unix = first.len() > 11 && first.as_bytes().get(10) == Some(&b'.') && seconds(first).is_some();
    unix.then_some((rest, true))
}

/// The kernel's message after `host kernel: `, `kernel: ` or `kernel[0]: `.
fn of_kernel(line: &str) -> Option<&str> {
    let (before, message) = line.split_once("kernel:").or_else(|| line.split_once("kernel[0]:"))?;
    let only_a_host = before.is_empty()
        || (before.ends_with(' ') && !before.contains(':') && before.split_whitespace().count() <= 3);
    only_a_host.then(|| message.strip_prefix(' ').unwrap_or(message).trim_start())
}

/// `<165>1 2026-11-21T03:04:05Z host app procid msgid [data] message`, after the version; only kernel lines.
fn rfc5424(line: &str) -> Option<&str> {
    let mut fields = line.splitn(6, ' ');
    let app = fields.nth(2).filter(|app| *app == "kernel");
    let rest = fields.nth(2)?;
    app?;
    let message = match rest.strip_prefix('[') {
        Some(data) => data.split_once("] ").map_or("", |(_, message)| message),
        None => rest.strip_prefix("- ").unwrap_or(""),
    };
    Some(message.trim_start_matches('\u{feff}').trim_start())
}

/// `message repeated 3 times: [ …]`, an abbreviation of rsyslog.
fn repeated(message: &str) -> &str {
    let shortened = || {
        let (_, rest) = message.strip_prefix("message repeated ")?.split_once(" times: [")?;
        let inner = rest.strip_suffix(']').unwrap_or(rest).trim_start();
        Some(times(inner).1)
    };
    shortened().unwrap_or(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MESSAGE: &str = "NVRM: Xid (PCI:0000:01:00): 79, off";

    fn check(prefix: &str, at: Option<u64>) {
        let line = format!("{prefix}{MESSAGE}");
        let record = take_apart(&line);
        assert_eq!((record.message, record.at), (MESSAGE, at.map(Mono)), "{line}");
    }

    #[test]
    fn all_of_dmesgs_forms_are_read() {
        let at = Some(12_345_678_000);
        check("[   12.345678] ", at);
        check("[   12.345678][ T1234] ", at);
        check("[   12.345678] [   C12] ", at);
        check("[   12.345678 <    0.000012>] ", at);
        check("[   12.345678@3] ", at);
        check("kern  :err   : [   12.345678] ", at);
        check("kern  :warn  : [Tue Nov 21 03:04:05 2026] ", None);
        check("[Tue Nov 21 03:04:05 2026] ", None);
        check("[Sun Nov  1 03:04:05 2026] ", None);
        check("[Nov21 03:04] ", None);
        check("[  +0.000012] ", None);
        check("2026-11-21T03:04:05,123456+00:00 ", None);
        check("<3>[   12.345678] ", at);
        check("\u{feff}[   12.345678] ", at);
    }

    #[test]
    fn lines_of_daemons_and_of_the_journal_are_read() {
        let at = Some(12_345_678_000);
        check("Nov 21 03:04:05 gpu-17 kernel: ", None);
        check("Nov  1 03:04:05 gpu-17 kernel: [   12.345678] ", at);
        check("Nov 21 03:04:05.123456 gpu-17 kernel: ", None);
        check("Nov 21 2026 03:04:05 gpu-17 kernel: ", None);
        check("2026-11-21T03:04:05.123456+00:00 gpu-17 kernel: [   12.345678] ", at);
        check("2026-11-21 03:04:05 gpu-17 kernel: ", None);
        check("2026-11-21 03:04:05 UTC gpu-17 kernel: ", None);
        check("Sat 2026-11-21 03:04:05 UTC gpu-17 kernel: ", None);
        check("1795230245.123456 gpu-17 kernel: ", None);
        check("[   12.345678] gpu-17 kernel: ", at);
        check("kernel: [   12.345678] ", at);
        check("Nov 21 03:04:05 gpu-17 kern.err kernel: ", None);
        check("<4>Nov 21 03:04:05 gpu-17 kernel: ", None);
        check("<3>1 2026-11-21T03:04:05.123Z gpu-17 kernel - - - [   12.345678] ", at);
        check("<3>1 2026-11-21T03:04:05.123Z gpu-17 kernel - - [timeQuality tzKnown=\"1\"] ", None);
        check("Nov 21 03:04:05 gpu-17 kernel: message repeated 3 times: [ [   12.345678] ", None);
    }

    #[test]
    fn lines_of_containers_and_of_hosts_without_a_daemon_are_read() {
        let at = Some(12_345_678_000);
        check("10.0.0.7: kern: warning: [2026-11-21T03:04:05.123456789Z]: ", None);
        check("fd00::7: kern:     err: [2026-11-21T03:04:05.123456789Z]: ", None);
        check("kern:  notice: [2026-11-21T03:04:05.123456789Z]: ", None);
        check("2026-11-21T03:04:05.123456789Z stderr F ", None);
        check("2026-11-21T03:04:05.123456789Z stdout F [   12.345678] ", at);
        check("Nov 21 03:04:05 [   12.345678] ", at);
    }

    #[test]
    fn another_program_cannot_forge_kernel_messages() {
        for prefix in [
            "Nov 21 03:04:05 gpu-17 python3[4711]: ",
            "Nov 21 03:04:05 gpu-17 dockerd[12]: level=error msg=kernel: ",
            "2026-11-21T03:04:05.123456+00:00 gpu-17 train: kernel: ",
            "Sat 2026-11-21 03:04:05 UTC gpu-17 slurmd[77]: ",
            "10.0.0.7: user: warning: [2026-11-21T03:04:05.123456789Z]: ",
            "2026-11-21T03:04:05Z stdout F Nov 21 03:04:05 gpu-17 python3[4711]: ",
            "<3>1 2026-11-21T03:04:05.123Z gpu-17 python 12 - - ",
        ] {
            let line = format!("{prefix}{MESSAGE}");
            assert_eq!(take_apart(&line).message, "", "{line}");
        }
    }

    #[test]
    fn brackets_of_the_message_are_its_own() {
        for line in
            ["[Hardware Error]: Corrected error", "[drm] Initialized", "[sda] No Caching mode page found"]
        {
            assert_eq!(take_apart(line).message, line);
            assert_eq!(take_apart(&format!("[    1.000000] {line}")).message, line);
        }
    }

    #[test]
    fn truncated_lines_are_accepted() {
        for line in [
            "[",
            "[1",
            "[1.",
            "<",
            "<3",
            "<3>1",
            "<3>1 2026-11-21T03:04:05Z",
            "Nov",
            "Nov 21",
            "Nov 21 03:04:05",
            "2026-11-21",
            "Tue",
            "kernel:",
        ] {
            let _ = take_apart(line);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_a_panic(head in "(\\[|<3>1 |Nov 21 |Tue |2026-11-21T|kern:|kernel:)?", tail in any::<String>()) {
            let line = format!("{head}{tail}");
            let record = take_apart(&line);
            prop_assert!(line.contains(record.message));
        }
    }
}

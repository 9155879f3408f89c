//! One record of the kernel log: `/dev/kmsg`'s own form, what `dmesg` and syslog make of it, or a bare line.

use crate::time::Mono;

/// A record, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// 0 (emergency) to 7 (debug).
    pub priority: Option<u8>,
    /// The kernel's number of it; goes up by one within a boot.
    pub sequence: Option<u64>,
    /// When it was written. The kernel's clock for this counts like the monotonic one.
    pub at: Option<Mono>,
    /// What it says, without the lines that name the device for machines.
    pub message: &'a str,
}

impl<'a> Record<'a> {
    /// Takes a record apart: `6,339,5140900,-;NVRM: …`, with or without the lines of its dictionary; or a line like
    /// `<6>[    5.140900] NVRM: …`, or one that a syslog daemon wrote, or a bare one.
    pub fn parse(text: &'a str) -> Record<'a> {
        let line = text.lines().next().unwrap_or("");
        from_kmsg(line).unwrap_or_else(|| from_text(line))
    }

    /// Whether the line only belongs to the record before it (` SUBSYSTEM=pci`).
    pub fn is_continuation(line: &str) -> bool {
        line.starts_with(' ') && line.trim_start().split_once('=').is_some_and(|(key, _)| is_key(key))
    }
}

fn is_key(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
}

fn from_kmsg(line: &str) -> Option<Record<'_>> {
    let (prefix, message) = line.split_once(';')?;
    let mut fields = prefix.split(',');
    let priority: u32 = fields.next()?.parse().ok()?;
    let sequence: u64 = fields.next()?.parse().ok()?;
    let micros: u64 = fields.next()?.parse().ok()?;
    // The flags: '-' a whole record, 'c' and '+' pieces of one. More fields may follow in newer kernels.
    fields.next()?;
    Some(Record {
        priority: Some((priority & 7) as u8),
        sequence: Some(sequence),
        at: Some(Mono(micros.saturating_mul(1000))),
        message,
    })
}

fn from_text(line: &str) -> Record<'_> {
    let (priority, rest) = leading_priority(line).unwrap_or((None, line));
    // What a syslog daemon puts in front ends in the name of the program that wrote: "kernel: ".
    let rest = match rest.split_once("kernel: ") {
        Some((before, after)) if before.len() < 100 && !before.contains(": ") => after,
        _ => rest,
    };
    let (at, message) = leading_time(rest).unwrap_or((None, rest));
    Record { priority, sequence: None, at, message }
}

fn leading_priority(line: &str) -> Option<(Option<u8>, &str)> {
    let (number, rest) = line.strip_prefix('<')?.split_once('>')?;
    let number: u32 = number.parse().ok()?;
    Some((Some((number & 7) as u8), rest))
}

/// `[   12.345678] ` at the beginning.
fn leading_time(line: &str) -> Option<(Option<Mono>, &str)> {
    let (time, rest) = line.strip_prefix('[')?.split_once(']')?;
    let (seconds, fraction) = time.trim().split_once('.')?;
    let seconds: u64 = seconds.parse().ok()?;
    let digits = fraction.len();
    if !(1..=9).contains(&digits) {
        return None;
    }
    let fraction: u64 = fraction.parse().ok()?;
    let nanos = fraction * 10u64.pow(9 - digits as u32);
    Some((Some(Mono(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))), rest.trim_start()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_of_the_kernel_is_taken_apart() {
        let text = "4,1339,5140900123,-,caller=T2387;NVRM: Xid (PCI:0000:01:00): 79, off\n SUBSYSTEM=pci\n DEVICE=+pci:0000:01:00.0\n";
        let record = Record::parse(text);
        assert_eq!((record.priority, record.sequence), (Some(4), Some(1339)));
        assert_eq!(record.at, Some(Mono(5_140_900_123_000)));
        assert_eq!(record.message, "NVRM: Xid (PCI:0000:01:00): 79, off");
        // Facility and priority share a number; a user's line is facility 1.
        assert_eq!(Record::parse("12,7,9,-;hello").priority, Some(4));
    }

    #[test]
    fn lines_that_others_wrote_down_are_read_too() {
        let message = "NVRM: Xid (PCI:0000:01:00): 79, off";
        let check = |prefix: &str, at| {
            let line = format!("{prefix}{message}");
            let record = Record::parse(&line);
            assert_eq!((record.message, record.at), (message, at), "{line}");
        };
        check("", None);
        check("[    5.140900] ", Some(Mono(5_140_900_000)));
        check("<6>[  123.5] ", Some(Mono(123_500_000_000)));
        check("Nov 21 03:04:05 gpu-17 kernel: [    5.140900] ", Some(Mono(5_140_900_000)));
        check("2026-11-21T03:04:05.123456+00:00 gpu-17 kernel: ", None);
    }

    #[test]
    fn a_semicolon_alone_makes_no_record_of_the_kernel() {
        assert_eq!(Record::parse("a;b").message, "a;b");
        assert_eq!(Record::parse("1,2;b").message, "1,2;b");
        assert_eq!(Record::parse("6,1,99999999999999999999999,-;b").sequence, None);
    }

    #[test]
    fn dictionaries_are_told_from_messages() {
        assert!(Record::is_continuation(" SUBSYSTEM=pci"));
        assert!(Record::is_continuation(" DEVICE=+pci:0000:01:00.0"));
        assert!(!Record::is_continuation(" frame=12"));
        assert!(!Record::is_continuation("NVRM: a=b"));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_fail(text in any::<String>()) {
            let record = Record::parse(&text);
            prop_assert!(text.contains(record.message));
        }

        #[test]
        fn what_the_kernel_writes_is_read(priority in 0u32..200, sequence: u64, micros in 0u64..1 << 50, message in "[^\n\r;]*") {
            let text = format!("{priority},{sequence},{micros},-;{message}");
            let record = Record::parse(&text);
            prop_assert_eq!(record.sequence, Some(sequence));
            prop_assert_eq!(record.at, Some(Mono(micros * 1000)));
            prop_assert_eq!(record.message, message.as_str());
        }
    }
}

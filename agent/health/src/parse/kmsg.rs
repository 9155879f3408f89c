//! One record of the kernel log: in the format of `/dev/kmsg`, or a line derived from it.

use std::borrow::Cow;

use super::header;
pub use super::record::Record;
use mainstay_model::time::Mono;

impl<'a> Record<'a> {
    /// Parses a record: `6,339,5140900,-;NVRM: …`, with or without the lines of its dictionary; a line of `dmesg`, a syslog daemon or
    /// `journalctl`; or a bare message. The message of a line from another program than the kernel is empty.
    pub fn parse(text: &'a str) -> Record<'a> {
        let line = text.lines().next().unwrap_or("");
        from_kmsg(line).unwrap_or_else(|| header::take_apart(line))
    }

    /// Whether the line continues the record before it (` SUBSYSTEM=pci`).
    pub fn is_continuation(line: &str) -> bool {
        line.starts_with(' ') && line.trim_start().split_once('=').is_some_and(|(key, _)| is_key(key))
    }
}

fn is_key(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
}

fn from_kmsg(line: &str) -> Option<Record<'_>> {
    let (prefix, message) = line.split_once(';')?;
    let mut fields = prefix.split(',').peekable();
    // netconsole may put the kernel release first.
    fields.next_if(|first| first.contains('.'));
    let priority: u32 = fields.next()?.parse().ok()?;
    let sequence: u64 = fields.next()?.parse().ok()?;
    let micros: u64 = fields.next()?.parse().ok()?;
    // The flags: '-' for a whole record, 'c' and '+' for fragments. Newer kernels may add fields.
    fields.next()?;
    Some(Record {
        priority: Some((priority & 7) as u8),
        sequence: Some(sequence),
        at: Some(Mono(micros.saturating_mul(1000))),
        // Tests of alerts write "kernel: …" into /dev/kmsg by hand.
        message: message.strip_prefix("kernel: ").unwrap_or(message).trim_end_matches('\r'),
    })
}

/// The line without colors (`dmesg --color`, `journalctl`) and other control characters.
pub fn plain(line: &str) -> Cow<'_, str> {
    if !line.bytes().any(|byte| byte < 0x20 && byte != b'\t') {
        return Cow::Borrowed(line);
    }
    let mut plain = String::with_capacity(line.len());
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\u{1b}' => skip_sequence(&mut letters),
            '\t' => plain.push(letter),
            _ if letter.is_control() => {}
            _ => plain.push(letter),
        }
    }
    Cow::Owned(plain)
}

/// A terminal sequence: `ESC [`, parameters and a final letter; or ESC and one letter.
fn skip_sequence(letters: &mut std::str::Chars<'_>) {
    if letters.next() == Some('[') {
        let _ = letters.find(|letter| ('@'..='~').contains(letter));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_kernel_record_is_parsed() {
        let text = "4,1339,5140900123,-,caller=T2387;NVRM: Xid (PCI:0000:01:00): 79, off\n SUBSYSTEM=pci\n DEVICE=+pci:0000:01:00.0\n";
        let record = Record::parse(text);
        assert_eq!((record.priority, record.sequence), (Some(4), Some(1339)));
        assert_eq!(record.at, Some(Mono(5_140_900_123_000)));
        assert_eq!(record.message, "NVRM: Xid (PCI:0000:01:00): 79, off");
        // Facility and priority share a number. User-space lines have facility 1.
        assert_eq!(Record::parse("12,7,9,-;hello").priority, Some(4));
        let over_the_network = Record::parse("6.8.0-45-generic,4,1339,5140900123,-,ncfrag=0/9;hello");
        assert_eq!((over_the_network.sequence, over_the_network.message), (Some(1339), "hello"));
    }

    #[test]
    fn lines_of_other_tools_are_parsed() {
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
    fn colours_and_control_characters_are_removed() {
        let line = "\u{1b}[32m[    5.140900] \u{1b}[0m\u{1b}[33mNVRM: \u{1b}[0mXid\u{0}\r";
        assert_eq!(plain(line), "[    5.140900] NVRM: Xid");
        assert_eq!(plain("as\tit is"), "as\tit is");
        assert_eq!(plain("cut \u{1b}[3"), "cut ");
        assert_eq!(plain("cut \u{1b}"), "cut ");
    }

    #[test]
    fn a_semicolon_alone_makes_no_record_of_the_kernel() {
        assert_eq!(Record::parse("a;b").message, "a;b");
        assert_eq!(Record::parse("1,2;b").message, "1,2;b");
        assert_eq!(Record::parse("6,1,99999999999999999999999,-;b").sequence, None);
    }

    #[test]
    fn dictionaries_are_distinguished_from_messages() {
        assert!(Record::is_continuation(" SUBSYSTEM=pci"));
        assert!(Record::is_continuation(" DEVICE=+pci:0000:01:00.0"));
        assert!(!Record::is_continuation(" frame=12"));
        assert!(!Record::is_continuation("NVRM: a=b"));
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_a_panic(text in any::<String>()) {
            let record = Record::parse(&text);
            prop_assert!(text.contains(record.message));
        }

        #[test]
        fn kernel_records_are_parsed(priority in 0u32..200, sequence: u64, micros in 0u64..1 << 50, message in "[^\n\r;]*") {
            let text = format!("{priority},{sequence},{micros},-;{message}");
            let record = Record::parse(&text);
            prop_assert_eq!(record.sequence, Some(sequence));
            prop_assert_eq!(record.at, Some(Mono(micros * 1000)));
            prop_assert_eq!(record.message, message.as_str());
        }
    }
}

//! Parsers on untrusted input: arbitrary bytes, and real lines that were cut, spliced and damaged. They must not fail
//! and must not grow without limit, and the facts that they return must survive the journal.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::hardware::catalog::OverrideFile;
use mainstay_health::parse::journal::{JournalEntry, of_dmesg};
use mainstay_health::parse::kmsg::{Record, plain};
use mainstay_health::parse::log::LogReader;
use mainstay_model::entry::{Body, Fact};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Mono;
use proptest::prelude::*;
use support::{Host, catalog};

const CATALOGS: [&str; 4] = [
    include_str!("../../../catalog/hardware/xid.toml"),
    include_str!("../../../catalog/hardware/sxid.toml"),
    include_str!("../../../catalog/hardware/kernel.toml"),
    include_str!("../../../catalog/hardware/nvlink.toml"),
];

/// An example line of each catalog entry, as the kernel writes it and in other log formats.
fn real_lines() -> Vec<String> {
    let examples = CATALOGS.iter().flat_map(|text| text.lines());
    let examples =
        examples.filter_map(|line| line.strip_prefix("example = \"")).map(|line| line.replace('"', ""));
    let forms: [fn(&str) -> String; 5] = [
        |line| line.to_owned(),
        |line| format!("4,1339,5140900123,-,caller=T1;{line}\\x0a{line}"),
        |line| format!("Nov 21 03:04:05 gpu-17 kernel: [ 4711.123456] {line}"),
        |line| format!("<3>1 2026-11-21T03:04:05.123Z gpu-17 kernel - - [a b=\"c\"] {line}"),
        |line| format!("{{\"_TRANSPORT\":\"kernel\",\"__CURSOR\":\"s=1\",\"MESSAGE\":\"{line}\"}}"),
    ];
    examples.flat_map(|line| forms.map(|form| form(&line))).collect()
}

/// A modification of some bytes.
#[derive(Clone, Debug)]
enum Damage {
    Cut(usize),
    Drop(usize, usize),
    Insert(usize, Vec<u8>),
    Flip(usize, u8),
    Repeat(usize, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let place = any::<prop::sample::Index>().prop_map(|index| index.index(400));
    prop_oneof![
        place.clone().prop_map(Damage::Cut),
        (place.clone(), 0usize..40).prop_map(|(at, length)| Damage::Drop(at, length)),
        (place.clone(), prop::collection::vec(any::<u8>(), 0..20))
            .prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        (place.clone(), any::<u8>()).prop_map(|(at, bits)| Damage::Flip(at, bits)),
        (place, 1usize..200).prop_map(|(at, times)| Damage::Repeat(at, times)),
    ]
}

fn damaged(line: &str, damages: &[Damage]) -> String {
    let mut bytes = line.as_bytes().to_vec();
    for damage in damages {
        let length = bytes.len();
        match damage {
            Damage::Cut(at) => bytes.truncate(*at),
            Damage::Drop(at, count) => drop(bytes.drain((*at).min(length)..(at + count).min(length))),
            Damage::Insert(at, more) => {
                drop(bytes.splice((*at).min(length)..(*at).min(length), more.clone()))
            }
            Damage::Flip(at, bits) => bytes.iter_mut().skip(*at).take(1).for_each(|byte| *byte ^= bits),
            Damage::Repeat(at, times) => {
                let byte = bytes.get(*at).copied().unwrap_or(b'(');
                let at = (*at).min(length);
                drop(bytes.splice(at..at, std::iter::repeat_n(byte, *times)));
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs each parser on the text. The facts must survive the journal, and no judge may fail on the text.
fn everything_over(text: &str) {
    let _ = (plain(text), JournalEntry::parse(text), of_dmesg(text), PciAddress::parse(text));
    let record = Record::parse(text);
    assert!(text.contains(record.message));
    let mut reader = LogReader::default();
    let facts = [reader.line(Mono(9), text, 3), reader.read(Mono(9), &record, 4)];
    for (at, fact) in facts.into_iter().flatten() {
        assert!(at <= Mono(9));
        let body = Body::Fact(fact);
        let written = serde_json::to_string(&body).unwrap();
        assert!(written.len() < 16_384, "{} bytes", written.len());
        assert_eq!(serde_json::from_str::<Body>(&written).unwrap(), body);
    }
    let mut host = Host::new();
    host.log(text);
    let _ = host.components();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        everything_over(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn damaged_lines_do_no_harm(line in prop::sample::select(real_lines()), damages in prop::collection::vec(damage(), 1..5)) {
        everything_over(&damaged(&line, &damages));
    }

    #[test]
    fn spliced_lines_do_no_harm(lines in prop::collection::vec(prop::sample::select(real_lines()), 2), at in any::<prop::sample::Index>(), to in any::<prop::sample::Index>()) {
        let (first, second) = (&lines[0], &lines[1]);
        let cut = |text: &str, index: &prop::sample::Index| (0..=index.index(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        everything_over(&format!("{}{}", &first[..cut(first, &at)], &second[cut(second, &to)..]));
    }

    #[test]
    fn a_damaged_catalog_is_rejected_or_read(file in prop::sample::select(CATALOGS.to_vec()), start in any::<prop::sample::Index>(), damages in prop::collection::vec(damage(), 0..4)) {
        let start = (0..=start.index(file.len())).rev().find(|at| file.is_char_boundary(*at)).unwrap_or(0);
        let text: String = file[start..].chars().take(3000).collect();
        if let Ok(read) = toml::from_str::<OverrideFile>(&damaged(&text, &damages)) {
            let _ = catalog().overridden("a file", read);
        }
    }
}

#[test]
fn nearly_all_example_lines_are_facts() {
    let lines = real_lines();
    assert!(lines.len() > 300, "{}", lines.len());
    let facts = lines.iter().filter(|line| LogReader::default().line(Mono(9), line, 1).is_some()).count();
    assert!(facts * 10 > lines.len() * 9, "{facts} of {} are facts", lines.len());
    let xid = LogReader::default().line(Mono(9), &lines[0], 1);
    assert!(matches!(xid, Some((_, Fact::Xid(_)))), "{xid:?}");
}

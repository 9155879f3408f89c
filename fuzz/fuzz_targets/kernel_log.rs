//! A kernel log in any of its forms, line by line: a fact survives the journal, is not longer than the journal
//! allows, has no time in the future, and makes no judge panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_health::hardware::gpu::{DeviceJudge, DeviceLimits};
use mainstay_model::entry::Body;
use mainstay_health::host::kernel_reports::HostLogJudge;
use mainstay_health::parse::journal::{JournalEntry, of_container, of_dmesg};
use mainstay_health::parse::kmsg::{Record, plain};
use mainstay_health::parse::log::LogReader;
use mainstay_model::time::Mono;
use mainstay_fuzz::{catalog, text};

/// The maximum size of a fact in the journal, in bytes.
const LONGEST: usize = 16_384;

fuzz_target!(|bytes: &[u8]| {
    let text = text(bytes);
    let now = Mono(1_000_000_000_000);
    let mut reader = LogReader::default();
    let mut devices = DeviceJudge::new(catalog(), DeviceLimits::default());
    let mut host = HostLogJudge::new(catalog(), "/dev/kmsg");
    for line in text.lines() {
        assert!(line.contains(Record::parse(line).message));
        let shown = plain(line);
        assert_eq!(plain(&shown), shown);
        let _ = (JournalEntry::parse(line), of_dmesg(line), of_container(line));
        let facts = [reader.line(now, line, 3), reader.read(now, &Record::parse(line), 4)];
        for (at, fact) in facts.into_iter().flatten() {
            assert!(at <= now);
            devices.take_in(at, &fact);
            host.take_in(at, &fact);
            let body = Body::Fact(fact);
            let written = serde_json::to_vec(&body).expect("a fact can be written");
            assert!(written.len() < LONGEST, "{} bytes", written.len());
            assert_eq!(serde_json::from_slice::<Body>(&written).expect("a fact can be read"), body);
        }
    }
    let _ = (devices.components(now), host.components(now), reader.held_back(Mono::NEVER));
});

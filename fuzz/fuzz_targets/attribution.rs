//! The log of a failed job: the confidence is from 0 to 1, the report is not empty, and the split into pieces does
//! not matter.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::attribution::exit;
use mainstay_diagnosis::attribution::lines::without_colours;
use mainstay_diagnosis::attribution::scan::{Kind, Scan};
use mainstay_diagnosis::attribution::{Evidence, attribute, explain};
use mainstay_fuzz::text;

fuzz_target!(|bytes: &[u8]| {
    let catalog = Catalog::built_in().expect("our own signatures can be read");
    let whole = Scan::of_text(catalog, "log", None, Kind::Log, bytes);
    let mut scan = Scan::new(catalog, "log", None, Kind::Log);
    bytes.chunks(1 + usize::from(bytes.first().copied().unwrap_or(0))).for_each(|piece| scan.feed(piece));
    let pieces = scan.finish();
    assert_eq!((whole.lines, whole.sightings.len()), (pieces.lines, pieces.sightings.len()));
    without_colours(bytes, &mut Vec::new());
    let evidence =
        Evidence { findings: vec![whole], exits: exit::from_text(&text(bytes)), ..Evidence::default() };
    let judged = attribute(catalog, &evidence);
    assert!((0.0..=1.0 + 1e-9).contains(&judged.confidence), "{}", judged.confidence);
    let report = explain::report(&evidence, &judged);
    assert!(!report.headline.is_empty() && !report.next.is_empty());
});

//! The JSON form of a flight record, which is distinguished from logs by its first bytes: refused or parsed. The
//! diagnosis from the records of several ranks names only ranks of the job.
#![no_main]

use std::collections::BTreeSet;

use libfuzzer_sys::fuzz_target;
use mainstay_hang::flight::{FlightRecord, held_up, looks_like_one};
use mainstay_model::id::Rank;

fuzz_target!(|bytes: &[u8]| {
    let _ = looks_like_one(bytes);
    // The records of two ranks, separated by a byte that does not occur in JSON.
    let mut parts = bytes.splitn(2, |byte| *byte == 0);
    let records: Vec<FlightRecord> =
        parts.by_ref().filter_map(|part| FlightRecord::read(part).ok()).collect();
    for standing in records.iter().flat_map(|record| record.groups.values()) {
        assert!(standing.completed <= standing.entered);
        assert!(standing.open.keys().all(|number| *number > standing.completed && *number <= standing.entered));
    }
    let mut ranks: BTreeSet<Rank> = [Rank(0), Rank(1), Rank(2)].into();
    let known = ranks.clone();
    ranks.extend(records.iter().flat_map(|of| of.groups.values()).flat_map(|of| &of.ranks).map(|of| Rank(*of)));
    let records = (0..).map(Rank).zip(records).collect();
    if let Some(shown) = held_up(&known, &records) {
        assert!(shown.culprits.iter().chain(&shown.waiting).all(|rank| ranks.contains(rank)));
        assert!(shown.waiting.iter().all(|rank| !shown.culprits.contains(rank)));
    }
});

//! A dump of PyTorch's flight recorder: refused or parsed; the numbers in a parsed one are in order.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_hang::flight::{FlightRecord, counted};
use mainstay_hang::waits;
use mainstay_model::id::Rank;

fuzz_target!(|bytes: &[u8]| {
    let Ok(record) = FlightRecord::read(bytes) else { return };
    for standing in record.groups.values() {
        assert!(standing.completed <= standing.entered);
    }
    let all = [Rank(0), Rank(1)];
    let reported = waits("it", &counted(&all, &[(Rank(0), record)].into()));
    assert!(reported.is_none_or(|reported| reported.culprits.iter().all(|rank| all.contains(rank))));
});

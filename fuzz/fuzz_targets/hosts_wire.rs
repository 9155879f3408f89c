//! Messages between the launchers of one job: a message that is parsed survives a round trip.
#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use mainstay_group::wire::{Down, Message, Up};

fuzz_target!(|bytes: &[u8]| {
    round_trip::<Up>(bytes);
    round_trip::<Down>(bytes);
});

fn round_trip<T: Message + Debug>(bytes: &[u8]) {
    let Ok(read) = T::read(bytes) else { return };
    let mut written = Vec::new();
    read.write(&mut written).expect("what was read can be written");
    let again = T::read(&written).expect("what was written can be read");
    // The text forms, because a NaN loss is not equal to itself.
    assert_eq!(format!("{again:?}"), format!("{read:?}"));
}

//! Messages between the launchers of one job: a message that is parsed survives a round trip.
#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use mainstay_group::wire::{Down, Outgoing, Up};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(up) = Up::read(bytes) {
        same(&up, &Up::read(&written(&up)).expect("what was written can be read"));
    }
    if let Ok(down) = serde_json::from_slice::<Down>(bytes) {
        same(&down, &serde_json::from_slice(&written(&down)).expect("what was written can be read"));
    }
});

fn written(message: &impl Outgoing) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.write(&mut bytes).expect("what was read can be written");
    bytes
}

/// Compares the text forms, because a NaN loss is not equal to itself.
fn same<T: Debug>(read: &T, again: &T) {
    assert_eq!(format!("{again:?}"), format!("{read:?}"));
}

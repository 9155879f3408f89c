//! Dumps of PyTorch's flight recorder, made by torch 2.8 over gloo with four ranks: read, and whom all wait for found in them.

#![allow(clippy::panic, reason = "a panic is how a test reports")]

use std::collections::BTreeMap;

use mainstay_core::hang::flight::{FlightError, FlightRecord, counted};
use mainstay_core::hang::{HangKind, Waits, waits};
use mainstay_core::id::Rank;
use mainstay_core::pickle::PickleError;

const ABSENT: [&[u8]; 4] = [
    include_bytes!("flight_records/absent_0.pickle"),
    include_bytes!("flight_records/absent_1.pickle"),
    include_bytes!("flight_records/absent_2.pickle"),
    include_bytes!("flight_records/absent_3.pickle"),
];
const MISMATCH: [&[u8]; 4] = [
    include_bytes!("flight_records/mismatch_0.pickle"),
    include_bytes!("flight_records/mismatch_1.pickle"),
    include_bytes!("flight_records/mismatch_2.pickle"),
    include_bytes!("flight_records/mismatch_3.pickle"),
];

fn read(dump: &[u8]) -> FlightRecord {
    FlightRecord::read(dump).unwrap_or_else(|error| panic!("a dump of torch is refused: {error}"))
}

fn told(dumps: &[&[u8]], of: &[u32], all: u32) -> Option<Waits> {
    let records: BTreeMap<Rank, FlightRecord> =
        of.iter().map(|rank| (Rank(*rank), read(dumps[*rank as usize]))).collect();
    let all: Vec<Rank> = (0..all).map(Rank).collect();
    waits("the flight recorders", &counted(&all, &records))
}

#[test]
fn a_dump_tells_how_far_the_rank_is_in_each_group() {
    let record = read(ABSENT[0]);
    let world = &record.groups["0"];
    assert_eq!((world.entered, world.completed, world.is_world), (2, 1, true));
    assert_eq!(world.operation, "all_reduce of [8] Float");
    let pair = &record.groups["1"];
    assert_eq!((pair.entered, pair.completed, pair.is_world), (2, 2, false));
}

#[test]
fn the_rank_that_never_entered_is_found_through_both_groups() {
    let waits = told(&ABSENT, &[0, 1, 2, 3], 4).expect("an answer");
    assert_eq!((waits.kind, waits.culprits.as_slice()), (Some(HangKind::UserCode), &[Rank(2)][..]));
    assert_eq!(waits.told, "by the flight recorders 3 of 3 waiting ranks wait for rank 2");
}

#[test]
fn a_rank_that_gives_no_dump_is_named_and_its_kind_is_not_guessed() {
    let waits = told(&ABSENT, &[0, 1], 3).expect("an answer");
    assert_eq!((waits.kind, waits.culprits.as_slice()), (None, &[Rank(2)][..]));
}

#[test]
fn all_entered_and_none_left() {
    let waits = told(&ABSENT, &[0, 1], 2).expect("an answer");
    assert_eq!((waits.kind, waits.culprits.len()), (Some(HangKind::Network), 0));
    assert_eq!(
        waits.told,
        "by the flight recorders all ranks of process group 0 have entered an operation and none has left it"
    );
}

#[test]
fn another_operation_under_the_same_number_is_a_mismatch() {
    let waits = told(&MISMATCH, &[0, 1, 2, 3], 4).expect("an answer");
    assert_eq!((waits.kind, waits.culprits.as_slice()), (Some(HangKind::Mismatch), &[Rank(1)][..]));
}

#[test]
fn ranks_that_wait_for_nothing_tell_nothing() {
    // Alone, it waits for nobody.
    assert_eq!(told(&[ABSENT[2]], &[0], 1), None);
    assert_eq!(told(&ABSENT, &[], 4), None);
}

#[test]
fn a_pickle_that_would_run_something_is_refused() {
    let harmful = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.";
    let error = FlightRecord::read(harmful).expect_err("refused");
    assert!(matches!(error, FlightError::Pickle(PickleError::Opcode { opcode: b'c', at: 2 })), "{error}");
    assert_eq!(FlightRecord::read(b"\x80\x02}."), Err(FlightError::NoEntries));
}

#[test]
fn a_dump_that_was_cut_or_changed_never_panics() {
    for dump in ABSENT {
        for length in 0..dump.len() {
            assert!(FlightRecord::read(&dump[..length]).is_err(), "{length}");
        }
        for at in 0..dump.len() {
            let mut changed = dump.to_vec();
            changed[at] ^= 0x15;
            // Understood or refused.
            let _ = FlightRecord::read(&changed);
        }
    }
}

//! Dumps of PyTorch's flight recorder from torch 2.8 over gloo with four ranks: parsing them and finding the rank that
//! all others wait for.

#![allow(clippy::panic, reason = "a panic is how a test reports")]

use std::collections::{BTreeMap, BTreeSet};

use mainstay_hang::flight::{BlockedCollective, FlightError, FlightRecord, counted, held_up, looks_like_one};
use mainstay_hang::{HangKind, Waits, waits};
use mainstay_model::id::Rank;
use mainstay_wire::pickle::PickleError;

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

fn waits_of(dumps: &[&[u8]], dumped: &[u32], all: u32) -> Option<Waits> {
    let records: BTreeMap<Rank, FlightRecord> =
        dumped.iter().map(|rank| (Rank(*rank), read(dumps[*rank as usize]))).collect();
    let all: Vec<Rank> = (0..all).map(Rank).collect();
    waits("the flight recorders", &counted(&all, &records))
}

#[test]
fn a_dump_shows_the_progress_of_the_rank_in_each_group() {
    let record = read(ABSENT[0]);
    let world = &record.groups["0"];
    assert_eq!((world.entered, world.completed, world.is_world), (2, 1, true));
    assert_eq!(world.operation, "all_reduce of [8] Float");
    let pair = &record.groups["1"];
    assert_eq!((pair.entered, pair.completed, pair.is_world), (2, 2, false));
}

#[test]
fn the_rank_that_never_entered_is_found_across_both_groups() {
    let waits = waits_of(&ABSENT, &[0, 1, 2, 3], 4).expect("an answer");
    assert_eq!((waits.kind, waits.culprits.as_slice()), (Some(HangKind::UserCode), &[Rank(2)][..]));
    testing::snapshot!(
        "reasons",
        "flight: the rank that never entered is found across both groups",
        waits.reported
    );
}

#[test]
fn a_rank_without_a_dump_is_the_culprit_and_the_kind_is_not_guessed() {
    let waits = waits_of(&ABSENT, &[0, 1], 3).expect("an answer");
    assert_eq!((waits.kind, waits.culprits.as_slice()), (None, &[Rank(2)][..]));
}

#[test]
fn if_all_ranks_entered_and_none_left_the_network_hangs() {
    let waits = waits_of(&ABSENT, &[0, 1], 2).expect("an answer");
    assert_eq!((waits.kind, waits.culprits.len()), (Some(HangKind::Network), 0));
    testing::snapshot!(
        "reasons",
        "flight: if all ranks entered and none left the network hangs",
        waits.reported
    );
}

#[test]
fn a_different_operation_with_the_same_number_is_a_mismatch() {
    let waits = waits_of(&MISMATCH, &[0, 1, 2, 3], 4).expect("an answer");
    assert_eq!((waits.kind, waits.culprits.as_slice()), (Some(HangKind::Mismatch), &[Rank(1)][..]));
}

#[test]
fn ranks_that_wait_for_nothing_give_no_answer() {
    // A single rank waits for no other.
    assert_eq!(waits_of(&[ABSENT[2]], &[0], 1), None);
    assert_eq!(waits_of(&ABSENT, &[], 4), None);
}

#[test]
fn a_pickle_that_would_run_code_is_refused() {
    let harmful = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.";
    let error = FlightRecord::read(harmful).expect_err("refused");
    assert!(matches!(error, FlightError::Pickle(PickleError::Opcode { opcode: b'c', at: 2 })), "{error}");
    assert_eq!(FlightRecord::read(b"\x80\x02}."), Err(FlightError::NoEntries));
}

#[test]
fn a_truncated_or_corrupted_dump_never_panics() {
    for dump in ABSENT {
        for length in 0..dump.len() {
            assert!(FlightRecord::read(&dump[..length]).is_err(), "{length}");
        }
        for at in 0..dump.len() {
            let mut changed = dump.to_vec();
            changed[at] ^= 0x15;
            // It is parsed or refused.
            let _ = FlightRecord::read(&changed);
        }
    }
}

/// Output of `_dump_fr_trace` for a program in which rank 2 sleeps before its second `all_reduce`.
const LATE: [&[u8]; 4] = [
    include_bytes!("flight_records/late_0.pickle"),
    include_bytes!("flight_records/late_1.pickle"),
    include_bytes!("flight_records/late_2.pickle"),
    include_bytes!("flight_records/late_3.pickle"),
];
/// Output of `_dump_fr_trace_json` in the same run.
const LATE_JSON: [&[u8]; 4] = [
    include_bytes!("flight_records/late_0.json"),
    include_bytes!("flight_records/late_1.json"),
    include_bytes!("flight_records/late_2.json"),
    include_bytes!("flight_records/late_3.json"),
];

/// What the records of these ranks show if no other rank of the job is known.
fn shown(dumps: &[&[u8]], dumped: &[u32]) -> Option<BlockedCollective> {
    let records = dumped.iter().map(|rank| (Rank(*rank), read(dumps[*rank as usize]))).collect();
    held_up(&BTreeSet::new(), &records)
}

#[test]
fn json_and_pickle_dumps_have_the_same_content() {
    for (json, pickle) in LATE_JSON.iter().zip(LATE) {
        assert!(looks_like_one(json) && looks_like_one(pickle));
        assert_eq!(read(json), read(pickle));
    }
}

#[test]
fn records_name_the_rank_group_and_operation_that_the_others_wait_for() {
    for dumps in [LATE, LATE_JSON] {
        let shown = shown(&dumps, &[0, 1, 2, 3]).expect("ranks wait");
        assert_eq!((shown.culprits.as_slice(), shown.kind), (&[Rank(2)][..], Some(HangKind::UserCode)));
        assert_eq!(shown.waiting, [Rank(0), Rank(1), Rank(3)]);
        assert_eq!((shown.process_group.as_str(), shown.collective), ("0", 2));
        assert_eq!(shown.operation, "all_reduce of [8] Float");
        testing::snapshot!(
            "reasons",
            "flight: records name the rank group and operation that the others wait for",
            shown.summary
        );
    }
}

#[test]
fn the_operation_is_one_in_which_ranks_wait_directly_for_the_culprit() {
    // Rank 3 waits too, but for a rank that waits itself.
    let shown = shown(&ABSENT, &[0, 1, 2, 3]).expect("ranks wait");
    assert_eq!((shown.culprits.as_slice(), shown.process_group.as_str()), (&[Rank(2)][..], "0"));
    assert_eq!(shown.waiting, [Rank(0), Rank(1)]);
}

#[test]
fn a_rank_without_a_flight_record_is_reported_as_such() {
    let records: BTreeMap<Rank, FlightRecord> =
        [0, 1, 3].iter().map(|rank| (Rank(*rank), read(LATE_JSON[*rank as usize]))).collect();
    let known = BTreeSet::from([Rank(2)]);
    let shown = held_up(&known, &records).expect("ranks wait");
    assert_eq!((shown.kind, shown.culprits.as_slice()), (None, &[Rank(2)][..]));
    assert_eq!(shown.without_record, [Rank(2)]);
    testing::snapshot!(
        "reasons",
        "flight: a rank without a flight record is reported as such",
        shown.summary
    );
    // Rank 2 is unknown here: all known ranks have entered.
    let shown = held_up(&BTreeSet::new(), &records).expect("ranks wait");
    assert_eq!((shown.kind, shown.culprits.len()), (Some(HangKind::Network), 0));
    testing::snapshot!(
        "reasons",
        "flight: a rank without a flight record is reported as such 2",
        shown.summary
    );
}

#[test]
fn ranks_in_different_operations_are_reported_with_both_operations() {
    let shown = shown(&MISMATCH, &[0, 1, 2, 3]).expect("ranks wait");
    assert_eq!((shown.kind, shown.culprits.as_slice()), (Some(HangKind::Mismatch), &[Rank(1)][..]));
    testing::snapshot!(
        "reasons",
        "flight: ranks in different operations are reported with both operations",
        shown.summary
    );
}

/// A record as NCCL's recorder writes it for asynchronous operations: numbers `1..=to`, completed up to `done`.
fn launched(done: u64, to: u64) -> FlightRecord {
    let entries: Vec<String> = (1..=to)
        .map(|number| {
            let state = if number <= done { "completed" } else { "scheduled" };
            format!(
                r#"{{"process_group": ["7", "tp"], "collective_seq_id": {number}, "is_p2p": false, "retired": false,
                "profiling_name": "nccl:all_gather_{number}", "state": "{state}", "input_sizes": [[{number}]],
                "input_dtypes": ["BFloat16"], "frames": [{{"line": 1}}], "time_created_ns": {number}}}"#
            )
        })
        .collect();
    let text = format!(
        r#" {{"version": "2.10", "entries": [{}], "pg_config": {{"7": {{"ranks": [4, 5, 6]}}}}}}"#,
        entries.join(",")
    );
    assert!(looks_like_one(text.as_bytes()));
    read(text.as_bytes())
}

#[test]
fn the_operation_is_the_first_that_the_culprit_did_not_enter() {
    let records = [(4, 2, 9), (5, 2, 2), (6, 2, 8)];
    let records = records.map(|(rank, done, to)| (Rank(rank), launched(done, to)));
    let shown = held_up(&BTreeSet::new(), &records.into()).expect("ranks wait");
    assert_eq!((shown.culprits.as_slice(), shown.collective), (&[Rank(5)][..], 3));
    assert_eq!(shown.operation, "all_gather_3 of [3] BFloat16");
    let no_one = [(4, 3, 3), (5, 3, 3)].map(|(rank, done, to)| (Rank(rank), launched(done, to)));
    assert_eq!(held_up(&BTreeSet::new(), &no_one.into()), None, "no rank waits");
}

#[test]
fn a_rank_that_entered_everything_and_completed_less_than_the_others_is_the_culprit() {
    let blocked = |all: [(u32, u64, u64); 3]| {
        let records = all.map(|(rank, done, to)| (Rank(rank), launched(done, to)));
        held_up(&BTreeSet::new(), &records.into()).expect("ranks wait")
    };
    let shown = blocked([(4, 4, 9), (5, 2, 9), (6, 4, 8)]);
    assert_eq!((shown.kind, shown.culprits.as_slice()), (None, &[Rank(5)][..]));
    assert_eq!((shown.collective, shown.waiting.as_slice()), (3, &[Rank(4), Rank(6)][..]));
    testing::snapshot!(
        "reasons",
        "flight: a rank that entered everything and completed less than the others is the culprit",
        shown.summary
    );
    let several = blocked([(4, 2, 9), (5, 2, 9), (6, 4, 9)]);
    assert_eq!(several.culprits, [Rank(4), Rank(5)]);
    let alike = blocked([(4, 2, 9), (5, 2, 9), (6, 2, 9)]);
    assert_eq!((alike.kind, alike.culprits.len()), (Some(HangKind::Network), 0));
}

#[test]
fn a_gather_of_other_sizes_into_one_tensor_is_a_mismatch_and_a_gather_of_tensors_is_none() {
    let mismatch = |kind: &str, size: u32| {
        read(
            format!(
                r#"{{"entries": [{{"process_group": ["7", "dp"], "collective_seq_id": 3, "is_p2p": false,
                "retired": false, "profiling_name": "nccl:{kind}", "state": "scheduled", "input_sizes": [[{size}]],
                "input_dtypes": ["Float"]}}], "pg_config": {{"7": {{"ranks": [0, 1, 2]}}}}}}"#
            )
            .as_bytes(),
        )
    };
    let shown = |kind: &str| {
        let records = [(0, 8), (1, 8), (2, 16)].map(|(rank, size)| (Rank(rank), mismatch(kind, size)));
        held_up(&BTreeSet::new(), &records.into()).expect("ranks wait")
    };
    for kind in ["_all_gather_base", "all_gather_into_tensor"] {
        assert_eq!(shown(kind).kind, Some(HangKind::Mismatch), "{kind}");
        assert_eq!(shown(kind).culprits, [Rank(2)], "{kind}");
    }
    assert_eq!(shown("all_gather").kind, Some(HangKind::Network));
}

/// Records of a job of 16 ranks whose hang was injected, if they are next to the project.
#[test]
fn the_ranks_of_injected_hangs_are_named() {
    for (name, ranks) in [("gpu_error_1st", [12, 14]), ("lock_gil_1st", [9, 14])] {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../../shared/data/nvrx-flight-records")
            .join(name);
        let record = |rank: u32| {
            let dump = std::fs::read(folder.join(format!("_dump_{rank}"))).ok()?;
            Some((Rank(rank), read(&dump)))
        };
        let Some(records) = (0..16).map(record).collect::<Option<BTreeMap<Rank, FlightRecord>>>() else {
            testing::skip(&format!("no flight records in {}", folder.display()));
            return;
        };
        let shown = held_up(&BTreeSet::new(), &records).expect("ranks wait");
        assert_eq!(shown.culprits, ranks.map(Rank), "{name}: {}", shown.summary);
    }
}

#[test]
fn invalid_json_is_refused_and_a_log_is_not_mistaken_for_a_dump() {
    assert!(matches!(FlightRecord::read(b"{\"entries\": [1, 2"), Err(FlightError::Json(_))));
    assert_eq!(FlightRecord::read(b"{\"entries\": 3}"), Err(FlightError::NoEntries));
    let deep = [b"{\"entries\":".to_vec(), vec![b'['; 100_000]].concat();
    assert!(matches!(FlightRecord::read(&deep), Err(FlightError::Json(_))), "nested too deeply");
    for log in ["step 1 loss 2.0\n", "{\"entries\": 3, \"step\": 1}\n", "{\"pg_config\": {}}\n", ""] {
        assert!(!looks_like_one(log.as_bytes()), "{log}");
    }
}

#[test]
fn a_truncated_or_corrupted_json_dump_never_panics() {
    for dump in LATE_JSON {
        for length in 0..dump.len().saturating_sub(1) {
            assert!(FlightRecord::read(&dump[..length]).is_err(), "{length}");
        }
        for at in 0..dump.len() {
            let mut changed = dump.to_vec();
            changed[at] ^= 0x15;
            let _ = FlightRecord::read(&changed);
        }
    }
}

//! The reports of NCCL's RAS service in all formats, and the health and events derived from them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use std::collections::BTreeMap;

use mainstay_hang::nccl_ras::{
    CommRank, Communicator, Group, Missing, NcclJudge, NcclLimits, Operation, Process, RankError, RasReply,
    RasReport, State, TextError, Wire, parse_text,
};
use mainstay_hang::{Count, waits};
use mainstay_model::entry::Fact;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::id::Rank;
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Span};
use proptest::prelude::*;

const IN_ORDER: &str = "\
NCCL version 2.26.2 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          8            1         16       16

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         8        16        16   RUNNING      OK
    1         8         2       1-2         2        16   RUNNING      OK

Errors
======

Warnings
========

";

const TROUBLE: &str = "\
NCCL version 2.28.3+cuda12.9 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          8            1         16       16

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         8        16        15   RUNNING  INCOMPLETE,ERROR,MISMATCH
    1         7         1         2         2        14   RUNNING      OK

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

DEAD
  2 job processes are considered dead (unreachable via the RAS network)
  Process 81 on node fe80::1 managing GPUs 0,1 (NVML 2,3)
  [could not find information on 1 process]

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 5 (NVML 6) managed by process 3487984 on node 172.16.64.213

#0-0 (cf264af53edbe986) ERROR
  Initialization error on 1 rank
  Rank 9 reported Unhandled CUDA error -- GPU 1 managed by process 3487980 on node 172.16.64.210
  Asynchronous errors on 2 ranks
  2 ranks reported Remote process error
  Rank 10 -- GPU 2 managed by process 3487981 on node 172.16.64.210
  Rank 11 -- [process information not found]

Warnings
========

TIMEOUT
  Encountered 3 communication timeouts while gathering communicator data

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different status
  14 ranks have status RUNNING
  Rank 9 has status INIT -- GPU 1 managed by process 3487980 on node 172.16.64.210
  Communicator ranks have different AllReduce operation counts
  12 ranks have launched up to operation 1024
  2 ranks have launched up to operation 1023
  Rank 3 -- GPU 3 managed by process 3487982 on node 172.16.64.210
  Rank 4 -- GPU 4 managed by process 3487983 on node 172.16.64.210
  Rank 9 has not launched any operations -- GPU 1 managed by process 3487980 on node 172.16.64.210

  Communicator ranks have different Broadcast operation counts
  14 ranks have launched up to operation 7
  Rank 9 has not launched any operations -- GPU 1 managed by process 3487980 on node 172.16.64.210

";

fn rank(rank: u32, gpu: u32, pid: i32, host: &str) -> CommRank {
    CommRank { rank, process: Some(Process { host: host.into(), pid }), gpu: Some(gpu) }
}

#[test]
fn a_report_without_problems_is_only_table_lines() {
    let report = parse_text(IN_ORDER).unwrap();
    assert_eq!(report, RasReport { version: "2.26.2".into(), in_order: 9, ..RasReport::default() });
}

#[test]
fn all_problems_of_a_text_report_are_read() {
    let report = parse_text(TROUBLE).unwrap();
    assert_eq!((report.version.as_str(), report.timeouts, report.in_order), ("2.28.3+cuda12.9", 3, 7));
    assert_eq!((report.missing.count, report.dead.count), (1, 2));
    assert_eq!(report.missing.named, [Process { host: "172.16.64.213".into(), pid: 3487984 }]);
    assert_eq!(report.dead.named, [Process { host: "fe80::1".into(), pid: 81 }]);

    let [communicator] = report.communicators.as_slice() else { panic!("{report:#?}") };
    assert_eq!(
        (communicator.hash.as_str(), communicator.size, communicator.missing_count),
        ("cf264af53edbe986", Some(16), 1)
    );
    assert_eq!(communicator.missing, [(rank(5, 5, 3487984, "172.16.64.213"), Missing::Unresponsive)]);
    let errors: Vec<(&str, bool, u32, usize)> = communicator
        .errors
        .iter()
        .map(|group| (group.value.what.as_str(), group.value.asynchronous, group.ranks, group.named.len()))
        .collect();
    assert_eq!(errors, [("Unhandled CUDA error", false, 1, 1), ("Remote process error", true, 2, 2)]);
    assert_eq!(communicator.errors[1].named[1], CommRank { rank: 11, process: None, gpu: None });
    let states: Vec<(State, u32)> =
        communicator.states.iter().map(|group| (group.value, group.ranks)).collect();
    assert_eq!(states, [(State::Running, 14), (State::Init, 1)]);
    let operations: Vec<(&str, Vec<(u64, u32)>)> = communicator
        .operations
        .iter()
        .map(|operation| {
            (
                operation.name.as_str(),
                operation.groups.iter().map(|group| (group.value, group.ranks)).collect(),
            )
        })
        .collect();
    assert_eq!(
        operations,
        [("AllReduce", vec![(1024, 12), (1023, 2), (0, 1)]), ("Broadcast", vec![(7, 14), (0, 1)])]
    );
    let behind: Vec<(Option<u32>, u64, u64)> = communicator
        .behind()
        .iter()
        .map(|behind| (behind.rank.as_ref().map(|rank| rank.rank), behind.own, behind.furthest))
        .collect();
    assert_eq!(behind, [(Some(3), 1023, 1024), (Some(4), 1023, 1024), (Some(9), 0, 1024), (Some(9), 0, 7)]);
}

#[test]
fn reports_of_the_first_version_with_less_detail_are_read() {
    let text = TROUBLE
        .replace(
            "  Rank 5 -- GPU 5 (NVML 6) managed by process 3487984 on node 172.16.64.213",
            "  The missing ranks: 5,7",
        )
        .replace("different AllReduce operation counts", "different collective operation counts");
    let report = parse_text(&text).unwrap();
    let communicator = &report.communicators[0];
    assert_eq!(communicator.missing.iter().map(|(rank, _)| rank.rank).collect::<Vec<_>>(), [5, 7]);
    assert_eq!(communicator.missing_count, 2);
    assert_eq!(communicator.operations[0].name, "collective");
}

#[test]
fn truncated_and_foreign_texts_are_refused() {
    for end in ["Warnings", "Errors", "Job summary"] {
        let (cut, _) = TROUBLE.split_once(end).unwrap();
        assert_eq!(parse_text(cut), Err(TextError::Incomplete));
    }
    for other in
        ["", "\n\n", "HTTP/1.1 400 Bad Request\r\n", "ERROR: Unknown command", "NCCL", "NCCL version "]
    {
        assert!(matches!(parse_text(other), Err(TextError::NotNccl(_))), "{other:?}");
    }
}

fn json(text: &str) -> RasReport {
    serde_json::from_str::<Wire>(text).unwrap().into()
}

/// A JSON report as NCCL writes it: two of three ranks, the third in `missing`.
fn document(counts: [u64; 2], missing: &str) -> String {
    let rank = |rank: u32, count: u64| {
        format!(
            r#"{{ "rank": {rank}, "host": "10.0.0.1", "pid": {}, "cuda_dev": {rank}, "nvml_dev": {rank},
                "status": {{ "init_state": 0, "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": false }},
                "collective_counts": {{ "Broadcast": 0, "AllReduce": {count} }} }}"#,
            4711 + rank
        )
    };
    format!(
        r#"{{ "nccl_version": "2.29.2", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
            "timestamp": "2026-11-21 19:00:00", "communicators_count": 1, "communicators": [ {{
            "hash": "0x8a5ed2b3ef4c0f", "secondary_hash": "0x1:0x2", "size": 3, "ranks_count": 2, "missing_ranks_count": 1,
            "ranks": [{}, {}], "missing_ranks": [{missing}] }} ], "ras": {{ "collection_time_sec": 0.002, "timeouts_count": 1 }} }}"#,
        rank(0, counts[0]),
        rank(1, counts[1])
    )
}

fn missing(unresponsive: bool, dead: bool) -> String {
    format!(
        r#"{{ "rank": 2, "host": "10.0.0.2", "pid": 99, "cuda_dev": 0, "nvml_dev": 0,
            "status": {{ "unresponsive": {unresponsive}, "considered_dead": {dead} }} }}"#
    )
}

#[test]
fn json_reports_every_rank() {
    let report = json(&document([42, 41], &missing(true, false)));
    assert_eq!(
        (report.version.as_str(), report.timeouts, report.missing.count, report.dead.count),
        ("2.29.2", 1, 1, 0)
    );
    let communicator = &report.communicators[0];
    assert_eq!((communicator.hash.as_str(), communicator.size), ("008a5ed2b3ef4c0f", Some(3)));
    assert_eq!(communicator.missing, [(rank(2, 0, 99, "10.0.0.2"), Missing::Unresponsive)]);
    assert_eq!(communicator.operations.len(), 1, "operations that no rank launched are skipped");
    let behind = communicator.behind();
    assert_eq!(behind.len(), 1);
    assert_eq!((&behind[0].rank, behind[0].own), (&Some(rank(1, 1, 4712, "10.0.0.1")), 41));

    assert_eq!(json(&document([42, 41], &missing(true, true))).dead.count, 1);
    let left = json(&document([42, 42], &missing(false, false)));
    assert_eq!(left.communicators[0].missing[0].1, Missing::NotMember);
    assert_eq!(
        left.communicators[0].states.iter().map(|group| group.value).collect::<Vec<_>>(),
        [State::Running, State::NoComm]
    );
    let in_order = json(&document([42, 42], ""));
    assert!(!in_order.communicators[0].mismatch() && in_order.communicators[0].behind().is_empty());
}

#[test]
fn collective_counts_are_available_for_the_diagnosis_of_hangs() {
    let process = |pid| Process { host: "10.0.0.1".into(), pid };
    let count = |entered| Count { comm: 0x008a_5ed2_b3ef_4c0f, entered, completed: 41, signature: 0 };
    let counts = json(&document([42, 41], "")).counts();
    assert_eq!(counts, [(process(4711), vec![count(42)]), (process(4712), vec![count(41)])].into());
    // A text report names only the ranks that differ.
    let pids: Vec<i32> = parse_text(TROUBLE).unwrap().counts().keys().map(|process| process.pid).collect();
    assert_eq!(pids, [3487980, 3487982, 3487983]);
    assert!(parse_text(IN_ORDER).unwrap().counts().is_empty());
}

#[test]
fn flags_and_errors_in_json_have_the_priority_that_nccl_gives_them() {
    let with =
        |from: &str, to: &str| json(&document([42, 42], "").replacen(from, to, 1)).communicators[0].clone();
    // The other rank is in `Running`. Groups of the same size are in the order of their states.
    let states =
        |from: &str, to: &str| with(from, to).states.iter().map(|group| group.value).collect::<Vec<_>>();
    assert_eq!(states("\"abort_flag\": false", "\"abort_flag\": true"), [State::Running, State::Abort]);
    assert_eq!(
        states("\"destroy_flag\": false", "\"destroy_flag\": true"),
        [State::Running, State::Finalize]
    );
    assert_eq!(states("\"init_state\": 0", "\"init_state\": 7"), [State::Init, State::Running]);
    assert_eq!(with("\"init_state\": 0", "\"init_state\": 7").errors, []);
    let failed = with("\"async_error\": 0", "\"async_error\": 6");
    assert_eq!(failed.errors[0].value, RankError { what: "Remote process error".into(), asynchronous: true });
}

fn at(seconds: u64) -> Mono {
    Mono(0).after(Span::seconds(1000 + seconds))
}

fn events(judged: &SensorReport) -> Vec<&str> {
    judged
        .facts
        .iter()
        .map(|fact| match fact {
            Fact::Observed(observation) => observation.event.as_str(),
            other => panic!("{other:?}"),
        })
        .collect()
}

fn ras_reply(text: &str) -> RasReply {
    RasReply::Reported(json(text))
}

#[test]
fn no_component_is_shown_without_a_problem() {
    let mut judge = NcclJudge::new(NcclLimits::default());
    for (seconds, asked) in [
        (0, RasReply::NoJob),
        (60, RasReply::Refused),
        (120, RasReply::Failed("HTTP".into())),
        (180, RasReply::Reported(parse_text(IN_ORDER).unwrap())),
        // One rank is behind in each report, but the counts increase.
        (240, ras_reply(&document([42, 41], ""))),
        (900, ras_reply(&document([82, 81], ""))),
        (1500, ras_reply(&document([122, 122], ""))),
        (1600, RasReply::Refused),
    ] {
        assert_eq!(judge.step(at(seconds), &asked).components, [], "{asked:?}");
    }
}

#[test]
fn ranks_apart_for_600_s_are_degraded_without_a_recommended_action() {
    let mut judge = NcclJudge::new(NcclLimits::default());
    let apart = ras_reply(&document([42, 41], ""));
    assert_eq!(events(&judge.step(at(0), &apart)), ["ras_answers"]);
    assert_eq!(judge.step(at(599), &apart).components, []);
    let judged = judge.step(at(600), &apart);
    let nccl = &judged.components[0];
    assert_eq!((nccl.state, nccl.action), (HealthState::Degraded, RecommendedAction::None));
    testing::snapshot!("reasons", "nccl_ras: a rank that is behind for ten minutes degrades", nccl.reason);
    assert_eq!(events(&judged), ["ranks_apart"]);
    assert_eq!(events(&judge.step(at(660), &apart)), [""; 0]);
    // Another job answers: this does not clear the state.
    let other = document([1, 1], "").replace("0x8a5e", "0x1111");
    assert_eq!(
        judge.step(at(720), &RasReply::Reported(RasReport { in_order: 1, ..json(&other) })).components[0]
            .state,
        HealthState::Degraded
    );
    let judged = judge.step(at(780), &ras_reply(&document([43, 43], "")));
    assert_eq!(judged.components[0].state, HealthState::Healthy);
}

#[test]
fn dead_processes_and_errors_are_reported_at_once() {
    let mut judge = NcclJudge::new(NcclLimits::default());
    let judged = judge.step(at(0), &ras_reply(&document([42, 42], &missing(true, true))));
    let nccl = &judged.components[0];
    assert_eq!((nccl.state, nccl.action), (HealthState::Degraded, RecommendedAction::RestartProcess));
    assert!(nccl.reason.contains("process 99 on 10.0.0.2"), "{nccl:?}");
    assert_eq!(events(&judged), ["ras_answers", "process_dead"]);

    let judged = judge.step(at(60), &RasReply::Reported(parse_text(TROUBLE).unwrap()));
    assert!(events(&judged).contains(&"rank_error"), "{judged:#?}");
    // The job ends: its problems do not count for the next job.
    let judged = judge.step(at(120), &RasReply::NoJob);
    assert_eq!(judged.components[0].state, HealthState::Healthy);
}

#[test]
fn a_service_that_stops_answering_is_unknown() {
    let mut judge = NcclJudge::new(NcclLimits::default());
    judge.step(at(0), &ras_reply(&document([42, 42], "")));
    let silent = RasReply::Failed("timeout".into());
    let judged = judge.step(at(60), &silent);
    assert_eq!((judged.components[0].state, events(&judged)), (HealthState::Unknown, vec!["ras_silent"]));
    assert_eq!(events(&judge.step(at(120), &silent)), [""; 0]);
    assert_eq!(
        judge.step(at(180), &ras_reply(&document([43, 43], ""))).components[0].state,
        HealthState::Healthy
    );
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "(?s).{0,200}") {
        let _ = parse_text(&text);
        let _ = parse_text(&format!("NCCL version 2.26 {text}"));
    }

    #[test]
    fn no_corrupted_report_makes_the_parser_or_judge_panic(
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..40, "[#0-9a-zA-Z ()\\n]{0,12}"), 1..8),
    ) {
        let mut text = TROUBLE.to_owned();
        for (at, length, with) in cuts {
            let at = at.index(text.len());
            text.replace_range(at..(at + length).min(text.len()), &with);
        }
        if let Ok(report) = parse_text(&text) {
            let mut judge = NcclJudge::new(NcclLimits::default());
            judge.step(at(0), &RasReply::Reported(report.clone()));
            judge.step(at(900), &RasReply::Reported(report));
        }
    }

    #[test]
    fn the_rank_that_is_behind_in_json_is_named(counts in prop::array::uniform2(0_u64..5)) {
        let report = json(&document(counts, ""));
        let behind = report.communicators[0].behind();
        let expected = u32::from(counts[1] < counts[0]);
        prop_assert_eq!(behind.len(), usize::from(counts[0] != counts[1]));
        if counts[0] != counts[1] {
            prop_assert_eq!(behind[0].rank.as_ref().unwrap().rank, expected);
        }
    }
}

/// A text report names the few ranks that differ and only counts the others.
#[test]
fn the_rank_that_all_wait_for_is_found_in_a_report_with_few_names() {
    let process = |pid| Some(Process { host: "10.0.0.2".into(), pid });
    let few = CommRank { rank: 2, process: process(102), gpu: None };
    let groups = vec![
        Group { value: 41, ranks: 3, named: Vec::new() },
        Group { value: 40, ranks: 1, named: vec![few.clone()] },
    ];
    let communicator = Communicator {
        hash: "00000000000000ab".into(),
        size: Some(4),
        operations: vec![Operation { name: "AllReduce".into(), groups }],
        ..Communicator::default()
    };
    let report = RasReport { communicators: vec![communicator.clone()], ..RasReport::default() };
    let ranks: BTreeMap<i32, Rank> = (0..4).map(|rank| (100 + rank, Rank(rank as u32))).collect();
    let waits_for = waits("NCCL's RAS service", &report.counted(&ranks)).expect("an answer");
    assert_eq!(waits_for.culprits, [Rank(2)]);
    testing::snapshot!(
        "reasons",
        "nccl_ras: the rank that all wait for is found in a report with few names",
        waits_for.reported
    );

    // The others wait for a rank that did not answer. The kind of its hang is unknown.
    let groups = vec![Group { value: 41, ranks: 3, named: Vec::new() }];
    let operations = vec![Operation { name: "AllReduce".into(), groups }];
    let missing = vec![(few, Missing::Unresponsive)];
    let silent = Communicator { operations, missing, missing_count: 1, ..communicator };
    let report = RasReport { communicators: vec![silent], ..RasReport::default() };
    let waits_for =
        waits("NCCL's RAS service", &report.counted(&ranks)).map(|answer| (answer.kind, answer.culprits));
    assert!(waits_for.is_none_or(|answer| answer == (None, vec![Rank(2)])), "no other rank is named");
    testing::snapshot!("reasons", "nccl_ras: a rank without a report", report.lines().join("\n"));

    // If all ranks launched the same operations, none waits.
    let healthy = RasReport { communicators: Vec::new(), in_order: 1, ..RasReport::default() };
    assert_eq!(waits("it", &healthy.counted(&ranks)), None);
}

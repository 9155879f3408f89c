//! `mainstay attribute` as people and scripts use it: real files, the real program.

#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn mainstay(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mainstay"))
        .arg("attribute")
        .args(args)
        .output()
        .expect("the program runs")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Compares a text with its snapshot, without the folder of the logs.
#[track_caller]
fn shows(case: &str, text: &str, logs: &str) {
    testing::snapshot!("attribute", case, text.replace(logs, "LOGS"));
}

#[test]
fn a_directory_of_logs_is_judged_with_root_and_victims() {
    let dir = testing::tempdir().expect("a directory");
    let logs = dir.path().to_str().expect("plain text");
    fs::write(
        dir.path().join("rank0.log"),
        "step 1\nNCCL WARN socketProgress: Connection closed by remote peer n2\n",
    )
    .expect("written");
    fs::write(
        dir.path().join("rank1.log"),
        "step 1\nstep 2\nRuntimeError: CUDA error: uncorrectable ECC error\n",
    )
    .expect("written");
    let output = mainstay(&["--logs", logs, "--json"]);
    assert!(output.status.success());
    let reported: Value = serde_json::from_str(&text(&output)).expect("one JSON object");
    assert_eq!(reported["class"], "hardware_gpu");
    assert_eq!(reported["fault_domain"], "hardware");
    assert_eq!(reported["restart"], "restart_exclude_node");
    assert_eq!(reported["culprit"], 1);
    assert_eq!(reported["victims"], serde_json::json!([0]));
    assert_eq!(reported["root"][0]["line"], 3);
    for option in ["--markdown", "--exit-info=1"] {
        shows(&format!("a GPU error: {option}"), &text(&mainstay(&["--logs", logs, option])), logs);
    }
}

#[test]
fn labelled_cases_are_scored_and_lines_of_joined_texts_found_again() {
    let dir = testing::tempdir().expect("a directory");
    let file = dir.path().join("cases.jsonl");
    let case = serde_json::json!({
        "id": "a", "log": "fine\nNVRM: Xid (PCI:0000:01:00): 79, GPU has\nfallen off the bus.",
        "log_joined": "fine\nNVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
        "exit_info": null, "kernel_log": null, "tags": [], "something_else": 1,
        "label": { "class": "hardware_gpu", "fault_domain": "hardware", "restart": "restart_exclude_node",
                   "root_lines": [2], "rationale": "told" },
    });
    fs::write(&file, format!("{case}\n")).expect("written");
    let output = mainstay(&["--eval", file.to_str().expect("plain text"), "--json"]);
    let reported: Value = serde_json::from_str(&text(&output)).expect("one JSON object");
    let answer = &reported["cases"][0];
    assert_eq!(
        (&answer["id"], &answer["class"], &answer["right"]),
        (&"a".into(), &"hardware_gpu".into(), &true.into())
    );
    assert_eq!(answer["root_lines"], serde_json::json!([2, 3]));
    // Evidence on a single line does not raise it.
    assert!(answer["confidence"].as_f64().is_some_and(|sure| sure > 0.8));
    assert_eq!(reported["summary"]["all"]["domain"], 1);
}

#[test]
fn what_cannot_be_read_is_named() {
    let output = mainstay(&["--logs", "/nonexistent/rank0.log"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nonexistent/rank0.log"));
    assert_eq!(mainstay(&[]).status.code(), Some(64));
}

const ECC: &str = "RuntimeError: CUDA error: uncorrectable ECC error\n";

fn notes(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn what_is_no_text_is_named_with_what_to_do_and_the_rest_is_judged() {
    let dir = testing::tempdir().expect("a directory");
    let logs = dir.path().to_str().expect("plain text");
    let empty = mainstay(&["--logs", logs, "--json"]);
    shows("notes: no file", &notes(&empty), logs);
    fs::write(dir.path().join("rank0.log.bz2"), "BZh91AY").expect("written");
    fs::write(dir.path().join("rank3.log.gz"), [0x1f, 0x8b, 8, 0, 1, 2, 3]).expect("written");
    for nothing in [empty, mainstay(&["--logs", logs, "--json"])] {
        assert_eq!(
            (nothing.status.code(), text(&nothing)),
            (Some(3), String::new()),
            "nothing read is no verdict"
        );
    }
    let utf_16: Vec<u8> = [0xff, 0xfe].into_iter().chain(ECC.bytes().flat_map(|byte| [byte, 0])).collect();
    fs::write(dir.path().join("rank1.log"), utf_16).expect("written");
    let output = mainstay(&["--logs", logs, "--json"]);
    let reported: Value = serde_json::from_str(&text(&output)).expect("one JSON object");
    assert_eq!((&reported["class"], &reported["culprit"]), (&"hardware_gpu".into(), &1.into()));
    shows("notes: compressed files", &notes(&output), logs);
    assert!(!notes(&output).contains("rank1.log"), "{}", notes(&output));
}

#[test]
fn links_to_files_are_followed_each_file_is_read_once_and_circles_end() {
    let (dir, elsewhere) =
        (testing::tempdir().expect("a directory"), testing::tempdir().expect("a directory"));
    fs::write(elsewhere.path().join("0.log"), ECC).expect("written");
    let link = |target: &std::path::Path, name: &str| {
        std::os::unix::fs::symlink(target, dir.path().join(name)).expect("a link");
    };
    link(&elsewhere.path().join("0.log"), "a.log");
    link(&elsewhere.path().join("0.log"), "b.log");
    link(&elsewhere.path().join("gone.log"), "c.log");
    link(dir.path(), "circle");
    let output = mainstay(&["--logs", dir.path().to_str().expect("plain text"), "--json"]);
    let reported: Value = serde_json::from_str(&text(&output)).expect("one JSON object");
    assert_eq!((&reported["class"], &reported["evidence"][0]["count"]), (&"hardware_gpu".into(), &1.into()));
}

#[test]
fn a_bundle_comes_through_a_pipe_and_a_compressed_one_is_named() {
    let dir = testing::tempdir().expect("a directory");
    let bundle = dir.path().join("bundle");
    let replay = |what: &str, piped: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        command.args(["replay", what]);
        if piped {
            command.stdin(fs::File::open(&bundle).expect("the bundle"));
        }
        command.output().expect("the program runs")
    };
    fs::write(&bundle, "{\"mainstay_bundle\":1,\"version\":\"0.1.0\"}\n").expect("written");
    shows("replay: no failure", &text(&replay("-", true)), "-");
    fs::write(&bundle, [0x1f, 0x8b, 8, 0]).expect("written");
    let output = replay(bundle.to_str().expect("plain text"), false);
    assert_eq!(output.status.code(), Some(3));
    assert!(notes(&output).contains("| mainstay replay -"), "{}", notes(&output));
}

/// A record of PyTorch's flight recorder.
fn flight_record(name: &str) -> Vec<u8> {
    let records = concat!(env!("CARGO_MANIFEST_DIR"), "/hang/tests/it/flight_records");
    fs::read(format!("{records}/{name}")).expect("a record of the core's tests")
}

#[test]
fn flight_records_next_to_the_logs_name_the_rank_that_the_others_wait_for() {
    let dir = testing::tempdir().expect("a directory");
    let logs = dir.path().to_str().expect("plain text");
    fs::write(dir.path().join("rank0.log"), "step 1\nstep 2\n").expect("written");
    // Two as pickles and two as JSON, with torch's names and others; one torn, one hostile, one that names no rank.
    for (name, of) in [
        ("nccl_trace_rank_0", "late_0.pickle"),
        ("nccl_trace_rank_1", "late_1.json"),
        ("dump_2.json", "late_2.json"),
        ("job.rank3.trace", "late_3.pickle"),
        ("record", "late_3.json"),
    ] {
        fs::write(dir.path().join(name), flight_record(of)).expect("written");
    }
    let whole = flight_record("late_0.pickle");
    fs::write(dir.path().join("torn_rank_4"), &whole[..whole.len() / 2]).expect("written");
    fs::write(dir.path().join("hostile_rank_5"), b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
        .expect("written");
    let output = mainstay(&["--logs", logs, "--json"]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    for (file, why) in
        [("torn_rank_4", "in the middle"), ("hostile_rank_5", "not allowed"), ("record", "rank")]
    {
        let line = printed.lines().find(|line| line.contains(&format!("{logs}/{file}"))).unwrap_or_default();
        assert!(line.contains("left out") && line.contains(why), "{file}: {printed}");
    }
    assert!(output.status.success(), "{printed}");
    let reported: Value = serde_json::from_str(&text(&output)).expect("one JSON object");
    assert_eq!(reported["culprit"], 2, "{reported:#}");
    assert_eq!(reported["class"], "unknown", "why the rank did not come is not known");
    assert_eq!(reported["victims"], serde_json::json!([0, 1, 3]));
    assert_eq!(reported["collectives"]["process_group"], "0");
    assert_eq!(reported["collectives"]["operation"], "all_reduce of [8] Float");
    assert_eq!(reported["evidence"][0]["signature"], "torch.flight_record");
    for option in ["--exit-info=1", "--markdown"] {
        shows(&format!("flight records: {option}"), &text(&mainstay(&["--logs", logs, option])), logs);
    }
}

#[test]
fn a_cause_in_the_logs_is_shown_with_the_flight_records() {
    let dir = testing::tempdir().expect("a directory");
    let logs = dir.path().to_str().expect("plain text");
    for rank in 0..4 {
        let name = format!("nccl_trace_rank_{rank}");
        fs::write(dir.path().join(name), flight_record(&format!("late_{rank}.json"))).expect("written");
    }
    fs::write(dir.path().join("rank2.log"), "step 1\nRuntimeError: CUDA error: uncorrectable ECC error\n")
        .expect("written");
    let reported: Value =
        serde_json::from_str(&text(&mainstay(&["--logs", logs, "--json"]))).expect("one JSON object");
    assert_eq!(
        (&reported["class"], &reported["culprit"]),
        (&"hardware_gpu".into(), &2.into()),
        "{reported:#}"
    );
    assert_eq!(reported["evidence"][1]["signature"], "torch.flight_record");
    // It is the program's fault if ranks entered different collectives.
    for rank in 0..4 {
        let name = format!("nccl_trace_rank_{rank}");
        fs::write(dir.path().join(name), flight_record(&format!("mismatch_{rank}.pickle"))).expect("written");
    }
    fs::remove_file(dir.path().join("rank2.log")).expect("removed");
    let reported: Value =
        serde_json::from_str(&text(&mainstay(&["--logs", logs, "--json"]))).expect("one JSON object");
    assert_eq!((&reported["class"], &reported["culprit"]), (&"user_code".into(), &1.into()), "{reported:#}");
}

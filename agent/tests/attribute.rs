//! `mainstay attribute` as people and scripts meet it: real files, the real program.

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

#[test]
fn a_directory_of_logs_is_judged_with_root_and_victims() {
    let dir = tempfile::tempdir().expect("a directory");
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
    let told: Value = serde_json::from_str(&text(&output)).expect("one JSON object");
    assert_eq!(told["class"], "hardware_gpu");
    assert_eq!(told["fault_domain"], "hardware");
    assert_eq!(told["restart"], "restart_exclude_node");
    assert_eq!(told["culprit"], 1);
    assert_eq!(told["victims"], serde_json::json!([0]));
    assert_eq!(told["root"][0]["line"], 3);
    for (option, words) in [("--markdown", "## A faulty GPU"), ("--exit-info=1", "What to do next")] {
        assert!(text(&mainstay(&["--logs", logs, option])).contains(words), "{option}");
    }
}

#[test]
fn labelled_cases_are_scored_and_lines_of_joined_texts_found_again() {
    let dir = tempfile::tempdir().expect("a directory");
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
    let told: Value = serde_json::from_str(&text(&output)).expect("one JSON object");
    let answer = &told["cases"][0];
    assert_eq!(
        (&answer["id"], &answer["class"], &answer["right"]),
        (&"a".into(), &"hardware_gpu".into(), &true.into())
    );
    assert_eq!(answer["root_lines"], serde_json::json!([2, 3]));
    assert!(answer["confidence"].as_f64().is_some_and(|sure| sure > 0.9));
    assert_eq!(told["summary"]["all"]["domain"], 1);
}

#[test]
fn what_cannot_be_read_is_named() {
    let output = mainstay(&["--logs", "/nonexistent/rank0.log"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nonexistent/rank0.log"));
    assert_eq!(mainstay(&[]).status.code(), Some(64));
}

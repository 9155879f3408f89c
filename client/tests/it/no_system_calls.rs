//! Beats make no system call: shown by strace, on a real process.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a panic here is the test's report"
)]

use crate::support;

use std::process::Command;

use mainstay_client::{Client, Measures};
use support::TestPage;

const BEGIN: &str = "/marker-begin";
const END: &str = "/marker-end";
/// Set in the traced process, which runs this same test file.
const TRACED: &str = "MAINSTAY_TEST_TRACED";

#[test]
fn between_two_markers_there_are_beats_and_no_system_call() {
    if std::env::var_os(TRACED).is_some() {
        return beat_between_markers();
    }
    if Command::new("strace").arg("-V").output().is_err() {
        return testing::skip("strace is not installed");
    }
    let page = TestPage::new();
    let log = page.directory.path().join("strace.log");
    let output = Command::new("strace")
        .args(["-f", "-o"])
        .arg(&log)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "no_system_calls::between_two_markers_there_are_beats_and_no_system_call"])
        .env(TRACED, "1")
        .env("MAINSTAY_PAGE", &page.path)
        .output()
        .unwrap();
    let trace = std::fs::read_to_string(&log).unwrap_or_default();
    if trace.contains("PTRACE") || !trace.contains("execve(") {
        let printed = String::from_utf8_lossy(&output.stderr);
        return testing::skip(&format!("strace may not trace here: {printed}"));
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    // 1000 x (enter, step, step_with, beat, leave).
    assert_eq!(page.page.beat().unwrap().count, 5000);

    // Lines start with the thread's id; the markers show which thread it is.
    let begin = trace.lines().find(|line| line.contains(BEGIN)).expect("the first marker is in the trace");
    let thread = begin.split_whitespace().next().unwrap();
    let calls: Vec<&str> = trace
        .lines()
        .filter(|line| line.split_whitespace().next() == Some(thread))
        .skip_while(|line| !line.contains(BEGIN))
        .skip(1)
        .take_while(|line| !line.contains(END))
        .collect();
    assert!(trace.contains(END), "the second marker is not in the trace");
    assert!(calls.is_empty(), "beats made system calls: {calls:#?}");
}

fn beat_between_markers() {
    let client = Client::from_env();
    assert!(client.is_active(), "{:?}", client.refusal());
    let section = client.intern("forward");
    let _ = std::fs::metadata(BEGIN);
    for step in 0..1000 {
        client.enter(section);
        client.step(step);
        client.step_with(step, Measures { loss: Some(0.5), ..Default::default() });
        client.beat();
        client.leave(section);
    }
    let _ = std::fs::metadata(END);
}

//! The real client of NVRx asks our agent, as ft_launcher does before each rendezvous.

#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

use std::path::{Path, PathBuf};
use std::process::Command;

use mainstay_tests::{Agent, Stage, mainstay, skipped};
use serde_json::Value;

const OFF_BUS: &str = "4,100,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n";

/// A Python that has NVRx 0.7, and 0.6 next to it: `MAINSTAY_TEST_NVRX`, which `cargo xtask test` provides.
fn nvrx() -> Option<PathBuf> {
    let python = std::env::var_os("MAINSTAY_TEST_NVRX").map(PathBuf::from);
    if python.is_none() {
        skipped("MAINSTAY_TEST_NVRX names no Python with NVRx; `cargo xtask test` provides it");
    }
    python
}

/// An agent whose kernel log holds these lines.
fn agent(stage: &Stage, lines: &str) -> Agent {
    let log = stage.work().join("kmsg");
    std::fs::write(&log, lines).expect("a kernel log");
    let set = |key: &str, value: &Path| format!("MAINSTAY_AGENT_{key}={}", value.display());
    let line = [
        "env".to_owned(),
        set("KERNEL_LOG_PATH", &log),
        set("GPU_ENABLED", Path::new("false")),
        set("NVRX_HEALTH_SOCKET", &socket(stage)),
        mainstay().display().to_string(),
    ];
    Agent::start_under(&line, stage)
}

fn socket(stage: &Stage) -> PathBuf {
    stage.tmpfs().join("nvhcd.sock")
}

/// The release of the client.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Release {
    /// It treats an answer that it does not understand as healthy.
    Newest,
    /// It treats an answer that it does not understand as unhealthy.
    Older,
}

fn ask(python: &Path, stage: &Stage, release: Release, segments: Option<&Path>) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/nvrx_asks.py");
    let mut asking = Command::new(python);
    asking.arg(script).arg(format!("unix://{}", socket(stage).display()));
    asking.args(segments).env("SLURM_PROCID", "0").env("SLURM_JOB_ID", "77");
    if release == Release::Older {
        let environment = python.parent().and_then(Path::parent).expect("bin/python of an environment");
        asking.env("PYTHONPATH", environment.join("older"));
    }
    let output = asking.output().expect("a Python");
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {printed}"))
}

#[test]
fn the_client_of_nvrx_lets_a_node_in_that_is_well() {
    let Some(python) = nvrx() else { return };
    let stage = Stage::new();
    let _agent = agent(&stage, "6,1,1000000,-;Linux version 6.1\n");
    for release in [Release::Newest, Release::Older] {
        let answer = ask(&python, &stage, release, None);
        assert_eq!(answer["healthy"], true, "{release:?} {answer}");
        // The result is also true if the client could not ask: its log shows that it did.
        assert!(answer["said"].to_string().contains("success (fail_count=0)"), "{release:?} {answer}");
    }
}

#[test]
fn the_client_of_nvrx_keeps_a_node_out_that_lost_a_gpu() {
    let Some(python) = nvrx() else { return };
    let stage = Stage::new();
    let _agent = agent(&stage, OFF_BUS);
    for release in [Release::Newest, Release::Older] {
        let answer = ask(&python, &stage, release, None);
        assert_eq!(answer["healthy"], false, "{release:?} {answer}");
        let why = answer["said"].to_string();
        assert!(why.contains("gpu.0000:3b:00"), "the log of {release:?} says why: {answer}");
    }
}

#[test]
fn the_client_of_nvrx_reads_a_segment_file_as_we_write_it() {
    let Some(python) = nvrx() else { return };
    let stage = Stage::new();
    let _agent = agent(&stage, "");
    let segments = stage.work().join("segments");
    std::fs::create_dir(&segments).expect("a directory");
    assert_eq!(ask(&python, &stage, Release::Newest, Some(&segments))["segment_healthy"], true);
    let file = file_of_the_job(&segments);
    std::fs::write(&file, "mainstay on node-1: gpu.0000:3b:00: gone\n").expect("a segment file");
    assert_eq!(ask(&python, &stage, Release::Newest, Some(&segments))["segment_healthy"], false);
}

/// The path of the agent's file for job 77 (`agent/tests/it/nvrx.rs` checks it).
fn file_of_the_job(directory: &Path) -> PathBuf {
    directory.join("segment_health_check.77.77")
}

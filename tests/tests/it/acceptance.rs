//! The GPU acceptance program's training, checkpoint and JAX parts, on the CPU: the same program that runs on a card.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use mainstay_tests::{has_torch, mainstay, python, skipped};
use serde_json::Value;

/// Runs some parts with small sizes and returns the report.
fn accept(python: &Path, parts: &str) -> Value {
    let report = testing::tempdir().expect("a folder for the report");
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/acceptance/accept.py");
    let done = Command::new(python)
        .arg(program)
        .args(["--device", "cpu", "--small", "--limit", "1800", "--parts", parts, "--mainstay"])
        .arg(mainstay())
        .arg("--out")
        .arg(report.path())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("the acceptance program runs");
    let text = fs::read_to_string(report.path().join("report.json")).expect("a report");
    let read: Value = serde_json::from_str(&text).expect("a report in JSON");
    assert_eq!(done.status.code(), Some(0), "{read:#}\n{}", String::from_utf8_lossy(&done.stderr));
    read
}

/// Whether a rank is forked depends on whether the template was ready, which nothing here waits for.
const MAY_NOT_RUN: &str = "warm fork before any context";

/// How many checks of the part there are; each of the report's checks passed.
fn passed(report: &Value, part: &str) -> usize {
    let checks = report["checks"].as_array().expect("checks");
    let good = |check: &&Value| {
        check["verdict"] == "pass" || (check["verdict"] == "not_run" && check["name"] == MAY_NOT_RUN)
    };
    assert!(checks.iter().all(|check| good(&check)), "{report:#}");
    checks.iter().filter(|check| check["part"] == part).count()
}

#[test]
fn killed_and_failing_ranks_step_again_and_ranks_that_can_stay_do() {
    if !has_torch() {
        return skipped("the ranks' Python has no torch");
    }
    let report = accept(&python(), "training");
    assert_eq!(passed(&report, "training"), 4, "{report:#}");
}

#[test]
fn a_lost_context_takes_one_rank_a_hang_is_found_and_used_up_memory_is_named() {
    if !has_torch() {
        return skipped("the ranks' Python has no torch");
    }
    let report = accept(&python(), "faults");
    assert_eq!(passed(&report, "faults"), 4, "{report:#}");
}

#[test]
fn a_checkpoint_is_loaded_unchanged_and_its_digest_is_that_of_the_host() {
    if !has_torch() {
        return skipped("the ranks' Python has no torch");
    }
    let report = accept(&python(), "checkpoint");
    assert_eq!(passed(&report, "checkpoint"), 5, "{report:#}");
}

#[test]
fn a_killed_jax_process_steps_again() {
    let Some(python) = std::env::var_os("MAINSTAY_TEST_FRAMEWORKS").map(PathBuf::from) else {
        return skipped("MAINSTAY_TEST_FRAMEWORKS names no Python with JAX; `cargo xtask test` provides it");
    };
    let report = accept(&python, "jax");
    assert_eq!(passed(&report, "jax"), 2, "{report:#}");
}

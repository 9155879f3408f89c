//! A part of the live fault matrix (`cargo xtask bench verdicts`): real training programs that know nothing of the
//! test, faults of known cause, and the launcher's verdicts and decisions.
//!
//! The programs and the means to let faults happen are those of `tests/healthy`.

#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

use std::path::{Path, PathBuf};

use mainstay_model::entry::{Body, Entry};
use mainstay_model::verdict::{Action, FaultDomain, Verdict};
use mainstay_tests::{Job, Stage, has_client, has_torch, journal};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// A program that starts at once, and real ones with PyTorch.
const LIGHT: (&str, u32) = ("numpy_json", 2);
const WORDS: (&str, u32) = ("word_lm", 1);
const MNIST: (&str, u32) = ("mnist_ddp", 2);

/// A fault in a program after so many steps, with a warning just before or without.
struct Cell {
    fault: &'static str,
    program: (&'static str, u32),
    after: u32,
    warning: bool,
}

fn cell(fault: &'static str, program: (&'static str, u32), after: u32) -> Cell {
    Cell { fault, program, after, warning: false }
}

/// The truth about a fault: `faults.json`.
fn truth(fault: &str) -> Value {
    let text = std::fs::read_to_string(healthy().join("faults/faults.json")).expect("the table of faults");
    let table: Value = serde_json::from_str(&text).expect("JSON");
    let faults = table["faults"].as_array().expect("a list of faults");
    faults.iter().find(|of| of["name"] == fault).expect("a fault of the table").clone()
}

fn healthy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("healthy")
}

/// Starts the job; a fault from outside is sent here, as soon as the rank has reached the right step.
fn started(stage: &Stage, cell: &Cell, truth: &Value) -> Job {
    let (program, ranks) = cell.program;
    let script = healthy().join("programs").join(format!("{program}.py"));
    let mut plan = stage
        .command(&[script.to_str().expect("a path in UTF-8")])
        .ranks(ranks)
        .options("--max-restarts 3")
        .variable("PYTHONPATH", healthy().join("faults"))
        .variable("OUT", stage.work())
        .variable("STEPS", (cell.after + 40).to_string())
        .variable("FAULT", cell.fault)
        .variable("FAULT_RANK", (ranks - 1).to_string())
        .variable("FAULT_AFTER", cell.after.to_string())
        .variable("FAULT_MARKS", stage.marks())
        .variable("FAULT_CLIENT", "1");
    if cell.warning {
        plan = plan.variable("FAULT_WARNING", "1");
    }
    let job = plan.start();
    if let Some(signal) = truth["signal"].as_i64() {
        let signal = i32::try_from(signal).ok().and_then(|signal| Signal::try_from(signal).ok());
        kill(Pid::from_raw(job.marked_pid("ready")), signal.expect("a signal")).expect("the rank lives");
    }
    job
}

/// The first verdict and the first decision that is more than waiting.
fn judged(job: &Job) -> (Verdict, Action) {
    let action = job.wait_for("a decision", |entry: &Entry| match &entry.body {
        Body::Decision(decision) if decision.action != Action::Wait => Some(decision.action),
        _ => None,
    });
    let journal = job.journal();
    let verdict = journal::verdicts(&journal).first().copied().cloned().expect("a verdict before a decision");
    (verdict, action)
}

/// What is wrong with a cell; none if verdict and decision are right.
fn wrong(cell: &Cell) -> Option<String> {
    let (stage, truth) = (Stage::new(), truth(cell.fault));
    let job = started(&stage, cell, &truth);
    let (verdict, action) = judged(&job);
    let holds =
        |key: &str, name: &str| truth[key].as_array().is_some_and(|names| names.iter().any(|of| of == name));
    let decision = match action {
        Action::Stop { .. } => "stop",
        Action::HandBack { .. } | Action::ReplaceHost { .. } => "hand_back",
        _ => "restart",
    };
    let named = verdict.domain != FaultDomain::Unknown;
    let shows = truth["shows"] == true;
    let domain_right = if named { holds("domains", verdict.domain.name()) } else { !shows };
    let rank_right = verdict.culprit.is_some_and(|rank| rank.0 + 1 == cell.program.1);
    (!domain_right || !rank_right || !holds("decisions", decision)).then(|| {
        let (fault, program, after) = (cell.fault, cell.program.0, cell.after);
        format!("{fault} in {program} after {after} steps: {decision}, {verdict:#?}")
    })
}

fn assert_right(cells: &[Cell]) {
    let wrong: Vec<String> = cells.iter().filter_map(wrong).collect();
    assert!(wrong.is_empty(), "{} of {} are judged wrong:\n{}", wrong.len(), cells.len(), wrong.join("\n"));
}

#[test]
fn a_signal_from_outside_has_no_domain_and_stops_no_job() {
    if !has_client() {
        return;
    }
    let after = Cell { warning: true, ..cell("sigkill", LIGHT, 5) };
    assert_right(&[after, cell("sigterm", LIGHT, 5), cell("sigsegv", LIGHT, 0), cell("sigabrt", LIGHT, 20)]);
}

#[test]
fn an_exception_is_diagnosed_by_its_own_text() {
    if !has_client() {
        return;
    }
    let warned = Cell { warning: true, ..cell("missing_file", LIGHT, 5) };
    assert_right(&[
        cell("key_error", LIGHT, 5),
        warned,
        cell("cuda_ecc", LIGHT, 5),
        cell("proxy_503", LIGHT, 0),
    ]);
}

#[test]
fn an_end_that_a_program_chose_is_no_fault_of_machines() {
    if !has_client() {
        return;
    }
    assert_right(&[cell("exit_3", LIGHT, 5), cell("os_exit_1", LIGHT, 0)]);
}

#[test]
fn programs_with_pytorch_are_judged_alike() {
    if !has_torch() {
        return;
    }
    assert_right(&[cell("sigkill", MNIST, 5), cell("shape_error", WORDS, 5)]);
}

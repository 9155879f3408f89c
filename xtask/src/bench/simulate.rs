//! Jobs of 100,000 ranks, simulated: the cost of their leader, how soon all hosts restart, how often a living host
//! is considered lost, and the share of time in training.

use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::figure::{Figure, Report};
use crate::command;
use crate::paths;
use crate::progress::Progress;

/// The parts of the simulation, with the prefixes of their figures.
const PARTS: [(&str, &[&str]); 3] = [
    ("ettr", &["simulate.ettr"]),
    ("lost", &["simulate.false_lost", "simulate.suspected"]),
    ("leader", &["simulate.leader", "simulate.store", "simulate.round", "simulate.start", "simulate.record"]),
];

/// The peer that the time in training is compared with.
const PEER: &str = "scheduler restarts";

/// A figure as the simulation prints it.
#[derive(Deserialize)]
struct Line {
    id: String,
    value: f64,
    unit: String,
    n: usize,
    min: f64,
    max: f64,
    peer_value: Option<f64>,
}

/// Measures the parts with requested figures.
pub fn measure(progress: &Progress, quick: bool, report: &mut Report) {
    for (part, families) in PARTS {
        if families.iter().any(|family| report.wants_some_of(family)) {
            let measured = progress.step(&format!("simulate: {part}"), || simulate(part, quick));
            report.part(&format!("simulate ({part})"), measured);
        }
    }
}

fn simulate(part: &str, quick: bool) -> Result<Vec<Figure>> {
    let mut cargo = command::cargo();
    cargo
        .args([
            "run",
            "--release",
            "--locked",
            "--quiet",
            "-p",
            "mainstay-sim",
            "--example",
            "simulate",
            "--",
        ])
        .arg(part)
        .args(quick.then_some("quick"))
        .stderr(Stdio::inherit())
        .current_dir(paths::root());
    let output = cargo.output().context("starting the simulation")?;
    if !output.status.success() {
        bail!("the simulation ended with {}", output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .map(|line| {
            let Line { id, value, unit, n, min, max, peer_value } =
                serde_json::from_str(line).with_context(|| format!("a figure of the simulation: {line}"))?;
            let peer = peer_value.map(|_| PEER.to_owned());
            let ratio = peer_value.filter(|peer| *peer > 0.0).map(|peer| value / peer);
            Ok(Figure { id, value, unit, n, min, max, peer, peer_value, ratio })
        })
        .collect()
}

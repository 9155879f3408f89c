//! The judges on simulated jobs of up to 131,072 ranks: the time of a tick, and the numbers of right and false
//! verdicts.

use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::figure::{Figure, Report};
use crate::command;
use crate::paths;
use crate::progress::Progress;

/// A figure as the simulation prints it.
#[derive(Deserialize)]
struct Line {
    id: String,
    value: f64,
    unit: String,
    n: usize,
    min: f64,
    max: f64,
}

/// Runs the simulation with so many trials.
pub fn measure(progress: &Progress, trials: usize, report: &mut Report) {
    let measured = progress.step(&format!("judge: simulated jobs, {trials} trials"), || simulate(trials));
    report.part("judge.tick_131072", measured);
}

fn simulate(trials: usize) -> Result<Vec<Figure>> {
    let mut cargo = command::cargo();
    cargo
        .args(["run", "--release", "--locked", "--quiet", "-p", "mainstay-sim", "--example", "judge", "--"])
        .arg(trials.to_string())
        .stderr(Stdio::inherit())
        .current_dir(paths::root());
    let output = cargo.output().context("starting the simulation")?;
    if !output.status.success() {
        bail!("the simulation ended with {}", output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .map(|line| {
            let Line { id, value, unit, n, min, max } =
                serde_json::from_str(line).with_context(|| format!("a figure of the simulation: {line}"))?;
            Ok(Figure { id, value, unit, n, min, max, peer: None, peer_value: None, ratio: None })
        })
        .collect()
}

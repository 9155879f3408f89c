//! A soak of restarts: jobs of real processes with random, nested faults, and what went wrong. The jobs are those
//! of the scenario `tests/tests/it/soak.rs`, with the program and the Python of the benchmarks.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::figure::{Figure, Report};
use super::launchers::Bed;
use crate::command;
use crate::paths;
use crate::progress::Progress;

/// The counts of the scenario.
#[derive(Deserialize)]
struct Counts {
    faults: u64,
    jobs: u64,
    wrong_ends: u64,
    overlaps: u64,
    leaks: u64,
}

/// Injects this many faults.
pub fn measure(progress: &Progress, bed: &Bed, faults: usize, report: &mut Report) {
    let measured = progress.step(&format!("soak: {faults} faults in real jobs"), || soak(bed, faults));
    report.part("restart.soak_wrong_ends", measured);
}

fn soak(bed: &Bed, faults: usize) -> Result<Vec<Figure>> {
    let path = paths::target().join("bench/soak.json");
    fs::create_dir_all(paths::target().join("bench")).context("creating target/bench")?;
    if path.exists() {
        fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
    }
    let mut cargo = command::cargo();
    cargo
        .args(["test", "--quiet", "-p", "mainstay-tests", "--test", "soak", "--", "--nocapture"])
        .env("MAINSTAY_BIN", paths::given_mainstay().unwrap_or_else(|| paths::mainstay("release")))
        .env("MAINSTAY_TEST_PYTHON", bed.venv.python())
        .env("MAINSTAY_SOAK_FAULTS", faults.to_string())
        .env("MAINSTAY_SOAK_REPORT", &path)
        .current_dir(paths::root());
    command::run(&mut cargo)?;
    let text = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    let counts: Counts = serde_json::from_slice(&text).context("the counts of the soak")?;
    ensure!(counts.faults > 0, "no fault was injected");
    let figure = |id: &str, value: u64, n: u64| Figure {
        id: id.to_owned(),
        value: value as f64,
        unit: "of them".to_owned(),
        n: usize::try_from(n).unwrap_or(usize::MAX),
        min: value as f64,
        max: value as f64,
        peer: None,
        peer_value: None,
        ratio: None,
    };
    Ok(vec![
        figure("restart.soak_faults", counts.faults, counts.faults),
        figure("restart.soak_wrong_ends", counts.wrong_ends, counts.jobs),
        figure("restart.soak_overlaps", counts.overlaps, counts.faults),
        figure("restart.soak_leaks", counts.leaks, counts.faults),
    ])
}

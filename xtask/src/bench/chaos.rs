//! Chaos: what must never happen to a job of three hosts under faults of all kinds. The faults are those of the scenario
//! `tests/tests/it/several_hosts/chaos.rs`, with the program and the Python of the benchmarks.

use serde::Deserialize;

use super::prelude::*;

/// Minutes of faults, and with `--quick`.
const MINUTES: (usize, usize) = (30, 1);

#[derive(Deserialize)]
struct Counts {
    faults: usize,
    lost_steps: usize,
    disturbed_ranks: usize,
    leaks: usize,
}

pub fn measure(bench: &mut Bench, bed: &Bed) {
    let minutes = bench.samples(MINUTES.0, MINUTES.1);
    bench
        .part(&["chaos."], &format!("chaos: {minutes} min of faults on three hosts"), || chaos(bed, minutes));
}

fn chaos(bed: &Bed, minutes: usize) -> Result<Vec<Figure>> {
    let path = paths::fresh(paths::target().join("bench/chaos"))?.join("counts.json");
    let mut cargo =
        command::cargo("test --quiet -p mainstay-tests --test it several_hosts::chaos -- --nocapture");
    cargo.env("MAINSTAY_BIN", paths::release_mainstay()).env("MAINSTAY_TEST_PYTHON", bed.venv.python());
    cargo.env("MAINSTAY_CHAOS_SECONDS", (minutes * 60).to_string()).env("MAINSTAY_CHAOS_REPORT", &path);
    command::run(&mut cargo)?;
    let counts = fs::read(&path).context("the counts: root and etcd are needed")?;
    let counts: Counts = serde_json::from_slice(&counts).context("the counts")?;
    ensure!(counts.faults > 0, "no fault was injected");
    let figure = |id: &str, count: usize| Figure::one(id, "of them", count as f64, counts.faults);
    Ok(vec![
        figure("chaos.lost_steps", counts.lost_steps),
        figure("chaos.disturbed_ranks", counts.disturbed_ranks),
        figure("chaos.leaks", counts.leaks),
    ])
}

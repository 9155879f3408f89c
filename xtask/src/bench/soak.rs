//! A soak of restarts: jobs of real processes with random, nested faults, and what went wrong. The jobs are
//! those of the scenario `tests/tests/it/soak.rs`, with the program and the Python of the benchmarks.

use serde::Deserialize;

use super::prelude::*;

#[derive(Deserialize)]
struct Counts {
    faults: usize,
    jobs: usize,
    wrong_ends: usize,
    overlaps: usize,
    leaks: usize,
}

pub fn measure(bench: &mut Bench, bed: &Bed) {
    let faults = bench.samples(1000, 10);
    bench.part(&["restart.soak_"], &format!("soak: {faults} faults in real jobs"), || soak(bed, faults));
}

fn soak(bed: &Bed, faults: usize) -> Result<Vec<Figure>> {
    let path = paths::fresh(paths::target().join("bench/soak"))?.join("counts.json");
    let mut cargo = command::cargo("test --quiet -p mainstay-tests --test it soak:: -- --nocapture");
    cargo.env("MAINSTAY_BIN", paths::release_mainstay()).env("MAINSTAY_TEST_PYTHON", bed.venv.python());
    cargo.env("MAINSTAY_SOAK_FAULTS", faults.to_string()).env("MAINSTAY_SOAK_REPORT", &path);
    command::run(&mut cargo)?;
    let counts: Counts = serde_json::from_slice(&fs::read(&path)?).context("the counts of the soak")?;
    ensure!(counts.faults > 0, "no fault was injected");
    let figure = |id: &str, count: usize, n: usize| Figure::one(id, "of them", count as f64, n);
    Ok(vec![
        figure("restart.soak_faults", counts.faults, counts.faults),
        figure("restart.soak_wrong_ends", counts.wrong_ends, counts.jobs),
        figure("restart.soak_overlaps", counts.overlaps, counts.faults),
        figure("restart.soak_leaks", counts.leaks, counts.faults),
    ])
}

//! How long a cold release build takes, and how large the program is.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};

use super::figure::{Figure, Report};
use crate::command;
use crate::paths;
use crate::progress::Progress;

/// Measures one build from nothing.
pub fn measure(progress: &Progress, report: &mut Report) {
    let measured = progress.step("build.cold_release (into a folder of its own; some minutes)", cold_build);
    report.part("build.cold_release", measured);
}

fn cold_build() -> Result<Vec<Figure>> {
    let target = paths::target().join("bench/cold");
    if target.exists() {
        fs::remove_dir_all(&target).with_context(|| format!("emptying {}", target.display()))?;
    }
    // Downloading is not building.
    command::run(command::cargo().args(["fetch", "--locked", "--quiet"]).current_dir(paths::root()))?;
    let began = Instant::now();
    let mut cargo = command::cargo();
    cargo.args(["build", "--release", "--locked", "--quiet", "--target-dir"]).arg(&target);
    command::run(cargo.current_dir(paths::root()))?;
    let seconds = began.elapsed().as_secs_f64();
    let program = target.join("release/mainstay");
    let size = fs::metadata(&program).with_context(|| format!("looking at {}", program.display()))?.len();
    fs::remove_dir_all(&target).with_context(|| format!("removing {}", target.display()))?;
    let figures = [
        Figure::median("build.cold_release", "s", &[seconds]),
        Figure::median("build.binary", "MiB", &[size as f64 / 1024.0 / 1024.0]),
    ];
    Ok(figures.into_iter().flatten().collect())
}

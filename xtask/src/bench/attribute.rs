//! Attribution: how fast logs are read, how soon 8 ranks with 100 MB have a verdict, and how accurate it is on
//! labelled cases without their source. Compared with NVRx's deterministic stage (its L0) over the same text.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::figure::{Figure, Report};
use crate::command;
use crate::paths;
use crate::progress::Progress;
use crate::{nvrx, venv};

/// The name of NVRx in these figures: the release that has the stage.
const NVRX: &str = "NVRx 0.7.0 L0";

/// NVRx reads this many of the 8 logs, because it takes seconds for each MB that we read in milliseconds.
const PEER_LOGS: usize = 1;

/// NVRx's stage over some files: prints MB/s of each, one a line.
const L0: &str = "
import sys, time, os
from nvidia_resiliency_ext.attribution.restart_agent.l0.assembly import build_l0_bundle
for path in sys.argv[1:]:
    begun = time.perf_counter()
    build_l0_bundle(path)
    print(os.path.getsize(path) / 1e6 / (time.perf_counter() - begun))
";

/// A figure as the example prints it.
#[derive(Deserialize)]
struct Line {
    id: String,
    value: f64,
    unit: String,
    n: usize,
    min: f64,
    max: f64,
}

/// Runs the example of the core, and NVRx if it is available.
pub fn measure(progress: &Progress, peers: bool, report: &mut Report) {
    let measured = progress.step("attribute: 100 MB of logs of 8 ranks, and labelled cases", ours);
    let speed = measured.as_ref().ok();
    let speed = speed.and_then(|figures| figures.iter().find(|of| of.id == "attribute.mb_per_s")).cloned();
    report.part("attribute.mb_per_s", measured);
    let Some(speed) = speed.filter(|_| peers && report.wants(&["attribute.mb_per_s"])) else { return };
    match theirs(progress) {
        Ok(samples) => report.add([speed.beside(NVRX, &samples)]),
        Err(error) => eprintln!("{NVRX}: left out: {error:#}"),
    }
}

fn ours() -> Result<Vec<Figure>> {
    let mut cargo = example();
    if let Some(cases) = labelled_cases() {
        cargo.arg(cases);
    } else {
        eprintln!(
            "attribute.dev_domain_cv: left out: no labelled cases (MAINSTAY_LABELLED_CASES names a file)"
        );
    }
    let output = cargo.stderr(Stdio::inherit()).output().context("starting the example")?;
    if !output.status.success() {
        bail!("the example ended with {}", output.status);
    }
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| {
            let Line { id, value, unit, n, min, max } =
                serde_json::from_str(line).with_context(|| format!("a figure of the example: {line}"))?;
            Ok(Figure { id, value, unit, n, min, max, peer: None, peer_value: None, ratio: None })
        })
        .collect()
}

fn example() -> Command {
    let mut cargo = command::cargo();
    cargo
        .args([
            "run",
            "--release",
            "--locked",
            "--quiet",
            "-p",
            "mainstay-diagnosis",
            "--example",
            "attribute_figures",
            "--",
        ])
        .current_dir(paths::root());
    cargo
}

/// The labelled cases next to the project, or those that the environment names.
fn labelled_cases() -> Option<PathBuf> {
    let file = std::env::var_os("MAINSTAY_LABELLED_CASES")
        .map_or_else(|| paths::root().join("../shared/attribution/dev.jsonl"), PathBuf::from);
    file.is_file().then_some(file)
}

/// NVRx over the same text, in MB/s of each file.
fn theirs(progress: &Progress) -> Result<Vec<f64>> {
    let venv = venv::ensure(progress)?;
    let python = nvrx::ensure(progress, &venv)?;
    let dir = paths::cache()?.join("bench-logs");
    std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    let spoken = read_by_nvrx(progress, &python, &dir);
    // The 100 MB are removed.
    std::fs::remove_dir_all(&dir).with_context(|| format!("removing {}", dir.display()))?;
    let spoken = spoken?;
    spoken.lines().map(|line| line.trim().parse().context("a figure of NVRx")).collect()
}

fn read_by_nvrx(progress: &Progress, python: &Path, dir: &Path) -> Result<String> {
    command::output(example().arg("--write-logs").arg(dir))?;
    let logs = (0..PEER_LOGS).map(|rank| dir.join(format!("rank{}.log", rank + 3)));
    progress.step(&format!("attribute: {NVRX} over the same text"), || {
        command::output(Command::new(python).args(["-c", L0]).args(logs))
    })
}

//! From the SIGKILL of a rank to the fact in the launcher's journal: both times are of the same clock.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::figure::{Figure, Report};
use super::launchers::Bed;
use super::process::Running;
use crate::journal::{self, Follower};
use crate::paths;
use crate::progress::Progress;
use crate::venv::activate;

/// Ranks of the job; they only sleep, because this measures the launcher and not Python's start.
const RANKS: u64 = 4;

const LIMIT: Duration = Duration::from_secs(30);

/// Measures so many deaths.
pub fn measure(progress: &Progress, bed: &Bed, deaths: usize, report: &mut Report) {
    if !report.wants(&["detect.death", "detect.death_p99"]) {
        return;
    }
    let measured = progress.step(&format!("detect.death: {deaths} kills"), || detect(bed, deaths));
    let figures = measured.map(|samples| {
        let p99 = Figure::p99("detect.death_p99", "ms", &samples);
        p99.into_iter().chain(Figure::median("detect.death", "ms", &samples)).collect()
    });
    report.part("detect.death_p99", figures);
}

fn detect(bed: &Bed, deaths: usize) -> Result<Vec<f64>> {
    let folder = paths::target().join("bench/detect");
    let mut samples = Vec::new();
    let mut jobs = 0;
    while samples.len() < deaths {
        let before = samples.len();
        one_job(bed, &folder.join(format!("job_{jobs}")), deaths, &mut samples)?;
        jobs += 1;
        if samples.len() == before {
            bail!("a job ended without a single death being noticed");
        }
    }
    if jobs > 1 {
        eprintln!(
            "detect: the launcher gave up restarting {} times; went on with a new job each time",
            jobs - 1
        );
    }
    Ok(samples)
}

/// Kills ranks of one job until there are enough samples, or the launcher decides to restart no more.
fn one_job(bed: &Bed, folder: &std::path::Path, deaths: usize, samples: &mut Vec<f64>) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let mut command = Command::new(paths::release_mainstay());
    command.args(["run", "--nproc-per-node", &RANKS.to_string(), "--max-restarts", "100000", "--log-dir"]);
    command.arg(folder).args(["--no-python", "sleep", "1000000"]);
    activate(&mut command, &bed.venv);
    let mut running = Running::start(command, &folder.join("launcher.log"))?;
    let mut journal = Follower::new(folder);
    let mut read = 0;

    while samples.len() < deaths {
        let started = running.wait_for("ranks in the journal", LIMIT, || {
            journal.poll().ok()?;
            let found = journal.entries[read..].iter().rev().find_map(journal::Entry::attempt_started);
            read = journal.entries.len();
            found
        });
        let Ok(attempt) = started else { return Ok(()) };
        let victim = samples.len() as u64 % RANKS;
        let pid = *attempt.pids.get(&victim).with_context(|| format!("no process of rank {victim}"))?;
        let at = journal::now();
        kill(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("killing {pid}"))?;
        let from = read;
        let noticed = running.wait_for("fact in the journal", LIMIT, || {
            journal.poll().ok()?;
            journal.entries[from..]
                .iter()
                .find(|entry| entry.rank_died() == Some(pid))
                .map(|entry| entry.mono)
        })?;
        samples.push(noticed.saturating_sub(at) as f64 / 1e6);
    }
    Ok(())
}

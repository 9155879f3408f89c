//! From the SIGKILL of a rank with much memory until the launcher knows of it, and until its process ends, which
//! all other ranks wait for.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::figure::{Figure, Report};
use super::launchers::{Bed, script_path};
use super::process::Running;
use crate::journal::{self, Follower};
use crate::paths;
use crate::progress::Progress;
use crate::venv::activate;

/// Memory of the rank that is killed, in GiB, in pages of 4 KiB. Ranks with a GPU hold far more, and pinned.
const GIB: &str = "4";

const LIMIT: Duration = Duration::from_secs(60);

/// Measures so many deaths.
pub fn measure(progress: &Progress, bed: &Bed, deaths: usize, report: &mut Report) {
    if !report.wants(&["detect.death_4g", "detect.death_4g_gone"]) {
        return;
    }
    let measured = progress.step(&format!("detect.death_4g: {deaths} kills"), || detect(bed, deaths));
    let figures = measured.map(|(known, gone)| {
        let figures = [
            Figure::median("detect.death_4g", "ms", &known),
            Figure::median("detect.death_4g_gone", "ms", &gone),
        ];
        figures.into_iter().flatten().collect()
    });
    report.part("detect.death_4g", figures);
}

/// Milliseconds to the first report of the death, and to the end of the process.
fn detect(bed: &Bed, deaths: usize) -> Result<(Vec<f64>, Vec<f64>)> {
    let folder = paths::target().join("bench/large");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let ready = folder.join("ready");
    let mut command = Command::new(paths::release_mainstay());
    command.args(["run", "--nproc-per-node", "1", "--max-restarts", "100000", "--log-dir"]);
    command.arg(&folder).arg(script_path("large_rank.py"));
    command.env("BENCH_READY", &ready).env("BENCH_GIB", GIB);
    activate(&mut command, &bed.venv);
    let mut running = Running::start(command, &folder.join("launcher.log"))?;
    let mut journal = Follower::new(&folder);
    let (mut known, mut gone) = (Vec::new(), Vec::new());
    for _ in 0..deaths {
        let pid: i32 = running.wait_for("a rank that holds its memory", LIMIT, || {
            let text = fs::read_to_string(&ready).ok()?;
            text.strip_suffix('\n')?.parse().ok()
        })?;
        fs::remove_file(&ready).with_context(|| format!("removing {}", ready.display()))?;
        let from = journal.entries.len();
        let at = journal::now();
        kill(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("killing {pid}"))?;
        let since = |mono: u64| mono.saturating_sub(at) as f64 / 1e6;
        let (first, last) = running.wait_for("its end in the journal", LIMIT, || {
            journal.poll().ok()?;
            let of_it = || journal.entries[from..].iter().filter(|entry| entry.mono >= at);
            let first = of_it().find(|entry| entry.rank_died() == Some(pid))?.mono;
            // The journal records the lifeline's mark as the end of the rank, so the end of the attempt is used: it
            // follows when the process is gone.
            let last = of_it().find(|entry| entry.attempt_ended())?.mono;
            Some((since(first), since(last)))
        })?;
        known.push(first);
        gone.push(last);
    }
    Ok((known, gone))
}

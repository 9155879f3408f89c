//! From a fault to the first Python line of the new ranks, and to their first step: `mainstay run` compared with
//! the peers, with the same script on the same machine.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use super::events::{Events, Fault, Restart, strike};
use super::figure::{Figure, Report};
use super::launchers::{Bed, Launcher};
use super::process::{self, Running};
use crate::paths;
use crate::progress::Progress;

/// Ranks of the job.
const WORLD: usize = 2;

/// Steps between two faults, so that a launcher is idle again.
const SETTLE_STEPS: usize = 30;

/// Steps before the first fault, 15 s: the same for all, and time enough for `mainstay run` to have its template.
const FIRST_SETTLE_STEPS: usize = 300;

/// A rank that dies early dies this long after its first line: it imports, and nothing is warm yet.
const EARLY: Duration = Duration::from_secs(3);

/// A launcher that needs longer than this for a restart has hung.
const LIMIT: Duration = Duration::from_secs(120);

/// When a job meets its first fault.
#[derive(Clone, Copy, PartialEq)]
enum First {
    /// After the steps of [`FIRST_SETTLE_STEPS`].
    Settled,
    /// [`EARLY`].
    Early,
}

/// Measures each fault under each launcher.
pub fn measure(progress: &Progress, bed: &Bed, faults: usize, report: &mut Report) {
    for (fault, name) in [(Fault::Kill, "kill"), (Fault::Raise, "raise")] {
        let mut by_launcher = Vec::new();
        let ids = [format!("restart.{name}_to_python"), format!("restart.{name}_to_step")];
        for launcher in bed.launchers() {
            if !report.wants(&[&ids[0], &ids[1]]) {
                continue;
            }
            let what = format!("restart after {name}: {} ({faults} faults)", launcher.name());
            match progress.step(&what, || restarts(bed, launcher, fault, faults)) {
                Ok(restarts) => by_launcher.push((launcher, restarts)),
                Err(error) => eprintln!("{what}: left out: {error:#}"),
            }
            // Again after each launcher: ours alone first, then compared with the peers measured so far.
            report.add(compare(&ids[0], &by_launcher, |restart| restart.to_python));
            report.add(compare(&ids[1], &by_launcher, |restart| restart.to_step));
        }
    }
}

/// Measures the first SIGKILL of separate jobs: it includes what a launcher does once, such as reading its
/// catalog.
pub fn measure_first(progress: &Progress, bed: &Bed, jobs: usize, report: &mut Report) {
    for (first, name) in [(First::Settled, "first"), (First::Early, "early")] {
        let mut by_launcher = Vec::new();
        for launcher in bed.launchers() {
            let what = format!("restart after a {name} kill: {} ({jobs} jobs)", launcher.name());
            let measured =
                progress.step(&what, || (0..jobs).map(|_| first_restart(bed, launcher, first)).collect());
            match measured {
                Ok(restarts) => by_launcher.push((launcher, restarts)),
                Err(error) => eprintln!("{what}: left out: {error:#}"),
            }
        }
        report.add(compare(&format!("restart.{name}_kill_to_step"), &by_launcher, |r: &Restart| r.to_step));
        let ours = by_launcher.iter().find(|(launcher, _)| *launcher == Launcher::Mainstay);
        if let (First::Settled, Some((_, restarts))) = (first, ours) {
            let resident: Vec<f64> = restarts.iter().filter_map(|restart| restart.resident_mib).collect();
            report.add(Figure::median("attribute.rss_after", "MiB", &resident));
        }
    }
}

/// Our figure alone if there is no peer, else compared with each.
fn compare(id: &str, runs: &[(Launcher, Vec<Restart>)], field: impl Fn(&Restart) -> f64) -> Vec<Figure> {
    let samples = |restarts: &[Restart]| restarts.iter().map(&field).collect::<Vec<f64>>();
    let Some((_, ours)) = runs.iter().find(|(launcher, _)| *launcher == Launcher::Mainstay) else {
        return Vec::new();
    };
    let Some(figure) = Figure::median(id, "ms", &samples(ours)) else { return Vec::new() };
    let peers = runs.iter().filter(|(launcher, _)| *launcher != Launcher::Mainstay);
    let beside: Vec<Figure> =
        peers.map(|(peer, theirs)| figure.beside(peer.name(), &samples(theirs))).collect();
    if beside.is_empty() { vec![figure] } else { beside }
}

/// A job and the record of its ranks.
fn job(bed: &Bed, launcher: Launcher) -> Result<(Running, Events)> {
    let folder = paths::target().join("bench/restart");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    let logs = folder.join("logs");
    fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
    let events = Events::of(folder.join("events.jsonl"), WORLD);
    let mut command = bed.job(launcher, WORLD, &logs, "restart_rank.py")?;
    command.env("BENCH_EVENTS", &events.path);
    let running = Running::start(command, &folder.join("launcher.log"))?;
    Ok((running, events))
}

/// The first fault of a job, a SIGKILL of its last rank.
fn first_restart(bed: &Bed, launcher: Launcher, first: First) -> Result<Restart> {
    let (mut running, mut events) = job(bed, launcher)?;
    let pids = match first {
        First::Settled => running.wait_for("steps of all ranks", LIMIT, || {
            events.stepping(0, &BTreeSet::new(), FIRST_SETTLE_STEPS)
        })?,
        First::Early => {
            let pids = running.wait_for("the first lines of all ranks", LIMIT, || events.started())?;
            std::thread::sleep(EARLY);
            pids
        }
    };
    events.poll();
    let seen = events.all.len();
    let victim = WORLD as u64 - 1;
    let asked_at = strike(Fault::Kill, &events.path, victim, pids.get(&victim).copied())?;
    let old = pids.into_values().collect();
    running.wait_for("first steps after the fault", LIMIT, || events.stepping(seen, &old, 1))?;
    let restart = events.restart_since(seen, &old, Fault::Kill, asked_at)?;
    Ok(Restart { resident_mib: process::memory_mib(running.pid(), "Rss"), ..restart })
}

/// One job, several faults, alternating between the ranks.
fn restarts(bed: &Bed, launcher: Launcher, fault: Fault, faults: usize) -> Result<Vec<Restart>> {
    let (mut running, mut events) = job(bed, launcher)?;
    let mut old = BTreeSet::new();
    let mut measured = Vec::new();
    for n in 0..=faults {
        let begin = measured.len().min(1) * events.all.len();
        let settle = if n == 0 { FIRST_SETTLE_STEPS } else { SETTLE_STEPS };
        let pids = running.wait_for("steps of all ranks", LIMIT, || events.stepping(begin, &old, settle))?;
        if n == faults {
            break;
        }
        let victim = (n % WORLD) as u64;
        let seen = events.all.len();
        let asked_at = strike(fault, &events.path, victim, pids.get(&victim).copied())?;
        old.extend(pids.values().copied());
        running.wait_for("first steps after the fault", LIMIT, || events.stepping(seen, &old, 1))?;
        measured.push(events.restart_since(seen, &old, fault, asked_at)?);
    }
    Ok(measured)
}

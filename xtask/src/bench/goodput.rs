//! Goodput of a run that loses a rank every 20 s: `mainstay run` and the peers, measured in sequence.
//!
//! Goodput is the useful work per time: the newest step times the length of a step, divided by the time since the
//! first step. Repeated steps count once.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;

use super::figure::{Figure, Report};
use super::launchers::{Bed, Launcher};
use super::process::Running;
use crate::journal;
use crate::paths;
use crate::progress::Progress;

/// Ranks of the job.
const WORLD: usize = 2;

/// How long each launcher's run is watched, from its first step.
const RUN: Duration = Duration::from_secs(180);

/// The same with `--quick`: two kills.
const QUICK_RUN: Duration = Duration::from_secs(60);

/// From one SIGKILL to the next.
const EVERY: Duration = Duration::from_secs(20);

/// A step of `restart_rank.py`.
const STEP: Duration = Duration::from_millis(50);

/// A launcher that needs longer than this for its first step has hung.
const LIMIT: Duration = Duration::from_secs(120);

/// Measures each launcher once.
pub fn measure(progress: &Progress, bed: &Bed, quick: bool, report: &mut Report) {
    let run = if quick { QUICK_RUN } else { RUN };
    let mut by_launcher = Vec::new();
    for launcher in bed.launchers() {
        if !report.wants(&[ID]) {
            continue;
        }
        let what = format!("goodput with a SIGKILL every {} s: {}", EVERY.as_secs(), launcher.name());
        match progress.step(&what, || goodput(bed, launcher, run)) {
            Ok(percent) => by_launcher.push((launcher, percent)),
            Err(error) => eprintln!("{what}: left out: {error:#}"),
        }
        report.add(compare(&by_launcher));
    }
}

/// Our figure alone if there is no peer yet, else compared with each.
fn compare(by_launcher: &[(Launcher, f64)]) -> Vec<Figure> {
    let of = |launcher| by_launcher.iter().find(|(of, _)| *of == launcher).map(|(_, percent)| *percent);
    let ours = of(Launcher::Mainstay).and_then(|ours| Figure::median(ID, "%", &[ours]));
    let Some(ours) = ours else { return Vec::new() };
    let peers = by_launcher.iter().filter(|(launcher, _)| *launcher != Launcher::Mainstay);
    let beside: Vec<Figure> = peers.map(|(peer, theirs)| ours.beside(peer.name(), &[*theirs])).collect();
    if beside.is_empty() { vec![ours] } else { beside }
}

const ID: &str = "restart.goodput_kill_20s";

#[derive(Deserialize)]
struct Event {
    at: u64,
    event: String,
    rank: u64,
    pid: i32,
    step: Option<u64>,
}

fn goodput(bed: &Bed, launcher: Launcher, length: Duration) -> Result<f64> {
    let folder = paths::target().join("bench/goodput");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    let logs = folder.join("logs");
    fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
    let path = folder.join("events.jsonl");
    let events = || -> Vec<Event> {
        let text = fs::read_to_string(&path).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    };
    let mut command = bed.job(launcher, WORLD, &logs, "restart_rank.py")?;
    command.env("BENCH_EVENTS", &path);
    let mut running = Running::start(command, &folder.join("launcher.log"))?;
    let began = running.wait_for("the first step", LIMIT, || {
        events().iter().find(|event| event.event == "step").map(|event| event.at)
    })?;

    let run = length.as_nanos() as u64;
    let mut next = Instant::now() + EVERY;
    let mut kills = 0_u64;
    while journal::now().saturating_sub(began) < run {
        let left = Duration::from_nanos(run - journal::now().saturating_sub(began).min(run));
        std::thread::sleep(left.min(next.saturating_duration_since(Instant::now())));
        if Instant::now() >= next {
            next += EVERY;
            let newest: BTreeMap<u64, i32> = events().iter().map(|event| (event.rank, event.pid)).collect();
            // A launcher in the middle of a restart has no process to lose, which costs it nothing here.
            if let Some(pid) = newest.get(&(kills % WORLD as u64))
                && kill(Pid::from_raw(*pid), Signal::SIGKILL).is_ok()
            {
                kills += 1;
            }
        }
    }
    let steps = events().iter().filter(|event| event.at <= began + run).filter_map(|event| event.step).max();
    ensure!(kills > 0, "no rank could be killed");
    Ok(100.0 * steps.unwrap_or(0) as f64 * STEP.as_secs_f64() / length.as_secs_f64())
}

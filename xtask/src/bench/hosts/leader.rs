//! From the SIGKILL of the leading launcher until all ranks step again. Three hosts run etcd between them, the
//! fourth is a spare: the launcher's etcd is lost with it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::network::Network;
use super::{folder, of_host};
use crate::bench::events::Events;
use crate::bench::figure::{Figure, Report};
use crate::bench::launchers::{Bed, script_path};
use crate::bench::process::Running;
use crate::journal::{self, Entry, Follower};
use crate::paths;
use crate::progress::Progress;
use crate::venv::activate;

const ID: &str = "hosts.leader_replaced";

/// All figures that are measured here.
pub const IDS: [&str; 2] = [ID, "hosts.leader_decides"];

/// Hosts with ranks, one on each. One more is a spare.
const HOSTS: usize = 3;

/// Steps of all ranks before the leader is killed.
const SETTLE_STEPS: usize = 50;

/// A job that needs longer than this has hung.
const LIMIT: Duration = Duration::from_secs(120);

/// Seconds since the SIGKILL.
struct Replaced {
    /// The first restart that the next leader decided.
    decided: f64,
    /// The first steps of all ranks.
    stepping: f64,
}

/// Measures this many jobs, each of which loses its leader once.
pub fn measure(progress: &Progress, bed: &Bed, jobs: usize, report: &mut Report) {
    let mut measured: Vec<Replaced> = Vec::new();
    for job in 1..=jobs {
        if !report.wants(&IDS) {
            return;
        }
        match progress.step(&format!("{ID}: job {job} of {jobs}"), || replaced(bed)) {
            Ok(one) => measured.push(one),
            Err(error) => return report.part(ID, Err(error)),
        }
        let figure = |id: &str, of: fn(&Replaced) -> f64| {
            Figure::median(id, "s", &measured.iter().map(of).collect::<Vec<f64>>())
        };
        let figures = [figure(ID, |of| of.stepping), figure("hosts.leader_decides", |of| of.decided)];
        report.add(figures.into_iter().flatten());
    }
}

fn replaced(bed: &Bed) -> Result<Replaced> {
    let runtime = std::env::temp_dir().join(format!("mainstay-bench-hosts-{}", std::process::id()));
    let measured = in_folder(bed, &folder("leader")?, &runtime);
    let _ = fs::remove_dir_all(&runtime);
    measured
}

fn in_folder(bed: &Bed, folder: &Path, runtime: &Path) -> Result<Replaced> {
    let network = Network::new(HOSTS + 1)?;
    let endpoints = network.endpoints(HOSTS, 2379)?;
    let mut events = Events::of(folder.join("events.jsonl"), HOSTS);
    let mut launchers = Vec::new();
    for host in 0..=HOSTS {
        let logs = of_host(folder, host)?;
        let mut command = Command::new(paths::release_mainstay());
        command.args(["run", "--no-agent", "--nnodes", &HOSTS.to_string(), "--rdzv-id", "bench"]);
        command.args(["--rdzv-endpoint", &endpoints, "--max-restarts", "3", "--log-dir"]).arg(&logs);
        command.arg("--runtime-dir").arg(runtime.join(host.to_string()));
        activate(&mut command, &bed.venv);
        command.arg(script_path("hosts_rank.py")).env("BENCH_EVENTS", &events.path);
        let mut launcher = Running::start(network.on(host, command), &logs.join("launcher.log"))?;
        if host < HOSTS {
            // Each takes the first endpoint that is its own and free.
            let log = launcher.log.clone();
            let runs = || says(&log, "etcd runs on this host").then_some(());
            launcher.wait_for("etcd on this host", LIMIT, runs)?;
        }
        launchers.push(launcher);
    }
    // The spare is the last launcher to join, which need not be the last one started.
    let logs: Vec<PathBuf> = launchers.iter().map(|of| of.log.clone()).collect();
    launchers[0]
        .wait_for("a spare", LIMIT, || logs.iter().find(|log| says(log, "waiting as a spare")).map(drop))?;
    launchers[0]
        .wait_for("steps of all ranks", LIMIT, || events.stepping(0, &BTreeSet::new(), SETTLE_STEPS))?;
    let leader =
        logs.iter().position(|log| says(log, "this host leads the job")).context("no launcher leads")?;
    let seen = events.all.len();
    let old: BTreeSet<i32> = events.all.iter().map(|event| event.pid).collect();
    let killed_at = journal::now();
    kill(Pid::from_raw(launchers[leader].pid()), Signal::SIGKILL).context("killing the leader")?;
    let other = if leader == 0 { 1 } else { 0 };
    launchers[other]
        .wait_for("steps of all ranks after the leader was lost", LIMIT, || events.stepping(seen, &old, 1))?;
    let since = |at: u64| at.saturating_sub(killed_at) as f64 / 1e9;
    let stepping = since(events.last_first_step(seen, &old).context("no steps")?);
    let next = logs.iter().position(|log| says(log, "this host leads now"));
    let next = next.context("no launcher said that it leads now")?;
    let mut journal = Follower::new(&folder.join(format!("host-{next}")));
    let decided = launchers[other].wait_for("the decision in the journal", LIMIT, || {
        journal.poll().ok()?;
        let later = journal.entries.iter().filter(|entry| entry.mono >= killed_at);
        later.filter(|entry| entry.decision().is_some()).map(|entry: &Entry| entry.mono).next()
    })?;
    Ok(Replaced { decided: since(decided), stepping })
}

/// Whether a launcher has printed this text.
fn says(log: &Path, what: &str) -> bool {
    fs::read_to_string(log).is_ok_and(|text| text.contains(what))
}

//! A host that loses power, and the spare that replaces it: from the loss to the verdict; from there until all
//! ranks have their imports and their checkpoints, which is the launchers' part; and to the first steps of all
//! ranks, which must connect to each other first. A peer writes no verdict, so its first restart action counts: the
//! end of a rank on a remaining host.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::network::Network;
use super::{LIMIT, end_of_one, folder, of_host};
use crate::bench::events::Events;
use crate::bench::figure::{Figure, Report};
use crate::bench::launchers::{Bed, Launcher, OneOf, script_path};
use crate::bench::process::{Running, family};
use crate::journal::{self, Entry, Follower};
use crate::paths;
use crate::progress::Progress;
use crate::venv::activate;

const IDS: [&str; 4] =
    ["hosts.lost_to_verdict", "hosts.swap_added", "hosts.swap_to_step", "hosts.lost_to_step"];

/// Hosts with one rank each. One more is a spare.
const HOSTS: usize = 4;

/// Steps of all ranks before a host is lost.
const SETTLE_STEPS: usize = 100;

/// A peer's launcher does not report that it waits: it has this long to join as a spare.
const SPARE_JOINS: Duration = Duration::from_secs(5);

/// Seconds.
#[derive(Clone, Copy)]
struct Lost {
    /// From the loss to the verdict, or to the first restart action.
    to_verdict: f64,
    /// From there until all ranks have their imports, and what the slowest needs to load its checkpoint.
    added: f64,
    /// From the verdict to the first steps of all ranks.
    to_step: f64,
}

/// Measures this many jobs of ours, then of the peers, each of which loses a host once.
pub fn measure(progress: &Progress, bed: &Bed, jobs: usize, report: &mut Report) {
    let mut ours: Vec<Lost> = Vec::new();
    for launcher in bed.launchers() {
        let mut measured: Vec<Lost> = Vec::new();
        // A peer needs minutes for each.
        for job in 1..=if launcher == Launcher::Mainstay { jobs } else { jobs.min(2) } {
            if !report.wants(&IDS) {
                return;
            }
            let what = format!("{}: {}, job {job}", IDS.join(", "), launcher.name());
            match progress.step(&what, || lost(bed, launcher)) {
                Ok(one) => measured.push(one),
                Err(error) if launcher == Launcher::Mainstay && measured.is_empty() => {
                    return report.part(IDS[0], Err(error));
                }
                Err(error) => {
                    eprintln!("{what}: left out: {error:#}");
                    break;
                }
            }
        }
        if launcher == Launcher::Mainstay {
            ours = measured.clone();
        }
        let of = |of: fn(&Lost) -> f64, all: &[Lost]| all.iter().map(of).collect::<Vec<f64>>();
        let all: [fn(&Lost) -> f64; 4] =
            [|of| of.to_verdict, |of| of.added, |of| of.to_step, |of| of.to_verdict + of.to_step];
        let figures = IDS.into_iter().zip(all).filter_map(|(id, part)| {
            let figure = Figure::median(id, "s", &of(part, &ours))?;
            Some(match launcher {
                Launcher::Mainstay => figure,
                _ if measured.is_empty() => return None,
                peer => figure.beside(peer.name(), &of(part, &measured)),
            })
        });
        report.add(figures.collect::<Vec<_>>());
    }
}

fn lost(bed: &Bed, launcher: Launcher) -> Result<Lost> {
    let runtime = std::env::temp_dir().join(format!("mainstay-bench-hosts-{}", std::process::id()));
    let name = launcher.name().replace(' ', "-");
    let measured = in_folder(bed, launcher, &folder(&format!("lost-{name}"))?, &runtime);
    let _ = fs::remove_dir_all(&runtime);
    measured
}

fn in_folder(bed: &Bed, launcher: Launcher, folder: &Path, runtime: &Path) -> Result<Lost> {
    let network = Network::new(HOSTS + 1)?;
    ensure!(network.has_namespaces(), "a host loses power only where it has a network namespace");
    let mut events = Events::of(folder.join("events.jsonl"), HOSTS);
    let start = |host: usize| -> Result<Running> {
        let logs = of_host(folder, host)?;
        let of = OneOf { nodes: HOSTS.to_string(), ..network.host(host) };
        let mut command = match launcher {
            Launcher::Mainstay => ours(bed, &of, &logs, &runtime.join(host.to_string())),
            peer => bed.on_host(peer, &of, 1, &logs),
        };
        command.arg(script_path("restart_rank.py")).env("BENCH_EVENTS", folder.join("events.jsonl"));
        Running::start(network.on(host, command), &logs.join("launcher.log"))
    };
    let mut launchers = Vec::new();
    for host in 0..HOSTS {
        launchers.push(start(host)?);
    }
    let none = BTreeSet::new();
    launchers[0].wait_for("steps of all ranks", LIMIT, || events.stepping(0, &none, 1))?;
    launchers.push(start(HOSTS)?);
    match launcher {
        Launcher::Mainstay => {
            let mut journal = Follower::new(&of_host(folder, HOSTS)?);
            let is_ready =
                |entry: &Entry| entry.spare_ready().is_some_and(|(imports, copy)| imports && copy.is_some());
            journal.wait_for("a spare that is ready", is_ready)?;
        }
        _ => thread::sleep(SPARE_JOINS),
    }
    let begin = events.all.len();
    let pids = launchers[0].wait_for("steps of all ranks beside the spare", LIMIT, || {
        events.stepping(begin, &none, SETTLE_STEPS)
    })?;
    let (lost, left) = choose(&launchers, &pids)?;
    let (seen, old): (usize, BTreeSet<i32>) =
        (events.all.len(), events.all.iter().map(|event| event.pid).collect());
    let lost_at = journal::now();
    network.vanish(lost, launchers[lost].pid())?;
    let acted_at = match launcher {
        Launcher::Mainstay => {
            let mut journal = Follower::new(&folder.join("host-0"));
            launchers[0].wait_for("the verdict", LIMIT, || {
                journal.poll().ok()?;
                journal.entries.iter().find(|entry| entry.is_event("host_lost")).map(|entry| entry.mono)
            })?
        }
        _ => end_of_one(&mut launchers[0], &left)?,
    };
    launchers[0].wait_for("steps of all ranks with the spare", LIMIT, || events.stepping(seen, &old, 1))?;
    let stepping = events.last_first_step(seen, &old).context("no steps")?;
    let imported = events.last_first("imported", seen, &old).context("no imports")?;
    let loading = events.longest("wrapped", "resumed", seen, &old).context("no checkpoints")?;
    let seconds = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e9;
    Ok(Lost {
        to_verdict: seconds(lost_at, acted_at),
        added: seconds(acted_at, imported + loading),
        to_step: seconds(acted_at, stepping),
    })
}

/// Each rank keeps what it saves in memory, with copies on other hosts.
fn ours(bed: &Bed, host: &OneOf, logs: &Path, runtime: &Path) -> Command {
    let mut command = Command::new(paths::release_mainstay());
    command.args(["run", "--no-agent", "--nnodes", &host.nodes, "--rdzv-id", "bench"]);
    command.args(["--rdzv-backend", "c10d", "--rdzv-endpoint", &format!("{}:{}", host.first, host.port)]);
    command.args(["--nproc-per-node", "1", "--max-restarts", "3", "--log-dir"]).arg(logs);
    command.arg("--runtime-dir").arg(runtime).env("BENCH_REPLICATED", "1");
    activate(&mut command, &bed.venv);
    command.current_dir(paths::target());
    command
}

/// The host that is lost, which is not the first, and the ranks of the others.
fn choose(launchers: &[Running], pids: &BTreeMap<u64, i32>) -> Result<(usize, Vec<i32>)> {
    let families: Vec<BTreeSet<i32>> = launchers.iter().map(|launcher| family(launcher.pid())).collect();
    let host_of = |pid: &i32| families.iter().position(|family| family.contains(pid));
    let hosts = pids.values().rev().filter_map(host_of);
    let lost = hosts.filter(|host| *host != 0).max().context("no host but the first has a rank")?;
    let left = pids.values().filter(|pid| host_of(pid) != Some(lost)).copied().collect();
    Ok((lost, left))
}

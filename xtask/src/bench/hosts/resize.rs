//! A job that continues without a lost host and takes it back: from the loss to steps of all remaining ranks, minus
//! the deliberate wait for the host; and from the decision to take a host back to steps of all ranks with it. A
//! peer writes no such decisions, so the end of a remaining rank counts.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::network::Network;
use super::{LIMIT, end_of_one, folder, of_host, wait_until_printed};
use crate::bench::events::Events;
use crate::bench::figure::{Figure, Report};
use crate::bench::launchers::{Bed, Launcher, OneOf, script_path};
use crate::bench::process::{Running, family};
use crate::journal::Follower;
use crate::paths;
use crate::progress::Progress;
use crate::venv::activate;

const IDS: [&str; 2] = ["hosts.shrink_added", "hosts.grow_added"];

/// Hosts with one rank each.
const HOSTS: usize = 3;

/// Steps of all ranks before and after.
const SETTLE_STEPS: usize = 50;

/// How long the job waits for the lost host, and how long it runs before it takes one back, seconds.
const PAUSE: f64 = 1.0;

/// Seconds.
#[derive(Clone, Copy)]
struct Resized {
    shrink: f64,
    grow: f64,
}

/// Measures this many jobs of ours, then of the peers, each of which loses a host and gets it back.
pub fn measure(progress: &Progress, bed: &Bed, jobs: usize, report: &mut Report) {
    let mut ours: Vec<Resized> = Vec::new();
    for launcher in bed.launchers() {
        let mut measured: Vec<Resized> = Vec::new();
        // A peer needs minutes for each.
        for job in 1..=if launcher == Launcher::Mainstay { jobs } else { jobs.min(2) } {
            if !report.wants(&IDS) {
                return;
            }
            let what = format!("{}: {}, job {job}", IDS.join(", "), launcher.name());
            match progress.step(&what, || resized(bed, launcher)) {
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
        let of = |of: fn(&Resized) -> f64, all: &[Resized]| all.iter().map(of).collect::<Vec<f64>>();
        let parts: [fn(&Resized) -> f64; 2] = [|of| of.shrink, |of| of.grow];
        let figures = IDS.into_iter().zip(parts).filter_map(|(id, part)| {
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

fn resized(bed: &Bed, launcher: Launcher) -> Result<Resized> {
    let runtime = std::env::temp_dir().join(format!("mainstay-bench-hosts-{}", std::process::id()));
    let name = launcher.name().replace(' ', "-");
    let measured = in_folder(bed, launcher, &folder(&format!("resize-{name}"))?, &runtime);
    let _ = fs::remove_dir_all(&runtime);
    measured
}

/// The launcher of one host.
fn command(bed: &Bed, launcher: Launcher, network: &Network, host: usize, logs: &Path) -> Result<Command> {
    let nodes = format!("1:{HOSTS}");
    if launcher != Launcher::Mainstay {
        let mut command = bed.on_host(launcher, &OneOf { nodes, ..network.host(host) }, 1, logs);
        command.arg(format!("--rdzv-conf=is_host={},last_call_timeout={PAUSE}", host == 0));
        return Ok(command);
    }
    let conf = format!("shrink_after={PAUSE},grow_after={PAUSE},last_call_timeout=60");
    let mut command = Command::new(paths::release_mainstay());
    command.args(["run", "--no-agent", "--nnodes", &nodes, "--rdzv-id", "bench"]);
    command.args(["--rdzv-backend", "c10d", "--rdzv-endpoint"]).arg(network.endpoints(1, 29_400)?);
    command.args(["--rdzv-conf", &conf, "--log-dir"]).arg(logs);
    activate(&mut command, &bed.venv);
    Ok(command)
}

fn in_folder(bed: &Bed, of: Launcher, folder: &Path, runtime: &Path) -> Result<Resized> {
    let network = Network::new(HOSTS + 1)?;
    let path = folder.join("events.jsonl");
    let start = |host: usize| -> Result<Running> {
        let logs = of_host(folder, host)?;
        let mut command = command(bed, of, &network, host, &logs)?;
        if of == Launcher::Mainstay {
            command.arg("--runtime-dir").arg(runtime.join(host.to_string()));
        }
        command.arg(script_path("hosts_rank.py")).env("BENCH_EVENTS", &path);
        Running::start(network.on(host, command), &logs.join("launcher.log"))
    };
    let mut launchers = Vec::new();
    for host in 0..HOSTS {
        let mut launcher = start(host)?;
        if of == Launcher::Mainstay {
            let joins = if host == 0 { "this host leads the job" } else { "joining the job; its leader is" };
            wait_until_printed(&mut launcher, joins)?;
        }
        launchers.push(launcher);
    }
    let mut journal = Follower::new(&folder.join("host-0"));
    let mut decided = |what: &str, launcher: &mut Running, left: &[i32]| match of {
        Launcher::Mainstay => launcher.wait_for(what, LIMIT, || {
            journal.poll().ok()?;
            journal.entries.iter().find(|entry| entry.is_event(what)).map(|entry| entry.mono)
        }),
        _ => end_of_one(launcher, left),
    };
    let mut all = Events::of(path.clone(), HOSTS);
    let none = BTreeSet::new();
    let pids = launchers[0].wait_for("steps of all ranks", LIMIT, || all.stepping(0, &none, SETTLE_STEPS))?;
    let old: BTreeSet<i32> = all.all.iter().map(|event| event.pid).collect();
    let lost = launchers.pop().context("the last host")?;
    let ranks_of_lost = family(lost.pid());
    let left: Vec<i32> = pids.into_values().filter(|pid| !ranks_of_lost.contains(pid)).collect();
    network.vanish(HOSTS - 1, lost.pid())?;
    let known = decided("host_lost", &mut launchers[0], &left)?;
    let mut without = Events::of(path.clone(), HOSTS - 1);
    let pids =
        launchers[0].wait_for("steps without the host", LIMIT, || without.stepping(0, &old, SETTLE_STEPS))?;
    let stepping = without.last_first_step(0, &old).context("no steps")?;
    // Ours waits between its decisions, a peer between the end of its ranks and their start.
    let shrink = seconds(known, stepping) - PAUSE;

    let old: BTreeSet<i32> = without.all.iter().map(|event| event.pid).collect();
    launchers.push(start(HOSTS)?);
    let left: Vec<i32> = pids.into_values().collect();
    let decided = decided("world_grows", &mut launchers[0], &left)?;
    let mut all = Events::of(path, HOSTS);
    launchers[0].wait_for("steps with the host", LIMIT, || all.stepping(0, &old, 1))?;
    let stepping = all.last_first_step(0, &old).context("no steps")?;
    // All hosts are back, so that nothing is waited for.
    Ok(Resized { shrink, grow: seconds(decided, stepping) })
}

fn seconds(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e9
}

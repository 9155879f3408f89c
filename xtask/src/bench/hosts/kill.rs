//! From the SIGKILL of one rank to the first step of all, on four hosts and on one, compared with the peers on
//! four.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::network::Network;
use super::{folder, of_host};
use crate::bench::events::{Events, Fault, strike};
use crate::bench::figure::{Figure, Report};
use crate::bench::launchers::{Bed, Launcher, script_path};
use crate::bench::process::Running;
use crate::journal::Follower;
use crate::progress::Progress;

const ID: &str = "hosts.kill_to_step";

/// Ranks of the job, on as many hosts or on one.
const WORLD: usize = 4;

/// Steps before the first fault and between two, as in the benchmark of one host.
const SETTLE_STEPS: (usize, usize) = (300, 30);

/// If no host has reported a warm template for this long, the templates hold the ranks' imports: an incomplete one
/// is replaced by another.
const WARM_FOR: Duration = Duration::from_secs(5);

/// A launcher that needs longer than this has hung.
const LIMIT: Duration = Duration::from_secs(180);

/// The name of our figure on one host in the comparison.
const ONE_HOST: &str = "mainstay on one host, same ranks";

/// Measures ours on several hosts and on one, in turn, then the peers.
pub fn measure(progress: &Progress, bed: &Bed, faults: usize, quick: bool, report: &mut Report) {
    if !report.wants(&[ID]) {
        return;
    }
    let (mut over_hosts, mut on_one) = (Vec::new(), Vec::new());
    for turn in 1..=if quick { 1 } else { 2 } {
        for (hosts, samples) in [(WORLD, &mut over_hosts), (1, &mut on_one)] {
            let what = format!("{ID}: mainstay on {hosts} hosts, turn {turn} ({faults} kills)");
            match progress.step(&what, || kills(bed, Launcher::Mainstay, hosts, faults)) {
                Ok(measured) => samples.extend(measured),
                Err(error) => return report.part(ID, Err(error)),
            }
        }
        let ours = Figure::median(ID, "ms", &over_hosts);
        report.add(ours.map(|ours| ours.beside(ONE_HOST, &on_one)));
    }
    let Some(ours) = Figure::median(ID, "ms", &over_hosts) else { return };
    for peer in bed.launchers().into_iter().filter(|launcher| *launcher != Launcher::Mainstay) {
        if !report.wants(&[ID]) {
            return;
        }
        let what = format!("{ID}: {} on {WORLD} hosts ({faults} kills)", peer.name());
        match progress.step(&what, || kills(bed, peer, WORLD, faults)) {
            Ok(theirs) => report.add([ours.beside(peer.name(), &theirs)]),
            Err(error) => eprintln!("{what}: left out: {error:#}"),
        }
    }
}

/// One job, several kills, of each rank in turn. Milliseconds to the first step of the last rank.
fn kills(bed: &Bed, launcher: Launcher, hosts: usize, faults: usize) -> Result<Vec<f64>> {
    let folder = folder(&format!("kill-{}-{hosts}", launcher.name().replace(' ', "-")))?;
    let network = if hosts == 1 { Network::loopback(1)? } else { Network::new(hosts)? };
    let mut events = Events::of(folder.join("events.jsonl"), WORLD);
    let mut launchers = Vec::new();
    for host in 0..hosts {
        let logs = of_host(&folder, host)?;
        let mut command = match hosts {
            1 => bed.job(launcher, WORLD, &logs, "restart_rank.py")?,
            _ => {
                let mut command = bed.on_host(launcher, &network.host(host), WORLD / hosts, &logs);
                command.arg(script_path("restart_rank.py"));
                command
            }
        };
        command.env("BENCH_EVENTS", &events.path);
        launchers.push(Running::start(network.on(host, command), &logs.join("launcher.log"))?);
    }
    let mut old = BTreeSet::new();
    let mut measured = Vec::new();
    for n in 0..=faults {
        let begin = measured.len().min(1) * events.all.len();
        let settle = if n == 0 { SETTLE_STEPS.0 } else { SETTLE_STEPS.1 };
        let pids =
            launchers[0].wait_for("steps of all ranks", LIMIT, || events.stepping(begin, &old, settle))?;
        if n == faults {
            break;
        }
        if n == 0 && launcher == Launcher::Mainstay {
            wait_for_templates(&mut launchers[0], &folder, hosts)?;
        }
        let victim = (n % WORLD) as u64;
        let seen = events.all.len();
        let asked_at = strike(Fault::Kill, &events.path, victim, pids.get(&victim).copied())?;
        old.extend(pids.values().copied());
        launchers[0].wait_for("first steps after the kill", LIMIT, || events.stepping(seen, &old, 1))?;
        measured.push(events.restart_since(seen, &old, Fault::Kill, asked_at)?.to_step);
    }
    Ok(measured)
}

/// Waits until the templates of all hosts are warm. On hosts that share two cores that takes seconds; a job that runs for hours has
/// them at its failures.
fn wait_for_templates(launcher: &mut Running, folder: &Path, hosts: usize) -> Result<()> {
    let mut journals = (0..hosts)
        .map(|host| Ok(Follower::new(&of_host(folder, host)?)))
        .collect::<Result<Vec<Follower>>>()?;
    let (mut known, mut since) = (0, Instant::now());
    launcher.wait_for("warm templates", LIMIT, || {
        journals.iter_mut().try_for_each(|journal| journal.poll().map(drop)).ok()?;
        let warm = |journal: &Follower| journal.entries.iter().filter(|of| of.is_event("warm")).count();
        let counts: Vec<usize> = journals.iter().map(warm).collect();
        let all: usize = counts.iter().sum();
        if all != known {
            (known, since) = (all, Instant::now());
        }
        (!counts.contains(&0) && since.elapsed() >= WARM_FOR).then_some(())
    })
}

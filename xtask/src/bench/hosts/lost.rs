//! A host that loses power, and the spare that replaces it: from the loss to the verdict; from there until all
//! ranks have their imports and their checkpoints, which is the launchers' part; and to the first steps of all
//! ranks, which must connect to each other first. A peer writes no verdict, so its first restart action counts:
//! the end of a rank on a remaining host.

use std::thread;

use super::network::Network;
use super::{Job, seconds};
use crate::bench::prelude::*;

/// Hosts with one rank each. One more is a spare.
const HOSTS: usize = 4;

/// Steps of all ranks before a host is lost.
const SETTLE_STEPS: usize = 100;

/// A peer's launcher does not report that it waits: it has this long to join as a spare.
const SPARE_JOINS: Duration = Duration::from_secs(5);

/// Measures jobs of ours, then of the peers, each of which loses a host once: seconds from the loss to the
/// verdict, or to the first restart action; from there until all ranks have their imports, and what the slowest
/// needs to load its checkpoint; from the verdict to the first steps of all ranks; and all of it.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let figures = Of::each([
        ("hosts.lost_to_verdict", "s"),
        ("hosts.swap_added", "s"),
        ("hosts.swap_to_step", "s"),
        ("hosts.lost_to_step", "s"),
    ]);
    let jobs = bench.at_most(5, 2);
    bench.by_launcher(bed, figures, "a lost host", jobs, |launcher| Ok(vec![lost(bed, launcher)?]));
}

fn lost(bed: &Bed, launcher: Launcher) -> Result<[f64; 4]> {
    let mut job = Job::of(&format!("lost-{}", launcher.name()), Network::new(HOSTS + 1)?, HOSTS)?;
    ensure!(job.network.has_namespaces(), "a host loses power only where it has a network namespace");
    let (first, port) = job.network.meeting();
    let ours = format!(
        "--rdzv-id bench --rdzv-backend c10d --rdzv-endpoint {first}:{port} --nproc-per-node 1 --max-restarts 3"
    );
    // Each rank of ours keeps what it saves in memory, with copies on other hosts.
    job.variable = (launcher == Launcher::Mainstay).then_some(("BENCH_REPLICATED", "1"));
    let start = |job: &mut Job| job.start(bed, launcher, &HOSTS.to_string(), (&ours, ""), "restart_rank.py");
    for _ in 0..HOSTS {
        start(&mut job)?;
    }
    job.wait_for(0, "steps of all ranks", |events| events.stepping(&Moment::default(), 1))?;
    start(&mut job)?;
    if launcher == Launcher::Mainstay {
        job.wait_for_fact(HOSTS, "a spare that is ready", |fact| {
            let value = |name| observed(fact, "spare_ready").and_then(|of| of.values.get(name));
            value("imports").is_some_and(|imports| imports == "true") && value("step").is_some()
        })?;
    } else {
        thread::sleep(SPARE_JOINS);
    }
    let begin = job.events.position();
    let pids = job.wait_for(0, "steps beside the spare", |events| events.stepping(&begin, SETTLE_STEPS))?;
    let hosts = job.hosts_of(&pids);
    let lost = hosts.values().copied().filter(|host| *host != 0).max();
    let lost = lost.context("no host but the first has a rank")?;
    let left: Vec<i32> = pids.values().copied().filter(|pid| hosts.get(pid) != Some(&lost)).collect();
    let moment = job.events.now();
    let lost_at = journal::now();
    job.network.vanish(lost, job.launchers[lost].pid())?;
    let acted_at = match launcher {
        Launcher::Mainstay => {
            job.wait_for_fact(0, "the verdict", |fact| matches!(fact, Fact::HostLost { .. }))?
        }
        _ => job.end_of_one(&left)?,
    };
    job.wait_for(0, "steps with the spare", |events| events.stepping(&moment, 1))?;
    let stepping = job.events.last_first("step", &moment)?;
    let imported = job.events.last_first("imported", &moment)?;
    let loading = job.events.longest("wrapped", "resumed", &moment)?;
    Ok([
        seconds(lost_at, acted_at),
        seconds(acted_at, imported + loading),
        seconds(acted_at, stepping),
        seconds(lost_at, stepping),
    ])
}

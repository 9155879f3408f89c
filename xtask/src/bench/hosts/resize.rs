//! A job that continues without a lost host and takes it back: from the loss to steps of all remaining ranks,
//! minus the deliberate wait for the host; and from the decision to take a host back to steps of all ranks with
//! it. A peer writes no such decisions, so the end of a remaining rank counts.

use mainstay_model::observation::HostsEvent;

use super::network::Network;
use super::{Job, seconds};
use crate::bench::prelude::*;

/// Hosts with one rank each.
const HOSTS: usize = 3;

/// Steps of all ranks before and after.
const SETTLE_STEPS: usize = 50;

/// How long the job waits for the lost host, and how long it runs before it takes one back, seconds.
const PAUSE: f64 = 1.0;

/// Measures jobs of ours, then of the peers, each of which loses a host and gets it back.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let figures = Of::each([("hosts.shrink_added", "s"), ("hosts.grow_added", "s")]);
    let jobs = bench.at_most(5, 2);
    bench.by_launcher(bed, figures, "lost and back", jobs, |launcher| Ok(vec![resized(bed, launcher)?]));
}

fn resized(bed: &Bed, launcher: Launcher) -> Result<[f64; 2]> {
    let mut job = Job::of(&format!("resize-{}", launcher.name()), Network::new(HOSTS + 1)?, HOSTS)?;
    let ours = format!(
        "--rdzv-id bench --rdzv-backend c10d --rdzv-endpoint {} \
         --rdzv-conf shrink_after={PAUSE},grow_after={PAUSE},last_call_timeout=60",
        job.network.endpoints(1, 29_400)?
    );
    let conf = format!(",last_call_timeout={PAUSE}");
    let start =
        |job: &mut Job| job.start(bed, launcher, &format!("1:{HOSTS}"), (&ours, &conf), "hosts_rank.py");
    for _ in 0..HOSTS {
        start(&mut job)?;
    }
    let begin = Moment::default();
    let pids = job.wait_for(0, "steps of all ranks", |events| events.stepping(&begin, SETTLE_STEPS))?;
    // Neither the leader, whose journal shows the decisions, nor the host where they meet.
    let leader = if launcher == Launcher::Mainstay { job.leader()? } else { 0 };
    let lost = (1..HOSTS).rev().find(|host| *host != leader).context("another host")?;
    let hosts = job.hosts_of(&pids);
    let left: Vec<i32> = pids.into_values().filter(|pid| hosts.get(pid) != Some(&lost)).collect();
    let decided = |job: &mut Job, what: &str, left: &[i32], is: fn(&Fact) -> bool| match launcher {
        Launcher::Mainstay => job.wait_for_fact(leader, what, is),
        _ => job.end_of_one(left),
    };

    let moment = job.events.now();
    job.network.vanish(lost, job.launchers[lost].pid())?;
    let known = decided(&mut job, "the loss", &left, |fact| matches!(fact, Fact::HostLost { .. }))?;
    // The launcher of the lost host has ended with it.
    let path = job.events.path().to_owned();
    job.events = Events::of(path.clone(), HOSTS - 1);
    let pids = job.wait_for(0, "steps without it", |events| events.stepping(&moment, SETTLE_STEPS))?;
    let stepping = job.events.last_first("step", &moment)?;
    // Ours waits between its decisions, a peer between the end of its ranks and their start.
    let shrink = seconds(known, stepping) - PAUSE;

    let moment = job.events.now();
    start(&mut job)?;
    let left: Vec<i32> = pids.into_values().collect();
    let decided = decided(&mut job, "the growth", &left, |fact| {
        observed(fact, HostsEvent::WorldGrows.as_str()).is_some()
    })?;
    job.events = Events::of(path, HOSTS);
    job.wait_for(0, "steps with the host", |events| events.stepping(&moment, 1))?;
    // All hosts are back, so that nothing is waited for.
    Ok([shrink, seconds(decided, job.events.last_first("step", &moment)?)])
}

//! From the SIGKILL of the leading launcher until all ranks step again. Three hosts run etcd between them, the
//! fourth is a spare: the launcher's etcd is lost with it.

use mainstay_model::observation::{HostsEvent, LEADS_HERE};
use mainstay_model::verdict::Action;

use super::network::Network;
use super::{Job, seconds};
use crate::bench::prelude::*;

/// All figures that are measured here.
pub const IDS: [&str; 2] = ["hosts.leader_replaced", "hosts.leader_decides"];

/// Hosts with ranks, one on each. One more is a spare.
const HOSTS: usize = 3;

/// Steps of all ranks before the leader is killed.
const SETTLE_STEPS: usize = 50;

/// Measures some jobs, each of which loses its leader once: seconds from the SIGKILL to the first steps of all
/// ranks, and to the first restart that the next leader decided.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let mut comparison = Comparison::of(Of::each(IDS.map(|id| (id, "s"))));
    let jobs = bench.at_most(5, 2);
    for job in 1..=jobs {
        let replaced = || Ok(vec![replaced(bed)?]);
        if !bench.take(&mut comparison, None, &format!("job {job} of {jobs}"), replaced) {
            return;
        }
    }
}

fn replaced(bed: &Bed) -> Result<[f64; 2]> {
    let mut job = Job::of("leader", Network::new(HOSTS + 1)?, HOSTS)?;
    let endpoints = job.network.endpoints(HOSTS, 2379)?;
    let options = format!("--rdzv-id bench --rdzv-endpoint {endpoints} --max-restarts 3");
    for host in 0..=HOSTS {
        job.start(bed, Launcher::Mainstay, &HOSTS.to_string(), (&options, ""), "hosts_rank.py")?;
        if host < HOSTS {
            // Each takes the first endpoint that is its own and free.
            let launcher = &mut job.launchers[host];
            let pid = launcher.pid();
            let runs = || family(pid).into_iter().filter_map(stat).find(|stat| stat.comm == "etcd").map(drop);
            launcher.wait_for("etcd on this host", runs)?;
        }
    }
    // The spare is the last launcher to join, which need not be the last one started.
    let mut journals: Vec<_> = (0..=HOSTS).map(|host| job.journal(host)).collect();
    let is_spare = |fact: &Fact| observed(fact, "spare_ready").is_some();
    job.wait_for(0, "a spare", |_| journals.iter_mut().find_map(|journal| journal.when(0, is_spare)))?;
    job.wait_for(0, "steps of all ranks", |events| events.stepping(&Moment::default(), SETTLE_STEPS))?;
    let leader = job.leader()?;
    let moment = job.events.now();
    let killed_at = strike(job.launchers[leader].pid(), Signal::SIGKILL)?;
    let other = usize::from(leader == 0);
    job.wait_for(other, "steps after the leader was lost", |events| events.stepping(&moment, 1))?;
    let stepping = job.events.last_first("step", &moment)?;
    let leads_here = |fact: &Fact| {
        observed(fact, HostsEvent::LeaderReplaced.as_str())
            .is_some_and(|of| of.values.get(LEADS_HERE).is_some_and(|is| is == "true"))
    };
    let decided = job.wait_for(other, "the decision in the journal", |_| {
        let next = journals.iter_mut().find_map(|of| of.when(0, leads_here).is_some().then_some(of))?;
        next.find(0, |entry| (is_decision(entry) && entry.at.mono.0 >= killed_at).then_some(entry.at.mono.0))
    })?;
    Ok([seconds(killed_at, stepping), seconds(killed_at, decided)])
}

/// Waiting is no decision yet.
fn is_decision(entry: &Entry) -> bool {
    matches!(&entry.body, Body::Decision(decision) if decision.action != Action::Wait)
}

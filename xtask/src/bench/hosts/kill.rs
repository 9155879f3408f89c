//! From the SIGKILL of one rank to the first step of all, on four hosts and on one, compared with the peers on
//! four.

use super::Job;
use super::network::Network;
use crate::bench::prelude::*;
use crate::bench::restart::SETTLE_STEPS;
use crate::journal::fact;

/// Ranks of the job, on as many hosts or on one.
const WORLD: usize = 4;

/// If no host has reported a warm template for this long, the templates hold the ranks' imports: an incomplete
/// one is replaced by another.
const WARM_FOR: Duration = Duration::from_secs(5);

/// The name of our figure on one host in the comparison.
const ONE_HOST: &str = "mainstay on one host, same ranks";

/// Measures ours on several hosts and on one, in turn, then the peers.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let faults = bench.samples(5, 2);
    let of = Of::median("hosts.kill_to_step", "ms", |restart: &Restart| restart.to_step);
    let mut comparison = Comparison::of(vec![of]);
    for turn in 1..=if bench.args.quick { 1 } else { 2 } {
        for (hosts, name) in [(WORLD, None), (1, Some(ONE_HOST))] {
            let what = format!("mainstay on {hosts} hosts, turn {turn} ({faults} kills)");
            let kills = || kills(bed, Launcher::Mainstay, hosts, faults);
            if !bench.take(&mut comparison, name, &what, kills) {
                return;
            }
        }
    }
    for peer in bed.launchers().into_iter().filter(|launcher| launcher.peer().is_some()) {
        let what = format!("{} on {WORLD} hosts ({faults} kills)", peer.name());
        bench.take(&mut comparison, peer.peer(), &what, || kills(bed, peer, WORLD, faults));
    }
}

/// One job, several kills, of each rank in turn.
fn kills(bed: &Bed, launcher: Launcher, hosts: usize, faults: usize) -> Result<Vec<Restart>> {
    let network = if hosts == 1 { Network::loopback(1)? } else { Network::new(hosts)? };
    let mut job = Job::of(&format!("kill-{}-{hosts}", launcher.name()), network, WORLD)?;
    if hosts == 1 {
        let mut command = bed.job(launcher, WORLD, &job.logs(0), "", "restart_rank.py");
        command.env("BENCH_EVENTS", job.events.path());
        job.push(command)?;
    } else {
        for host in 0..hosts {
            let (first, port) = job.network.meeting();
            let ours = format!(
                "--node-rank {host} --master-addr {first} --master-port {port} --nproc-per-node 1 --max-restarts 100000"
            );
            job.start(bed, launcher, &hosts.to_string(), (&ours, ""), "restart_rank.py")?;
        }
    }
    let journals: Vec<Follower> = (0..hosts).map(|host| job.journal(host)).collect();
    let Job { events, launchers, .. } = &mut job;
    events.restarts(&mut launchers[0], (Fault::Kill, faults), SETTLE_STEPS, |running| {
        if launcher == Launcher::Mainstay { wait_for_templates(running, journals) } else { Ok(()) }
    })
}

/// Waits until the templates of all hosts are warm. On hosts that share two cores that takes seconds; a job that
/// runs for hours has them at its failures.
fn wait_for_templates(launcher: &mut Running, mut journals: Vec<Follower>) -> Result<()> {
    let (mut known, mut since) = (0, Instant::now());
    launcher.wait_for("warm templates", || {
        let warm = |journal: &mut Follower| {
            journal.poll();
            let facts = journal.entries.iter().filter_map(fact);
            facts.filter(|fact| observed(fact, "warm").is_some()).count()
        };
        let counts: Vec<usize> = journals.iter_mut().map(warm).collect();
        let all: usize = counts.iter().sum();
        if all != known {
            (known, since) = (all, Instant::now());
        }
        (!counts.contains(&0) && since.elapsed() >= WARM_FOR).then_some(())
    })
}

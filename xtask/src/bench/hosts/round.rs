//! A round of 64 launchers on this machine: a rank is killed, and the ranks of all hosts are stopped and
//! restarted. The ranks do nothing, so that only the launchers and the processes are measured. All files are in
//! shared memory: 64 launchers make theirs at the same moment, and ext4 searches long for a free inode if many
//! were deleted in the last minute, as those of the previous run.

use mainstay_model::verdict::Action;

use super::network::Network;
use crate::bench::prelude::*;
use crate::bench::stop;
use crate::journal::{fact, started};

/// Launchers of the job.
const HOSTS: usize = 64;

/// From the SIGKILL of a rank: to the start of all ranks, and to what comes before it.
pub fn measure(bench: &mut Bench) {
    let rounds = bench.samples(9, 3);
    let figures = Of::each([
        ("hosts.round_64", "ms"),
        ("hosts.round_64_detected", "ms"),
        ("hosts.round_64_decided", "ms"),
        ("hosts.round_64_ended", "ms"),
    ]);
    bench.measure(figures, &format!("{rounds} rounds of {HOSTS} launchers"), || job(rounds));
}

fn job(rounds: usize) -> Result<Vec<[f64; 4]>> {
    let mut folder = stop::leftover_free("mainstay-bench-hosts")?;
    // The logs stay where they are if something fails; the next bench removes them.
    folder.disable_cleanup(true);
    let network = Network::loopback(HOSTS)?;
    let (program, (first, port)) = (paths::release_mainstay(), network.meeting());
    let port = port.to_string();
    let mut launchers = Vec::new();
    for host in 0..HOSTS {
        let logs = folder.path().join(format!("host-{host}"));
        let runtime = folder.path().join("run").join(host.to_string());
        let (number, nodes) = (host.to_string(), HOSTS.to_string());
        let command = cmd!(
            "{program} run --no-agent --nnodes {nodes} --node-rank {number} --master-addr {first} --master-port {port}
             --rdzv-id bench --max-restarts 100000 --log-dir {logs} --runtime-dir {runtime} --no-python sleep 1000000"
        );
        launchers.push(Running::start(command, &logs.join("launcher.log"))?);
    }
    let leader = &mut launchers[0];
    let mut journal = Follower::new(&folder.path().join("host-0"));
    let mut pids = leader.wait_for("ranks on all hosts", || journal.find(0, started))?;
    let mut measured = Vec::new();
    for n in 0..rounds {
        // Another host each time, the leader's among them.
        let victim = u32::try_from(n * 7 % HOSTS)?;
        let seen = journal.entries.len();
        let pid = *pids.get(&victim).context("the journal names no process of the rank")?;
        let killed_at = strike(pid, Signal::SIGKILL)?;
        pids = leader.wait_for("ranks on all hosts", || journal.find(seen, started))?;
        let first = |is: fn(&Entry) -> bool| {
            let found = journal.entries[seen..].iter().find(|entry| is(entry));
            found.map_or(f64::NAN, |entry| entry.at.mono.0.saturating_sub(killed_at) as f64 / 1e6)
        };
        measured.push([
            first(|entry| started(entry).is_some()),
            first(|entry| {
                let fact = fact(entry);
                matches!(fact, Some(Fact::RankEnding { .. } | Fact::RankExited { after_stop: false, .. }))
            }),
            first(|entry| matches!(&entry.body, Body::Decision(of) if of.action != Action::Wait)),
            first(|entry| matches!(fact(entry), Some(Fact::AttemptEnded { .. }))),
        ]);
    }
    folder.disable_cleanup(false);
    Ok(measured)
}

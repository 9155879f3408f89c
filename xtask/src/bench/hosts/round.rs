//! A round of 64 launchers on this machine: a rank is killed, and the ranks of all hosts are stopped and restarted.
//! The ranks do nothing, so that only the launchers and the processes are measured. All files are in shared memory:
//! 64 launchers make theirs at the same moment, and ext4 searches long for a free inode if many were deleted in the
//! last minute, as those of the previous run.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::network::Network;
use super::of_host;
use crate::bench::figure::{Figure, Report};
use crate::bench::process::Running;
use crate::journal::{self, Attempt, Entry, Follower};
use crate::paths;
use crate::progress::Progress;

const ID: &str = "hosts.round_64";

/// Launchers of the job.
const HOSTS: usize = 64;

/// All launchers have started their ranks within this time.
const LIMIT: Duration = Duration::from_secs(180);

/// Measures this many rounds of one job.
pub fn measure(progress: &Progress, rounds: usize, report: &mut Report) {
    if !report.wants(&[ID]) {
        return;
    }
    let measured = progress.step(&format!("{ID}: {rounds} rounds of {HOSTS} launchers"), || job(rounds));
    report.part(ID, measured);
}

/// Milliseconds from the SIGKILL of a rank.
#[derive(Clone, Copy, Default)]
struct Round {
    detected: f64,
    decided: f64,
    ended: f64,
    started: f64,
}

/// The figures of one job.
fn job(rounds: usize) -> Result<Vec<Figure>> {
    let shared_memory = Path::new("/dev/shm");
    let memory = if shared_memory.is_dir() { shared_memory.to_owned() } else { std::env::temp_dir() };
    let place = memory.join(format!("mainstay-bench-hosts-{}", std::process::id()));
    let network = Network::loopback(HOSTS)?;
    let measured = in_folder(rounds, &place.join("logs"), &network, &place.join("run"))
        .with_context(|| format!("the logs are in {}", place.display()))?;
    // Only memory that is not freed at once.
    let _ = std::fs::remove_dir_all(&place);
    let figure = |id: &str, of: fn(&Round) -> f64| {
        Figure::median(id, "ms", &measured.iter().map(of).collect::<Vec<f64>>())
    };
    let all = [
        figure(ID, |round| round.started),
        figure("hosts.round_64_detected", |round| round.detected),
        figure("hosts.round_64_decided", |round| round.decided),
        figure("hosts.round_64_ended", |round| round.ended),
    ];
    Ok(all.into_iter().flatten().collect())
}

fn in_folder(rounds: usize, folder: &Path, network: &Network, runtime: &Path) -> Result<Vec<Round>> {
    let mut launchers = Vec::new();
    for host in 0..HOSTS {
        let logs = of_host(folder, host)?;
        let of = network.host(host);
        let mut command = Command::new(paths::release_mainstay());
        command.args(["run", "--no-agent", "--nnodes", &of.nodes, "--node-rank", &host.to_string()]);
        command.args(["--master-addr", &of.first, "--master-port", &of.port.to_string()]);
        command.args(["--rdzv-id", "bench", "--max-restarts", "100000", "--log-dir"]).arg(&logs);
        command.arg("--runtime-dir").arg(runtime.join(host.to_string()));
        command.args(["--no-python", "sleep", "1000000"]);
        launchers.push(Running::start(command, &logs.join("launcher.log"))?);
    }
    let leader = &mut launchers[0];
    let mut journal = Follower::new(&folder.join("host-0"));
    let mut attempt = started(leader, &mut journal, 0)?;
    let mut measured = Vec::new();
    for n in 0..rounds {
        // Another host each time, the leader's among them.
        let victim = (n * 7 % HOSTS) as u64;
        let pid = *attempt.pids.get(&victim).context("the journal names no process of the rank")?;
        let seen = journal.entries.len();
        let killed_at = journal::now();
        kill(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("killing rank {victim}"))?;
        attempt = started(leader, &mut journal, attempt.number + 1)?;
        measured.push(Round::of(&journal.entries[seen..], killed_at));
    }
    Ok(measured)
}

/// Waits until an attempt has started on all hosts.
fn started(leader: &mut Running, journal: &mut Follower, number: u64) -> Result<Attempt> {
    leader.wait_for("ranks on all hosts", LIMIT, || {
        journal.poll().ok()?;
        journal.entries.iter().rev().filter_map(Entry::attempt_started).find(|of| of.number == number)
    })
}

impl Round {
    fn of(entries: &[Entry], killed_at: u64) -> Round {
        let first = |is: fn(&Entry) -> bool| {
            let found = entries.iter().find(|entry| is(entry));
            found.map_or(f64::NAN, |entry| entry.mono.saturating_sub(killed_at) as f64 / 1e6)
        };
        Round {
            detected: first(|entry| entry.rank_died().is_some()),
            decided: first(|entry| entry.decision().is_some()),
            ended: first(Entry::attempt_ended),
            started: first(|entry| entry.attempt_started().is_some()),
        }
    }
}

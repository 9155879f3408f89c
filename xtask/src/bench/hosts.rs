//! Jobs of several hosts on this machine: a killed rank, a lost leader, a host that loses power and is replaced
//! by a spare, a host that is lost and comes back, and a round of many launchers.

mod kill;
mod leader;
mod lost;
mod network;
mod resize;
mod round;

use std::collections::{BTreeMap, BTreeSet};

use tempfile::TempDir;

use self::network::Network;
use super::prelude::*;
use crate::packages;

pub fn measure(bench: &mut Bench, bed: &Bed) {
    kill::measure(bench, bed);
    if bench.report.wants(&leader::IDS) {
        // Without it, the part reports why it is left out.
        let _ = bench.progress.step("etcd-server and etcd-client (apt-get)", || packages::ETCD.install());
    }
    leader::measure(bench, bed);
    lost::measure(bench, bed);
    resize::measure(bench, bed);
    round::measure(bench);
}

/// One job: its hosts, which are added one by one, the record of its ranks, and its folders.
struct Job {
    /// Dropped first: launchers need the rest until they have ended.
    launchers: Vec<Running>,
    network: Network,
    folder: PathBuf,
    /// Sockets have short paths.
    runtime: TempDir,
    events: Events,
    /// A variable of the ranks.
    variable: Option<(&'static str, &'static str)>,
}

impl Job {
    fn of(name: &str, network: Network, world: usize) -> Result<Job> {
        let folder = paths::fresh(paths::target().join("bench/hosts").join(name.replace(' ', "-")))?;
        let runtime = tempfile::tempdir().context("making a folder for sockets")?;
        let events = Events::of(folder.join("events.jsonl"), world);
        Ok(Job { network, folder, runtime, events, launchers: Vec::new(), variable: None })
    }

    /// The folder of a host's files.
    fn logs(&self, host: usize) -> PathBuf {
        self.folder.join(format!("host-{host}"))
    }

    fn journal(&self, host: usize) -> Follower {
        Follower::new(&self.logs(host))
    }

    /// Starts the launcher of the next host; `ours` are options of `mainstay run`, `conf` is what peers get in
    /// `--rdzv-conf`.
    fn start(
        &mut self,
        bed: &Bed,
        launcher: Launcher,
        nodes: &str,
        (ours, conf): (&str, &str),
        script: &str,
    ) -> Result<()> {
        let host = self.launchers.len();
        let (address, (first, port)) = (self.network.address(host), self.network.meeting());
        // Peers search for themselves by name, and all namespaces have the same name.
        let is_host = host == 0;
        let theirs = format!(
            "--nnodes={nodes} --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=bench --local-addr={address} \
             --rdzv-endpoint={first}:{port} --rdzv-conf=is_host={is_host}{conf}"
        );
        let mut command = match launcher {
            Launcher::Mainstay => {
                bed.mainstay(&format!("--no-agent --nnodes {nodes} {ours}"), &self.logs(host))
            }
            Launcher::Torchrun => bed.torchrun(&theirs),
            Launcher::Nvrx => bed.nvrx(&theirs),
        };
        if launcher == Launcher::Mainstay {
            command.arg("--runtime-dir").arg(self.runtime.path().join(host.to_string()));
        }
        command.arg(script_path(script));
        command.env("BENCH_EVENTS", self.events.path()).envs(self.variable);
        self.push(command)
    }

    /// Starts this command on the next host.
    fn push(&mut self, command: std::process::Command) -> Result<()> {
        let host = self.launchers.len();
        let log = self.logs(host).join("launcher.log");
        self.launchers.push(Running::start(self.network.on(host, command), &log)?);
        Ok(())
    }

    /// Waits for something that the ranks recorded, while a launcher runs.
    fn wait_for<T>(
        &mut self,
        launcher: usize,
        what: &str,
        mut look: impl FnMut(&mut Events) -> Option<T>,
    ) -> Result<T> {
        let events = &mut self.events;
        self.launchers[launcher].wait_for(what, || look(events))
    }

    /// Waits for a fact in the journal of a host, and returns when it happened.
    fn wait_for_fact(&mut self, host: usize, what: &str, is: impl Fn(&Fact) -> bool) -> Result<u64> {
        let mut journal = self.journal(host);
        self.launchers[host].wait_for(what, || journal.when(0, &is))
    }

    /// The host that leads the job.
    fn leader(&self) -> Result<usize> {
        let leads = |host: &usize| {
            let leads = |fact: &Fact| matches!(fact, Fact::JobStarted(job) if !job.follows);
            self.journal(*host).when(0, leads).is_some()
        };
        (0..self.launchers.len()).find(leads).context("no launcher leads")
    }

    fn hosts_of(&self, pids: &BTreeMap<u64, i32>) -> BTreeMap<i32, usize> {
        let families = self.launchers.iter().map(|launcher| family(launcher.pid()));
        let families: Vec<BTreeSet<i32>> = families.collect();
        let host_of = |pid: &i32| families.iter().position(|family| family.contains(pid));
        pids.values().filter_map(|pid| Some((*pid, host_of(pid)?))).collect()
    }

    /// When a peer reacts to a lost host: it writes no verdict, so the end of a rank on a remaining host counts.
    fn end_of_one(&mut self, left: &[i32]) -> Result<u64> {
        self.launchers[0].wait_for("the end of a rank that is left", || {
            left.iter().any(|pid| is_over(*pid)).then(journal::now)
        })
    }
}

fn seconds(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e9
}

//! `cargo xtask demo --hosts 3`: one job over several launchers, each of which simulates a host, with a separate
//! network if namespaces are allowed. A rank is killed, a whole host vanishes and a spare replaces it, a launcher
//! is killed and comes back; the job ends with the same bits as an undisturbed one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Args, Trained, activate};
use crate::bench::hosts::network::Network;
use crate::command;
use crate::journal::{self, Entry, Follower, Incident};
use crate::paths;
use crate::progress::{LiveLine, Progress};
use crate::status;
use crate::venv::Venv;

/// The interval of polling the journal.
const LOOK: Duration = Duration::from_millis(40);
/// The interval of asking the first host for the ranks' progress.
const ASK: Duration = Duration::from_millis(150);
/// A run of this demo takes seconds; a run that takes this long will not end.
const LIMIT: Duration = Duration::from_secs(300);
/// The host that vanishes: not the one that leads, which a job with one endpoint cannot lose.
const LOST: usize = 1;
/// The host whose launcher is killed and started again. With two hosts it is the one that was the spare.
const RESTARTED: usize = 2;

/// Trains undisturbed, trains disturbed, compares. Whether all of it held.
pub fn run(progress: &Progress, venv: &Venv, args: &Args, folder: &Path) -> Result<bool> {
    let hosts = args.hosts;
    println!();
    progress
        .note(&format!("Training undisturbed, for the comparison: {} steps on {hosts} hosts", args.steps));
    let undisturbed = {
        let mut plain = Cluster::new(&folder.join("undisturbed"), hosts, args.steps)?;
        plain.follow(venv, &mut Vec::new())?;
        plain.trained()?
    };
    progress.note(&format!("  final loss {:.6}", undisturbed.loss));

    println!();
    let (first, second) = (args.steps / 4 + 5, args.steps / 2 + 5);
    let last = hosts as u64 - 1;
    let mut hurt = Cluster::new(&folder.join("disturbed"), hosts, args.steps)?;
    let vanishes = match hurt.network.has_namespaces() {
        true => "its link is cut, and all of its processes are killed at once",
        false => "all of its processes are killed at once",
    };
    progress.note("The same again, with one more host that waits as a spare. On the way:");
    progress.note(&format!("  about step {first}: SIGKILL to rank {last}"));
    progress
        .note(&format!("  about step {second}: host {LOST} vanishes: {vanishes}. The spare takes its place"));
    progress.note(&format!(
        "  when all ranks step again: SIGKILL to the launcher of host {RESTARTED}, which is started again"
    ));
    let mut faults =
        vec![(first, Fault::Launcher(RESTARTED)), (second, Fault::Host(LOST)), (first, Fault::Rank(last))];
    let entries = hurt.follow(venv, &mut faults)?;
    let disturbed = hurt.trained()?;
    // A spare has a journal of its own until it has ranks; then it records the job.
    let mut spare = Follower::new(&hurt.logs(hosts));
    spare.poll()?;
    let replaced = spare.entries.iter().any(|entry| entry.attempt_started().is_some());

    let incidents = journal::incidents(&entries);
    print_timeline(&incidents);
    println!();
    println!("Final loss  undisturbed: {:<22} {}", undisturbed.loss_hex, undisturbed.loss);
    println!("              disturbed: {:<22} {}", disturbed.loss_hex, disturbed.loss);
    println!();
    let mut held = true;
    for (what, ok) in checks(&incidents, &undisturbed, &disturbed, last, replaced) {
        println!("  {} {what}", if ok { "[ok]  " } else { "[FAIL]" });
        held &= ok;
    }
    Ok(held)
}

fn print_timeline(incidents: &[Incident]) {
    for (number, incident) in incidents.iter().enumerate() {
        println!();
        println!("Failure {}, times since it was detected:", number + 1);
        let started = incident.detected.or_else(|| incident.verdict.as_ref().map(|(at, _)| *at)).unwrap_or(0);
        let row = |at: u64, what: &str, detail: &str| {
            let seconds = at.saturating_sub(started) as f64 / 1e9;
            println!("  {seconds:>7.2} s  {what:<15} {detail}");
        };
        if let Some((at, headline)) = &incident.verdict {
            row(*at, "cause", headline);
        }
        if let Some((at, why)) = &incident.decision {
            row(*at, "decision", why);
        }
        if let Some(at) = incident.ranks_started {
            row(at, "ranks running", "on all hosts");
        }
        if let Some((at, step)) = incident.first_step {
            row(at, "first step", &format!("step {step} done by every rank"));
        }
    }
}

/// The conditions under which the demo has succeeded.
fn checks(
    incidents: &[Incident],
    undisturbed: &Trained,
    disturbed: &Trained,
    killed: u64,
    replaced: bool,
) -> Vec<(String, bool)> {
    let named = |incident: Option<&Incident>| incident.is_some_and(|of| of.culprit == Some(killed));
    let says_lost = |incident: Option<&Incident>| incident.is_some_and(|of| of.host_lost.is_some());
    vec![
        ("three failures, each with one restart on all hosts".to_owned(), incidents.len() == 3),
        (format!("the first names rank {killed} as its cause"), named(incidents.first())),
        ("the second says that a host was lost".to_owned(), says_lost(incidents.get(1))),
        ("the spare took its place".to_owned(), replaced),
        ("the third says that a host was lost".to_owned(), says_lost(incidents.get(2))),
        (
            format!("resumed from the checkpoint of step {}", disturbed.resumed_from),
            disturbed.resumed_from > 0,
        ),
        ("both runs trained the same steps".to_owned(), disturbed.steps == undisturbed.steps),
        ("the final loss is equal bit for bit".to_owned(), disturbed.loss_hex == undisturbed.loss_hex),
        (
            "every parameter is equal bit for bit".to_owned(),
            disturbed.parameters_sha256 == undisturbed.parameters_sha256,
        ),
    ]
}

/// A fault in the run.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// SIGKILL to a rank.
    Rank(u64),
    /// A host loses power. Its place is free for the spare.
    Host(usize),
    /// SIGKILL to the launcher of a host, which is then restarted: the host comes back.
    Launcher(usize),
}

/// The launchers of a job, and the directories of their files.
struct Cluster {
    folder: PathBuf,
    /// Sockets need short paths.
    runtime: PathBuf,
    /// One for each host, and one more for a spare.
    launchers: Vec<Option<Child>>,
    network: Network,
    hosts: usize,
    steps: u64,
}

impl Cluster {
    fn new(folder: &Path, hosts: usize, steps: u64) -> Result<Cluster> {
        let runtime = std::env::temp_dir().join(format!("mainstay-demo-{}", std::process::id()));
        let launchers = (0..=hosts).map(|_| None).collect();
        let network = Network::new(hosts + 1)?;
        Ok(Cluster { folder: folder.to_path_buf(), runtime, launchers, network, hosts, steps })
    }

    fn logs(&self, host: usize) -> PathBuf {
        self.folder.join(format!("host-{host}/logs"))
    }

    /// The launcher of a host with the training script, as a person would start it there.
    fn start(&mut self, venv: &Venv, host: usize) -> Result<()> {
        let logs = self.logs(host);
        fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
        let log = logs.join("launcher.log");
        let file = File::options().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("creating {}", log.display()))?;
        let second = file.try_clone().with_context(|| format!("opening {} twice", log.display()))?;
        let first = self.network.host(0);
        let endpoint = format!("{}:{}", first.first, first.port);
        let mut command = Command::new(paths::release_mainstay());
        command
            .args(["run", "--no-agent", "--nnodes", &self.hosts.to_string()])
            .args(["--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint, "--rdzv-id", "demo"])
            .args(["--nproc-per-node", "1", "--max-restarts", "3", "--checkpoint-dir"])
            .arg(self.folder.join("checkpoints"))
            .arg("--log-dir")
            .arg(&logs)
            .arg("--runtime-dir")
            .arg(self.runtime.join(host.to_string()))
            .arg(paths::root().join("xtask/demo/train.py"))
            .args(["--steps", &self.steps.to_string()])
            // Steps are seen by polling: without a pause a run could be over before its last fault.
            .args(["--pause", "0.1"])
            .arg("--result")
            .arg(self.folder.join("result.json"));
        activate(&mut command, venv);
        let mut command = self.network.on(host, command);
        command.stdin(Stdio::null()).stdout(file).stderr(second);
        let child = command.spawn().with_context(|| format!("starting the launcher of host {host}"))?;
        self.launchers[host] = Some(child);
        Ok(())
    }

    /// Runs the job to its end, and injects the faults when they are due; the last of `faults` comes first. Returns
    /// the journal of the first host, which has the whole job.
    fn follow(&mut self, venv: &Venv, faults: &mut Vec<(u64, Fault)>) -> Result<Vec<Entry>> {
        for host in 0..self.hosts {
            self.start(venv, host)?;
        }
        let mut journal = Follower::new(&self.logs(0));
        let mut spare = Follower::new(&self.logs(self.hosts));
        if !faults.is_empty() {
            // A launcher that comes earlier could be one of the job's hosts.
            journal.wait_for("start of the ranks", |entry| entry.attempt_started().is_some())?;
            self.start(venv, self.hosts)?;
        }
        let mut line = LiveLine::new(Duration::from_secs(2));
        let (began, mut step, mut struck) = (Instant::now(), 0, 0);
        let mut attempt = journal.entries.iter().rev().find_map(Entry::attempt_started);
        let mut asked = Instant::now();
        loop {
            let mut fresh_step = false;
            let ended = self.ended()?;
            let fresh = journal.poll()?;
            for entry in &journal.entries[fresh..] {
                attempt = entry.attempt_started().or(attempt);
                let progress = entry.progress();
                fresh_step |= progress.is_some();
                step = progress.map_or(step, |(step, _)| step);
            }
            if asked.elapsed() >= ASK {
                asked = Instant::now();
                if let Some(now) = self.step() {
                    (step, fresh_step) = (now, true);
                }
            }
            // In sequence: the ranks must step again after the first fault.
            let stepping =
                attempt.as_ref().is_none_or(|of: &journal::Attempt| of.number == struck) && fresh_step;
            spare.poll()?;
            let ready = spare.entries.iter().rev().find_map(Entry::spare_ready);
            // The spare must be ready for the loss of a host, unless the run is nearly over.
            let may_strike = |fault: &Fault| {
                let nearly_over = step * 10 >= self.steps * 7;
                !matches!(fault, Fault::Host(_)) || nearly_over || ready.is_some_and(|(imports, _)| imports)
            };
            let due = |(at, fault): &mut (u64, Fault)| stepping && step >= *at && may_strike(fault);
            if let Some((_, fault)) = faults.pop_if(due) {
                struck += 1;
                let copy = ready.and_then(|(_, step)| step);
                let copy =
                    copy.map_or(String::new(), |step| format!(" (the spare has a copy of step {step})"));
                let note = if matches!(fault, Fault::Host(_)) { copy } else { String::new() };
                line.keep(&format!("  {}{note} at step {step}", self.strike(fault, attempt.as_ref(), venv)?));
            }
            line.show(&format!("  step {step:>4}/{}", self.steps));
            if ended {
                break;
            }
            if began.elapsed() > LIMIT {
                bail!("the run did not end within {} s; see {}", LIMIT.as_secs(), self.folder.display());
            }
            thread::sleep(LOOK);
        }
        line.close();
        Ok(journal.entries)
    }

    /// The step that all ranks have completed, from the API of the first host; none while some ranks report none.
    fn step(&self) -> Option<u64> {
        let run = fs::read_dir(self.runtime.join("0")).ok()?.flatten().next()?;
        let mut ask = Command::new(paths::release_mainstay());
        ask.args(["status", "--json"]).env("MAINSTAY_SOCKET", run.path().join("api.sock"));
        let answer = command::output(&mut ask).ok()?;
        let ranks = status::ranks(&answer, &self.logs(0).canonicalize().ok()?);
        let all_say = ranks.len() == self.hosts;
        ranks.iter().map(|rank| rank.step).min().flatten().filter(|_| all_say)
    }

    /// Whether all launchers have ended.
    ///
    /// # Errors
    /// One ended badly.
    fn ended(&mut self) -> Result<bool> {
        let mut all = true;
        for (host, launcher) in self.launchers.iter_mut().enumerate() {
            let Some(child) = launcher else { continue };
            match child.try_wait().context("waiting for a launcher")? {
                Some(status) => {
                    let log = self.folder.join(format!("host-{host}/logs/launcher.log"));
                    ensure!(
                        status.success(),
                        "the launcher of host {host} ended with {status}; see {}",
                        log.display()
                    );
                    *launcher = None;
                }
                None => all = false,
            }
        }
        Ok(all)
    }

    fn strike(&mut self, fault: Fault, attempt: Option<&journal::Attempt>, venv: &Venv) -> Result<String> {
        match fault {
            Fault::Rank(rank) => {
                let pid = attempt.and_then(|attempt| attempt.pids.get(&rank));
                let pid = *pid.with_context(|| format!("the journal names no process of rank {rank}"))?;
                kill(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("killing rank {rank}"))?;
                Ok(format!("SIGKILL to rank {rank}"))
            }
            Fault::Host(host) => {
                let launcher = self.launchers[host].take();
                let mut launcher = launcher.with_context(|| format!("host {host} has no launcher"))?;
                let pid = i32::try_from(launcher.id()).context("a process id")?;
                self.network.vanish(host, pid)?;
                launcher.wait().context("waiting for a launcher")?;
                Ok(format!("host {host} vanishes"))
            }
            Fault::Launcher(host) => {
                let launcher = self.launchers[host].take();
                let mut launcher = launcher.with_context(|| format!("host {host} has no launcher"))?;
                launcher.kill().with_context(|| format!("killing the launcher of host {host}"))?;
                launcher.wait().context("waiting for a launcher")?;
                self.start(venv, host)?;
                Ok(format!("SIGKILL to the launcher of host {host}, which is started again"))
            }
        }
    }

    fn trained(&self) -> Result<Trained> {
        let path = self.folder.join("result.json");
        let text = fs::read_to_string(&path)
            .with_context(|| format!("the training script left no {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("parsing {}", path.display()))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for launcher in self.launchers.iter_mut().flatten() {
            // It may have ended in this moment; its guardian ends the ranks.
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
        let _ = fs::remove_dir_all(&self.runtime);
    }
}

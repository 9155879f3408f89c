//! `mainstay demo --hosts 3`: one job over several launchers on this machine, each of which plays a host. A rank is
//! killed, a whole host vanishes and a spare replaces it, a launcher is killed and comes back.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::{Attempt, Pid};
use mainstay_sys::processes::descendants;
use nix::sys::signal::{Signal, kill};

use super::line::LiveLine;
use super::program::Program;
use super::recovery::{Follower, Recovery, progress, started};
use super::run::{kill_rank, runtime_dir, socket};
use super::{Args, LIMIT, POLL_INTERVAL, Trained, equalities, print_checks, print_losses};
use crate::find::SocketAt;
use crate::status;

/// The host that vanishes: not the one that leads, which a job with one endpoint cannot lose.
const LOST_HOST: usize = 1;

/// Trains undisturbed, trains disturbed, compares.
pub(super) async fn run(args: &Args, program: &Program, folder: &Path) -> anyhow::Result<bool> {
    let hosts = usize::from(args.hosts);
    say!("Training undisturbed, for the comparison: {} steps on {hosts} hosts", args.steps);
    let undisturbed = {
        let mut plain = Cluster::new(args, program, &folder.join("undisturbed"))?;
        plain.follow(Vec::new()).await?;
        plain.trained()?
    };
    say!("  final loss {:.6}", undisturbed.loss);

    say!("");
    let (first, second) = (args.steps / 4 + 5, args.steps / 2 + 5);
    let killed = u32::from(args.hosts) - 1;
    // With two hosts it is the one that was the spare.
    let restarted = 2;
    say!("The same again, with one more host that waits as a spare. On the way:");
    say!("  about step {first}: SIGKILL to rank {killed}");
    say!(
        "  about step {second}: host {LOST_HOST} vanishes: all of its processes are killed at once. The spare takes its place"
    );
    say!("  when all ranks step again: SIGKILL to the launcher of host {restarted}, which is started again");
    let mut hurt = Cluster::new(args, program, &folder.join("disturbed"))?;
    // The last one comes first.
    let faults = vec![
        (first, Fault::Launcher(restarted)),
        (second, Fault::Host(LOST_HOST)),
        (first, Fault::Rank(killed)),
    ];
    let entries = hurt.follow(faults).await?;
    let disturbed = hurt.trained()?;
    // A spare has a journal of its own until it has ranks; then it records the job.
    let mut spare = Follower::new(&hurt.logs(hosts));
    spare.poll()?;

    let recoveries = Recovery::all(&entries);
    print_timelines(&recoveries);
    print_losses(&undisturbed, &disturbed);
    let culprit = recoveries.first().and_then(|recovery| recovery.verdict.culprit).map(|rank| rank.0);
    let is_of_a_lost_host = |number: usize| recoveries.get(number).is_some_and(Recovery::is_of_a_lost_host);
    let mut checks = vec![
        ("three failures, each with one restart on all hosts".to_owned(), recoveries.len() == 3),
        (format!("the first names rank {killed} as its cause"), culprit == Some(killed)),
        ("the second says that a host was lost".to_owned(), is_of_a_lost_host(1)),
        ("the spare took its place".to_owned(), spare.attempt().is_some()),
        ("the third says that a host was lost".to_owned(), is_of_a_lost_host(2)),
        (
            format!("resumed from the checkpoint of step {}", disturbed.resumed_from),
            disturbed.resumed_from > 0,
        ),
    ];
    checks.extend(equalities(&undisturbed, &disturbed));
    Ok(print_checks(checks))
}

fn print_timelines(recoveries: &[Recovery]) {
    for (number, of) in recoveries.iter().enumerate() {
        say!("");
        say!("Failure {}, times since it was detected:", number + 1);
        let (fault, detected) = (of.verdict.fault_at, of.verdict.detected_at.0);
        let row = |at: u64, what: &str, detail: &str| {
            say!("  {:>7.2} s  {what:<15} {detail}", at.saturating_sub(detected) as f64 / 1e9);
        };
        row(detected, "cause", &of.verdict.headline);
        row(of.decided_at, "decision", &of.decided());
        row(fault.after(of.outcome.to_ranks_started).0, "ranks running", "on all hosts");
        let step = format!("step {} done by every rank", of.outcome.step);
        row(fault.after(of.outcome.to_first_step).0, "first step", &step);
    }
}

/// A fault in the run.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// SIGKILL to a rank.
    Rank(u32),
    /// A host loses power. Its place is free for the spare.
    Host(usize),
    /// SIGKILL to the launcher of a host, which is then restarted: the host comes back.
    Launcher(usize),
}

/// The launchers of a job, and the directories of their files.
struct Cluster<'a> {
    program: &'a Program,
    folder: PathBuf,
    /// One for each host, and one more for a spare.
    launchers: Vec<Option<Child>>,
    endpoint: String,
    hosts: u8,
    steps: u64,
}

impl Cluster<'_> {
    fn new<'a>(args: &Args, program: &'a Program, folder: &Path) -> anyhow::Result<Cluster<'a>> {
        let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr());
        let endpoint = free.context("looking for a free port")?.to_string();
        let launchers = (0..=args.hosts).map(|_| None).collect();
        let (hosts, steps) = (args.hosts, args.steps);
        Ok(Cluster { program, folder: folder.to_owned(), launchers, endpoint, hosts, steps })
    }

    fn logs(&self, host: usize) -> PathBuf {
        self.folder.join(format!("host-{host}/logs"))
    }

    fn log(&self, host: usize) -> PathBuf {
        self.folder.join(format!("host-{host}/launcher.log"))
    }

    /// The launcher of a host with the training script, as a person would start it there.
    fn start(&mut self, host: usize) -> anyhow::Result<()> {
        let (logs, log) = (self.logs(host), self.log(host));
        std::fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
        let file = File::options().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("creating {}", log.display()))?;
        let second = file.try_clone().with_context(|| format!("opening {} twice", log.display()))?;
        let options = [
            "--no-agent".to_owned(),
            format!("--nnodes={}", self.hosts),
            "--rdzv-backend=c10d".to_owned(),
            format!("--rdzv-endpoint={}", self.endpoint),
            "--rdzv-id=demo".to_owned(),
            "--nproc-per-node=1".to_owned(),
            "--max-restarts=3".to_owned(),
            format!("--checkpoint-dir={}", self.folder.join("checkpoints").display()),
            format!("--log-dir={}", logs.display()),
            format!("--runtime-dir={}", runtime_dir(&host.to_string()).display()),
        ];
        let script = [
            format!("--steps={}", self.steps),
            format!("--pause={}", self.program.pause(self.hosts)),
            format!("--result={}", self.folder.join("result.json").display()),
        ];
        let mut command = self.program.launcher(&options, &script);
        command.stdin(Stdio::null()).stdout(file).stderr(second);
        let child = command.spawn().with_context(|| format!("starting the launcher of host {host}"))?;
        self.launchers[host] = Some(child);
        Ok(())
    }

    /// Runs the job to its end, and injects the faults when they are due; the last of `faults` comes first. Returns
    /// the journal of the first host, which has the whole job.
    async fn follow(&mut self, mut faults: Vec<(u64, Fault)>) -> anyhow::Result<Vec<Entry>> {
        let (mut line, began) = (LiveLine::new(), Instant::now());
        self.start(0)?;
        // All hosts have the endpoint's address here: the one that comes first serves it, and leads.
        while TcpStream::connect(&self.endpoint).is_err() {
            self.ended()?;
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        for host in 1..usize::from(self.hosts) {
            self.start(host)?;
        }
        let mut journal = Follower::new(&self.logs(0));
        let mut spare = Follower::new(&self.logs(usize::from(self.hosts)));
        let (mut step, mut struck) = (0, 0);
        loop {
            let ended = self.ended()?;
            let fresh = journal.poll()?;
            let is_first_start = journal.entries[fresh..].iter().any(|entry| started(entry).is_some());
            if is_first_start && !faults.is_empty() && self.launchers.last().is_some_and(Option::is_none) {
                // A launcher that comes earlier could be one of the job's hosts.
                self.start(usize::from(self.hosts))?;
            }
            let of_journal =
                journal.entries[fresh..].iter().filter_map(progress).next_back().map(|(step, _)| step);
            let newest = self.step().await.or(of_journal);
            step = newest.unwrap_or(step);
            let attempt = journal.attempt();
            // In sequence: the ranks must step again after the fault before.
            let is_stepping =
                newest.is_some() && attempt.as_ref().is_some_and(|(number, _)| *number == Attempt(struck));
            spare.poll()?;
            let ready = spare.entries.iter().rev().find_map(spare_ready);
            // The spare must be ready for the loss of a host, unless the run is nearly over.
            let may_strike = |fault: &Fault| {
                let nearly_over = step * 10 >= self.steps * 7;
                !matches!(fault, Fault::Host(_)) || nearly_over || ready.is_some_and(|(imports, _)| imports)
            };
            let due = |(at, fault): &mut (u64, Fault)| is_stepping && step >= *at && may_strike(fault);
            if let Some((_, fault)) = faults.pop_if(due) {
                struck += 1;
                let copy = ready.and_then(|(_, step)| step).filter(|_| matches!(fault, Fault::Host(_)));
                let copy =
                    copy.map_or(String::new(), |step| format!(" (the spare has a copy of step {step})"));
                line.keep(&format!("  {}{copy} at step {step}", self.strike(fault, attempt.as_ref())?));
            }
            line.show(&format!("  step {step:>4}/{}", self.steps));
            if ended {
                break;
            }
            if began.elapsed() > LIMIT {
                bail!("the run did not end within {} s; see {}", LIMIT.as_secs(), self.folder.display());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        line.close();
        Ok(journal.entries)
    }

    /// The step that all ranks have completed; none while one of them reports none. Each launcher knows the newest step
    /// of its own ranks.
    async fn step(&self) -> Option<u64> {
        let sockets = (0..self.launchers.len()).filter_map(|host| socket(&runtime_dir(&host.to_string())));
        let places = sockets.map(|socket| SocketAt { socket, job: None }).collect();
        let answers = status::ask_all(places).await;
        let jobs = answers.iter().filter_map(|answer| answer.result.as_ref().ok()?.jobs.first());
        let ranks = jobs.flat_map(|job| &job.ranks);
        let steps: BTreeMap<u32, u64> = ranks.filter_map(|rank| Some((rank.rank, rank.step?))).collect();
        steps.values().min().copied().filter(|_| steps.len() == usize::from(self.hosts))
    }

    /// Whether all launchers have ended.
    ///
    /// # Errors
    /// One ended badly.
    fn ended(&mut self) -> anyhow::Result<bool> {
        for host in 0..self.launchers.len() {
            let log = self.log(host);
            let Some(child) = &mut self.launchers[host] else { continue };
            if let Some(status) = child.try_wait().context("waiting for a launcher")? {
                ensure!(
                    status.success(),
                    "the launcher of host {host} ended with {status}; see {}",
                    log.display()
                );
                self.launchers[host] = None;
            }
        }
        Ok(self.launchers.iter().all(Option::is_none))
    }

    fn strike(
        &mut self,
        fault: Fault,
        attempt: Option<&(Attempt, Vec<(mainstay_model::id::Rank, Pid)>)>,
    ) -> anyhow::Result<String> {
        let mut taken = |host: usize| self.launchers[host].take().context("it has no launcher");
        match fault {
            Fault::Rank(rank) => {
                kill_rank(rank, attempt.map_or(&[], |(_, ranks)| ranks))?;
                Ok(format!("SIGKILL to rank {rank}"))
            }
            Fault::Host(host) => {
                let mut launcher = taken(host).with_context(|| format!("host {host}"))?;
                let first = Pid(i32::try_from(launcher.id()).context("a process id")?);
                for pid in std::iter::once(first).chain(descendants(first)) {
                    // It may have ended in this moment.
                    let _ = kill(nix::unistd::Pid::from_raw(pid.0), Signal::SIGKILL);
                }
                launcher.wait().context("waiting for a launcher")?;
                Ok(format!("host {host} vanishes"))
            }
            Fault::Launcher(host) => {
                let mut launcher = taken(host).with_context(|| format!("host {host}"))?;
                launcher.kill().with_context(|| format!("killing the launcher of host {host}"))?;
                launcher.wait().context("waiting for a launcher")?;
                self.start(host)?;
                Ok(format!("SIGKILL to the launcher of host {host}, which is started again"))
            }
        }
    }

    fn trained(&self) -> anyhow::Result<Trained> {
        Trained::read(&self.folder.join("result.json"))
    }
}

/// What a spare has ready: whether the imports of its ranks are done, and the newest step of which it has copies.
fn spare_ready(entry: &Entry) -> Option<(bool, Option<u64>)> {
    let Body::Fact(Fact::Observed(observed)) = &entry.body else { return None };
    let value = |name: &str| observed.values.get(name).map(String::as_str);
    let step = value("step").and_then(|step| step.parse().ok());
    (observed.event == "spare_ready").then(|| (value("imports") == Some("true"), step))
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        for (host, launcher) in self.launchers.iter_mut().enumerate() {
            if let Some(launcher) = launcher {
                // It may have ended in this moment; its guardian ends the ranks.
                let _ = launcher.kill();
                let _ = launcher.wait();
            }
            let _ = std::fs::remove_dir_all(runtime_dir(&host.to_string()));
        }
    }
}

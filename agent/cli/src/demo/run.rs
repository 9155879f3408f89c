//! A run of one host under `mainstay run`, followed through its journal while it trains.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};
use mainstay_model::entry::Entry;
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_progress::goodput::TimeAccounting;
use nix::sys::signal::{Signal, kill};

use super::line::LiveLine;
use super::program::Program;
use super::recovery::{Follower, progress, run_dir, started};
use super::{Args, LIMIT, POLL_INTERVAL};
use crate::find::SocketAt;
use crate::output::Paint;
use crate::{screen, status};

/// Which rank is killed, and when.
#[derive(Clone, Copy)]
pub(super) struct Kill {
    pub(super) rank: u32,
    /// Once all ranks have completed this step.
    pub(super) at_step: u64,
}

/// A started launcher.
pub(super) struct Run {
    launcher: Child,
    folder: PathBuf,
    /// The directory of its sockets, which need short paths.
    runtime: PathBuf,
    journal: Follower,
    steps: u64,
    step: u64,
    loss: Option<f64>,
    /// The file of the script's result.
    pub(super) result: PathBuf,
}

/// The result of following a run to its end.
pub(super) struct Followed {
    /// When the signal was sent, on the journal's clock.
    pub(super) killed_at: u64,
    /// The job's newest step at that time.
    pub(super) killed_at_step: u64,
    /// The whole journal.
    pub(super) entries: Vec<Entry>,
    /// Where the time of the job went.
    pub(super) time: Option<TimeAccounting>,
}

impl Run {
    /// Starts the launcher. What it prints goes to a file, because the terminal shows the progress.
    pub(super) fn start(args: &Args, program: &Program, folder: &Path) -> anyhow::Result<Run> {
        let (logs, result) = (folder.join("logs"), folder.join("result.json"));
        std::fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
        let runtime = runtime_dir("run");
        let options = ["--nproc-per-node=2".into(), "--max-restarts=3".into()];
        let places = [("--log-dir", &logs), ("--runtime-dir", &runtime)];
        let places = places.map(|(option, path)| format!("{option}={}", path.display()));
        let script = [
            format!("--steps={}", args.steps),
            format!("--pause={}", program.pause(1)),
            format!("--result={}", result.display()),
        ];
        let mut command = program.launcher(&[&options[..], &places].concat(), &script);
        if !args.verbose {
            let log = folder.join("launcher.log");
            let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
            let second = file.try_clone().with_context(|| format!("opening {} twice", log.display()))?;
            command.stdout(file).stderr(second);
        }
        let launcher = command.stdin(Stdio::null()).spawn().context("starting the launcher")?;
        let journal = Follower::new(&logs);
        let (folder, steps) = (folder.to_owned(), args.steps);
        Ok(Run { launcher, folder, runtime, journal, steps, step: 0, loss: None, result })
    }

    /// Shows the progress to the end, and kills a rank on the way if asked to.
    pub(super) async fn follow(mut self, planned: Option<Kill>) -> anyhow::Result<Followed> {
        let (mut line, began) = (LiveLine::new(), Instant::now());
        let mut attempt = (Attempt(0), Vec::new());
        let mut killed = None;
        let status = loop {
            // The exit is polled before the journal is read, so that no entry is missed.
            let ended = self.launcher.try_wait().context("waiting for the launcher")?;
            let fresh = self.journal.poll()?;
            let restarts = attempt.0;
            for entry in &self.journal.entries[fresh..] {
                attempt = started(entry).unwrap_or(attempt);
                if let Some((step, loss)) = progress(entry) {
                    (self.step, self.loss) = (step, loss.or(self.loss));
                }
            }
            if ended.is_none() {
                self.ask(attempt.0 > restarts, &mut line).await;
            }
            line.show(&self.shown(attempt.0));
            if let Some(kill) = planned.filter(|kill| killed.is_none() && self.step >= kill.at_step) {
                killed = Some((kill_rank(kill.rank, &attempt.1)?, self.step));
                line.keep(&format!("  SIGKILL to rank {} at step {}", kill.rank, self.step));
            }
            if let Some(status) = ended {
                break status;
            }
            if began.elapsed() > LIMIT {
                bail!("the run did not end within {} s; see {}", LIMIT.as_secs(), self.folder.display());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        };
        line.close();
        if !status.success() {
            bail!("mainstay run ended with {status}; see {}", self.folder.join("launcher.log").display());
        }
        let (killed_at, killed_at_step) = killed.unwrap_or_default();
        let entries = std::mem::take(&mut self.journal.entries);
        Ok(Followed { killed_at, killed_at_step, entries, time: self.time() })
    }

    /// Asks the launcher, as `mainstay status` does for a person, and shows its answer if it has just restarted the
    /// ranks. A run that is just starting or ending does not answer.
    async fn ask(&mut self, show: bool, line: &mut LiveLine) {
        let Some(socket) = socket(&self.runtime) else { return };
        let answers = status::ask_all(vec![SocketAt { socket, job: None }]).await;
        let snapshot = answers.first().and_then(|answer| answer.result.as_ref().ok());
        let Some(job) = snapshot.and_then(|snapshot| snapshot.jobs.first()) else { return };
        // While ranks restart, some have not reported a step yet; the last one remains valid.
        self.step = slowest(&job.ranks).unwrap_or(self.step);
        self.loss = job.ranks.iter().find_map(|rank| rank.loss).or(self.loss);
        if show {
            line.keep("  $ mainstay status");
            for row in screen::render(&answers, Paint::for_stdout(), screen::Shown::default()).lines() {
                line.keep(&format!("  | {row}"));
            }
        }
    }

    fn shown(&self, attempt: Attempt) -> String {
        const BAR_CHARS: u64 = 30;
        let full = (self.step * BAR_CHARS / self.steps).min(BAR_CHARS) as usize;
        let (done, open) = ("#".repeat(full), ".".repeat(BAR_CHARS as usize - full));
        let loss = self.loss.map_or(String::new(), |loss| format!("  loss {loss:.4}"));
        let attempt = if attempt.0 == 0 { String::new() } else { format!("  attempt {}", attempt.0) };
        format!("  [{done}{open}] step {:>4}/{}{loss}{attempt}", self.step, self.steps)
    }

    /// What the launcher's summary says.
    fn time(&self) -> Option<TimeAccounting> {
        let summary =
            std::fs::read_to_string(run_dir(&self.folder.join("logs"))?.join("summary.json")).ok()?;
        let mut summary: serde_json::Value = serde_json::from_str(&summary).ok()?;
        serde_json::from_value(summary["books"].take()).ok()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // It may have ended; else its guardian ends the ranks.
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
        let _ = std::fs::remove_dir_all(&self.runtime);
    }
}

/// A short directory for the sockets of one launcher.
pub(super) fn runtime_dir(launcher: &str) -> PathBuf {
    std::env::temp_dir().join(format!("mainstay-demo-{}-{launcher}", std::process::id()))
}

/// The socket of the one run in this directory.
pub(super) fn socket(runtime: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(runtime).ok()?.flatten();
    entries.map(|run| run.path().join("api.sock")).find(|socket| socket.exists())
}

/// The newest step that all ranks have completed; none while one of them reports none.
fn slowest(ranks: &[mainstay_proto::v1::Rank]) -> Option<u64> {
    let steps: Option<Vec<u64>> = ranks.iter().map(|rank| rank.step).collect();
    steps?.into_iter().min()
}

/// Kills a rank by the process in the journal, and returns when.
pub(super) fn kill_rank(rank: u32, ranks: &[(Rank, Pid)]) -> anyhow::Result<u64> {
    let pid = ranks.iter().find(|(number, _)| number.0 == rank).map(|(_, pid)| pid.0);
    let pid = pid.with_context(|| format!("the journal names no process of rank {rank}"))?;
    let at = mainstay_sys::clock::mono().0;
    kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL)
        .with_context(|| format!("killing rank {rank}, process {pid}"))?;
    Ok(at)
}

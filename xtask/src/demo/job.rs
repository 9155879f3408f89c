//! A run under `mainstay run`, followed through its journal while it trains.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Args, Followed};
use crate::command;
use crate::journal::{self, Attempt, Follower};
use crate::paths;
use crate::progress::LiveLine;
use crate::status;

/// The interval of polling the journal. It only determines how soon its entries are seen.
const LOOK: Duration = Duration::from_millis(40);

/// The interval of asking the health API for the live line.
const ASK: Duration = Duration::from_millis(250);

/// A run of this demo takes seconds; a run that takes this long will not end.
const LIMIT: Duration = Duration::from_secs(300);

/// Which rank is killed, and when.
#[derive(Clone, Copy)]
pub struct Kill {
    /// The rank.
    pub rank: u64,
    /// Once all ranks have completed this step.
    pub at_step: u64,
}

/// A started launcher.
pub struct Job {
    launcher: Child,
    log: PathBuf,
    /// The folder below which the launcher has its run.
    logs: PathBuf,
    journal: Follower,
    steps: u64,
    attempt: Option<Attempt>,
    step: u64,
    loss: Option<f64>,
    ranks: Vec<status::Rank>,
}

impl Job {
    /// Starts the launcher. What it prints goes to a file, because the terminal shows the progress.
    pub fn start(mut command: Command, logs: &Path, args: &Args) -> Result<Self> {
        let log = logs.join("launcher.log");
        if !args.verbose {
            let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
            let second = file.try_clone().with_context(|| format!("opening {} twice", log.display()))?;
            command.stdout(file).stderr(second);
        }
        let launcher = command
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {}", command::words(&command)))?;
        let logs = logs.canonicalize().with_context(|| format!("resolving {}", logs.display()))?;
        Ok(Self {
            launcher,
            log,
            journal: Follower::new(&logs),
            logs,
            steps: args.steps,
            attempt: None,
            step: 0,
            loss: None,
            ranks: Vec::new(),
        })
    }

    /// Shows the progress to the end, and kills a rank on the way if asked to.
    pub fn follow(mut self, mut planned: Option<Kill>) -> Result<Followed> {
        let mut line = LiveLine::new(Duration::from_secs(2));
        let mut followed = Followed { killed_at: None, killed_at_step: 0, entries: Vec::new() };
        let mut api_shown = 0;
        let began = Instant::now();
        let mut asked = Instant::now();
        let status = loop {
            // The exit is polled before the journal is read, so that no entry is missed.
            let ended = self.launcher.try_wait().context("waiting for the launcher")?;
            let fresh = self.take_in_journal()?;
            if let Some(kill) = planned
                && self.step >= kill.at_step
            {
                followed.killed_at_step = self.step;
                followed.killed_at = Some(self.kill_rank(kill.rank)?);
                planned = None;
                line.keep(&format!("  SIGKILL to rank {} at step {}", kill.rank, self.step));
            }
            if ended.is_none() && asked.elapsed() >= ASK {
                self.ask_api();
                line.show(&self.progress_line());
                asked = Instant::now();
            }
            // Ask the API twice: after the decision, and when the ranks step again.
            let seen = &self.journal.entries[fresh..];
            let decided = seen.iter().any(journal::Entry::decides_restart);
            let resumed = followed.killed_at.is_some()
                && self.restarted()
                && seen.iter().any(|e| e.progress().is_some());
            if (decided && api_shown == 0) || (resumed && api_shown == 1) {
                api_shown += 1;
                self.show_api(&mut line);
            }
            if let Some(status) = ended {
                break status;
            }
            if began.elapsed() > LIMIT {
                self.stop()?;
                bail!("the run did not end within {} s; see {}", LIMIT.as_secs(), self.log.display());
            }
            thread::sleep(LOOK);
        };
        line.show(&self.progress_line());
        line.close();
        followed.entries = self.journal.entries;
        if !status.success() {
            let printed = std::fs::read_to_string(&self.log).unwrap_or_default();
            bail!(
                "mainstay run ended with {status}; its log {}:\n{}",
                self.log.display(),
                command::tail(&printed, 30)
            );
        }
        Ok(followed)
    }

    /// Reads new journal entries; they start at the returned position.
    fn take_in_journal(&mut self) -> Result<usize> {
        let fresh = self.journal.poll()?;
        for entry in &self.journal.entries[fresh..] {
            if let Some(attempt) = entry.attempt_started() {
                self.attempt = Some(attempt);
                self.ranks.clear();
            }
            if let Some((step, loss)) = entry.progress() {
                self.step = step;
                self.loss = loss.or(self.loss);
            }
        }
        Ok(fresh)
    }

    fn restarted(&self) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| attempt.number > 0)
    }

    /// Kills a rank by the process id in the journal, and returns when.
    fn kill_rank(&self, rank: u64) -> Result<u64> {
        let attempt = self.attempt.as_ref().context("the journal has steps but no start")?;
        let pid = attempt
            .pids
            .get(&rank)
            .with_context(|| format!("the journal names no process of rank {rank}"))?;
        let at = journal::now();
        kill(Pid::from_raw(*pid), Signal::SIGKILL)
            .with_context(|| format!("killing rank {rank}, process {pid}"))?;
        Ok(at)
    }

    /// Asks over gRPC, as `mainstay status` does for a person. A run that is just starting or ending does not
    /// answer.
    fn ask_api(&mut self) {
        let mut ask = Command::new(paths::release_mainstay());
        let Ok(answer) = command::output(ask.args(["status", "--json"])) else { return };
        let ranks = status::ranks(&answer, &self.logs);
        if ranks.is_empty() {
            return;
        }
        if let Some(slowest) = ranks.iter().map(|rank| rank.step).min().flatten() {
            // While ranks restart, the slowest may not have reported a step yet; the journal's last entry remains
            // valid.
            self.step = slowest;
        }
        self.loss = ranks.iter().find_map(|rank| rank.loss).or(self.loss);
        self.ranks = ranks;
    }

    /// What the person on call would see.
    fn show_api(&self, line: &mut LiveLine) {
        let mut ask = Command::new(paths::release_mainstay());
        if let Ok(answer) = command::output(ask.arg("status")) {
            line.keep("  $ mainstay status");
            for row in answer.lines() {
                line.keep(&format!("  | {row}"));
            }
        }
    }

    fn progress_line(&self) -> String {
        const WIDTH: usize = 30;
        let share = self.step as f64 / self.steps as f64;
        let full = ((share * WIDTH as f64) as usize).min(WIDTH);
        let mut text = format!(
            "  [{}{}] step {:>4}/{}",
            "#".repeat(full),
            ".".repeat(WIDTH - full),
            self.step,
            self.steps
        );
        if let Some(loss) = self.loss {
            text.push_str(&format!("  loss {loss:.4}"));
        }
        for rank in &self.ranks {
            let at = rank.step.map_or_else(|| rank.phase.clone(), |step| step.to_string());
            let section = rank.section.as_deref().map_or_else(String::new, |section| format!(" ({section})"));
            text.push_str(&format!("  rank {}: {at}{section}", rank.rank));
        }
        if let Some(attempt) = self.attempt.as_ref().filter(|attempt| attempt.number > 0) {
            text.push_str(&format!("  attempt {}", attempt.number));
        }
        text
    }

    fn stop(&mut self) -> Result<()> {
        let pid = i32::try_from(self.launcher.id()).context("a process id")?;
        // It may have ended in this moment; then there is nothing to stop.
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        self.launcher.wait().context("waiting for the launcher")?;
        Ok(())
    }
}

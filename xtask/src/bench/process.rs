//! Process data from the kernel, and a started program that ends with its owner.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use super::stop;
use crate::command;

/// A program in a separate process group. When dropped, it is asked to stop, and killed if it does not.
pub struct Running {
    child: Child,
    /// Where its output goes.
    pub log: PathBuf,
}

impl Running {
    /// Starts it with its output in a file.
    pub fn start(mut command: Command, log: &Path) -> Result<Self> {
        ensure!(!stop::is_stopping(), "this bench is stopped");
        let file = File::create(log).with_context(|| format!("creating {}", log.display()))?;
        let second = file.try_clone().with_context(|| format!("opening {} twice", log.display()))?;
        command.stdin(Stdio::null()).stdout(file).stderr(second).process_group(0);
        let child = command.spawn().with_context(|| format!("starting {}", command::words(&command)))?;
        Ok(Self { child, log: log.to_path_buf() })
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        // Linux's process ids fit; the crate's own types disagree about the sign.
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
    }

    /// Its end, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Polls until the expected value is there; an error when the program ends first or time runs out. A poll is
    /// cheap, and its frequency affects no figure: events carry their own times.
    pub fn wait_for<T>(
        &mut self,
        what: &str,
        limit: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Result<T> {
        let began = Instant::now();
        loop {
            if let Some(found) = look() {
                return Ok(found);
            }
            if let Some(status) = self.ended() {
                // Its last output counts too.
                return look()
                    .with_context(|| format!("ended with {status} before {what}\n{}", self.printed()));
            }
            if began.elapsed() > limit {
                bail!("no {what} within {} s\n{}", limit.as_secs(), self.printed());
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// The end of its output.
    pub fn printed(&self) -> String {
        command::tail(&fs::read_to_string(&self.log).unwrap_or_default(), 12)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let group = Pid::from_raw(self.pid());
        if self.ended().is_none() {
            // It may end between the two lines; then there is no process to signal.
            let _ = kill(group, Signal::SIGTERM);
            let began = Instant::now();
            while self.ended().is_none() && began.elapsed() < Duration::from_secs(20) {
                thread::sleep(Duration::from_millis(20));
            }
        }
        let _ = killpg(group, Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

/// All processes below one, itself included.
pub fn family(pid: i32) -> BTreeSet<i32> {
    let mut found = BTreeSet::from([pid]);
    loop {
        let children: Vec<i32> = processes()
            .filter(|(child, parent)| found.contains(parent) && !found.contains(child))
            .map(|(c, _)| c)
            .collect();
        if children.is_empty() {
            return found;
        }
        found.extend(children);
    }
}

/// Every process with its parent.
fn processes() -> impl Iterator<Item = (i32, i32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, stat(pid)?.get(1)?.parse().ok()?))
    })
}

/// `/proc/PID/stat` after the name, which may hold anything: state, parent, …
fn stat(pid: i32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = text.rsplit_once(')')?;
    Some(fields.split_whitespace().map(str::to_string).collect())
}

/// CPU time that a process has used, all its threads together.
pub fn cpu_seconds(pid: i32) -> Option<f64> {
    let fields = stat(pid)?;
    let ticks: f64 = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    // USER_HZ is 100 on every architecture that Linux still builds for GPUs on.
    Some(ticks / 100.0)
}

/// A field of `/proc/PID/smaps_rollup` in MiB: `Rss`, or `Pss` where shared pages count in parts.
pub fn memory_mib(pid: i32, field: &str) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line =
        text.lines().find(|line| line.strip_prefix(field).is_some_and(|rest| rest.starts_with(':')))?;
    Some(line.split_whitespace().nth(1)?.parse::<f64>().ok()? / 1024.0)
}

/// The command line of a process, its words separated by blanks.
pub fn command_line(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

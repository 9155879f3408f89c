//! Process data from the kernel, and a started program that ends with its owner.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fs_err as fs;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use procfs::process::{Process, Stat, all_processes};

use super::stop;
use crate::{command, journal};

/// A program that makes nothing of what is expected for this long has hung: eight ranks that import PyTorch on
/// two cores take minutes, and torchrun considers a host lost after 15 s.
pub const LIMIT: Duration = Duration::from_secs(240);

/// A program in a separate process group. When dropped, it is asked to stop, and killed if it does not.
pub struct Running {
    child: Child,
    pub log: PathBuf,
}

impl Running {
    /// Starts it with its output in a file.
    pub fn start(mut command: Command, log: &Path) -> Result<Self> {
        ensure!(!stop::is_stopping(), "this bench is stopped");
        fs::create_dir_all(log.parent().unwrap_or(log))?;
        let file = fs::File::create(log)?.into_parts().0;
        let second = file.try_clone().context("opening a log twice")?;
        command.stdin(Stdio::null()).stdout(file).stderr(second).process_group(0);
        let child = command.spawn().with_context(|| format!("starting {}", command::words(&command)))?;
        Ok(Self { child, log: log.to_path_buf() })
    }

    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Its end, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Polls until the expected value is there; an error when the program ends first or has hung.
    pub fn wait_for<T>(&mut self, what: &str, look: impl FnMut() -> Option<T>) -> Result<T> {
        self.wait_within(LIMIT, what, look)
    }

    /// The same with a time of its own. A poll is cheap, and its frequency affects no figure: events carry their
    /// own times.
    pub fn wait_within<T>(
        &mut self,
        limit: Duration,
        what: &str,
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

    pub fn wait_for_file(&mut self, path: &Path) -> Result<()> {
        self.wait_for(&path.display().to_string(), || path.exists().then_some(()))
    }

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

/// A free port. On a machine that measures, no other process takes ports at random.
pub fn free_port() -> Result<u16> {
    let free = TcpListener::bind(("127.0.0.1", 0)).context("looking for a free port")?;
    Ok(free.local_addr().context("looking for a free port")?.port())
}

/// Sends a signal, and returns when.
pub fn strike(pid: i32, signal: Signal) -> Result<u64> {
    let at = journal::now();
    kill(Pid::from_raw(pid), signal).with_context(|| format!("sending {signal} to {pid}"))?;
    Ok(at)
}

/// All processes below one, itself included.
pub fn family(pid: i32) -> BTreeSet<i32> {
    let processes = all_processes().into_iter().flatten();
    let all: Vec<Stat> = processes.filter_map(|process| process.ok()?.stat().ok()).collect();
    let mut found = BTreeSet::from([pid]);
    loop {
        let known = found.len();
        found.extend(
            all.iter().filter(|stat| found.contains(&stat.ppid)).map(|stat| stat.pid).collect::<Vec<_>>(),
        );
        if found.len() == known {
            return found;
        }
    }
}

/// Whether a process has ended, though it may not be reaped yet.
pub fn is_over(pid: i32) -> bool {
    stat(pid).is_none_or(|stat| matches!(stat.state, 'Z' | 'X'))
}

/// What the kernel reports of a process.
pub fn stat(pid: i32) -> Option<Stat> {
    Process::new(pid).ok()?.stat().ok()
}

/// CPU time that processes have used, all their threads together.
pub fn cpu_seconds(pids: impl IntoIterator<Item = i32>) -> f64 {
    let ticks: u64 = pids.into_iter().filter_map(stat).map(|stat| stat.utime + stat.stime).sum();
    ticks as f64 / procfs::ticks_per_second() as f64
}

/// The resident memory of a process in MiB, and the same with shared pages counted in parts.
pub fn memory_mib(pid: i32) -> Option<(f64, f64)> {
    let memory = Process::new(pid).ok()?.smaps_rollup().ok()?.memory_map_rollup;
    let of = |field: &str| Some(*memory.iter().next()?.extension.map.get(field)? as f64 / 1024.0 / 1024.0);
    Some((of("Rss")?, of("Pss")?))
}

//! The host itself: CPU, memory, pressure, disks, OOM kills. Reads procfs, sysfs and statvfs into a sample for
//! the judge in the core; judges nothing.
//!
//! A sample costs a dozen small files. It does not walk over processes, and it never waits for a file system
//! that hangs: those are asked on threads of their own (`disks`).

mod cgroup;
mod disks;
mod identity;
mod proc;
mod system;

use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_core::base::id::Pid;
use mainstay_core::base::time::Mono;
use mainstay_core::host::os::HostSample;

pub use disks::{Ask, Probed, ask_statvfs};
pub use identity::{HostIdentity, identify};
pub use system::{SystemPlan, SystemSource};

use disks::DiskProbes;

/// Where the kernel's files are. Others than the defaults are for tests and for agents in containers that have
/// the host's trees mounted elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// Instead of `/proc`.
    pub proc: PathBuf,
    /// Instead of `/sys`.
    pub sys: PathBuf,
    /// Instead of `/etc/fstab`.
    pub fstab: PathBuf,
}

impl Default for Roots {
    fn default() -> Roots {
        Roots { proc: "/proc".into(), sys: "/sys".into(), fstab: "/etc/fstab".into() }
    }
}

/// How long [`HostSource::sample`] waits for file systems, and once more for each that newly hangs. They answer in
/// microseconds from memory; one that has not by then is given until the next sample.
const PATIENCE: Duration = Duration::from_millis(200);

/// Reads the host.
#[derive(Debug)]
pub struct HostSource {
    roots: Roots,
    disks: DiskProbes,
    processes: Vec<Pid>,
}

impl HostSource {
    /// A source that looks at the file systems of `paths`.
    pub fn new(roots: Roots, paths: Vec<PathBuf>) -> HostSource {
        HostSource::asking(roots, paths, Box::new(ask_statvfs))
    }

    /// A source that asks file systems in a way of its own.
    pub fn asking(roots: Roots, paths: Vec<PathBuf>, ask: Box<Ask>) -> HostSource {
        HostSource { roots, disks: DiskProbes::new(paths, ask), processes: Vec::new() }
    }

    /// Looks at the file systems of these paths from now on (as jobs with their checkpoints come and go). A path
    /// that does not exist yet stands for the directory in which it would.
    pub fn watch_paths(&mut self, paths: Vec<PathBuf>) {
        self.disks.watch(paths);
    }

    /// Looks at the memory limits of these processes' control groups from now on, beside our own.
    pub fn watch_processes(&mut self, processes: Vec<Pid>) {
        self.processes = processes;
    }

    /// Reads everything once. Returns within a millisecond, or 200 later for each file system
    /// that stopped answering since the last sample. It reads files: call it where blocking is allowed.
    pub fn sample(&mut self, now: Mono) -> HostSample {
        let Roots { proc, sys, fstab } = &self.roots;
        let memory = proc::memory(proc);
        let host_total = memory.value().map(|memory| memory.total);
        HostSample {
            cpus: proc::cpus(sys),
            load: proc::load(proc),
            cpu_times: proc::cpu_times(proc),
            cpu_pressure: proc::pressure(&proc.join("pressure/cpu")),
            memory_pressure: proc::pressure(&proc.join("pressure/memory")),
            groups: cgroup::groups(proc, sys, &self.processes, host_total),
            oom_kills: proc::oom_kills(proc),
            disks: self.disks.sample(now, &proc.join("self/mountinfo"), fstab, PATIENCE),
            memory,
        }
    }
}

/// How many processes the kernel has killed for lack of memory since it began; none where it does not tell.
pub(super) fn oom_kills(proc: &Path) -> Option<u64> {
    match proc::oom_kills(proc) {
        mainstay_core::host::os::Reading::Value(count) => Some(count),
        _ => None,
    }
}

/// The directory of our own control group of version 2, where memory is counted by that version.
pub(super) fn own_group(proc: &Path, sys: &Path) -> Option<PathBuf> {
    cgroup::unified_group(proc, sys)
}

/// How many processes of this control group and those below it the kernel has killed for lack of memory (`oom_kill` of
/// `memory.events`); none where it does not count.
pub(super) fn oom_kills_of_group(dir: &Path) -> Option<u64> {
    cgroup::kills(dir)
}

/// The paths that every host is asked for: the system, run-time files, shared memory (DataLoader workers and
/// NCCL live there), and what the agent and its user name.
pub fn standard_paths(named: &[&Path]) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = ["/", "/run", "/dev/shm"].into_iter().map(PathBuf::from).collect();
    for path in named {
        if !paths.iter().any(|known| known == path) {
            paths.push(path.to_path_buf());
        }
    }
    paths
}

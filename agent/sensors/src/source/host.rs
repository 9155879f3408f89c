//! The host itself: CPU, memory, pressure, disks, OOM kills. Reads procfs, sysfs and statvfs into a sample, which the core judges.
//!
//! A sample costs a dozen small files. It does not walk over processes, and never waits for a file system that hangs: those
//! are asked on separate threads (`disks`).

mod cgroup;
mod disks;
mod identity;
mod proc;
mod system;

use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_health::host::os::HostSample;
use mainstay_model::id::Pid;
use mainstay_model::time::Mono;

pub use disks::{Ask, Probed, ask_statvfs};
pub use identity::{HostIdentity, identify};
pub use system::{SystemPlan, SystemSource};

use disks::DiskProbes;

/// Where the kernel's files are. Other values than the defaults are for tests, and for agents in containers that have the
/// host's trees mounted elsewhere.
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
/// microseconds from memory. One that has not answered by then has time until the next sample.
const READ_TIMEOUT: Duration = Duration::from_millis(200);

/// Reads the host.
#[derive(Debug)]
pub struct HostSource {
    roots: Roots,
    disks: DiskProbes,
    processes: Vec<Pid>,
}

impl HostSource {
    /// A source that reads the file systems of `paths`.
    pub fn new(roots: Roots, paths: Vec<PathBuf>) -> HostSource {
        HostSource::asking(roots, paths, Box::new(ask_statvfs))
    }

    /// A source with a custom function to ask file systems.
    pub fn asking(roots: Roots, paths: Vec<PathBuf>, ask: Box<Ask>) -> HostSource {
        HostSource { roots, disks: DiskProbes::new(paths, ask), processes: Vec::new() }
    }

    /// Sets the paths whose file systems are read from now on (as jobs with their checkpoints come and go). A path that
    /// does not exist yet represents the nearest existing directory above it.
    pub fn watch_paths(&mut self, paths: Vec<PathBuf>) {
        self.disks.watch(paths);
    }

    /// Sets the processes whose control groups' memory limits are read from now on, in addition to our own.
    pub fn watch_processes(&mut self, processes: Vec<Pid>) {
        self.processes = processes;
    }

    /// Reads everything once. Returns within a millisecond, plus 200 for each file system that stopped answering since the
    /// last sample. It reads files: call it where blocking is allowed.
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
            disks: self.disks.sample(now, &proc.join("self/mountinfo"), fstab, READ_TIMEOUT),
            memory,
        }
    }
}

/// How many processes the kernel has killed for lack of memory since boot; none if it does not report it.
pub(super) fn oom_kills(proc: &Path) -> Option<u64> {
    match proc::oom_kills(proc) {
        mainstay_health::host::os::Reading::Value(count) => Some(count),
        _ => None,
    }
}

/// The directory of our own control group of version 2, if that version counts memory.
pub(super) fn own_group(proc: &Path, sys: &Path) -> Option<PathBuf> {
    cgroup::unified_group(proc, sys)
}

/// The control group that counts the memory of a process; none if that is unknown or the process is gone.
pub fn memory_group_of(pid: Pid) -> Option<String> {
    cgroup::of_process(Path::new("/proc"), pid)
}

/// How many processes of this control group and its descendants the kernel has killed for lack of memory (`oom_kill` of
/// `memory.events`); none if it does not count.
pub(super) fn oom_kills_of_group(dir: &Path) -> Option<u64> {
    cgroup::kills(dir)
}

/// The paths that are checked on every host: the system, run-time files, shared memory (used by DataLoader workers and
/// NCCL), and the paths that the agent and its user name.
pub fn standard_paths(named: &[&Path]) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = ["/", "/run", "/dev/shm"].into_iter().map(PathBuf::from).collect();
    for path in named {
        if !paths.iter().any(|known| known == path) {
            paths.push(path.to_path_buf());
        }
    }
    paths
}

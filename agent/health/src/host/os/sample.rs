//! The readings of the host at one moment. Absent is not zero: a failed reading has a reason.

use mainstay_model::time::Mono;

/// A reading, or why it is missing.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading<T> {
    /// It was read.
    Value(T),
    /// This host does not have it (an older kernel, no control groups). Checks do without it if they can.
    NotAvailable(String),
    /// It should be there and could not be read.
    Failed(String),
}

impl<T> Reading<T> {
    /// The value, if there is one.
    pub fn value(&self) -> Option<&T> {
        match self {
            Reading::Value(value) => Some(value),
            Reading::NotAvailable(_) | Reading::Failed(_) => None,
        }
    }

    /// Why there is no value.
    pub fn why_absent(&self) -> Option<&str> {
        match self {
            Reading::Value(_) => None,
            Reading::NotAvailable(why) | Reading::Failed(why) => Some(why),
        }
    }
}

impl<T> Default for Reading<T> {
    fn default() -> Reading<T> {
        Reading::Failed("it was not read".to_owned())
    }
}

/// The host at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostSample {
    /// CPUs that are online.
    pub cpus: Reading<u32>,
    /// The load average of one minute.
    pub load: Reading<f64>,
    /// How the CPUs' time was used since boot.
    pub cpu_times: Reading<CpuTimes>,
    /// How long tasks wait for a CPU.
    pub cpu_pressure: Reading<Pressure>,
    /// The memory of the whole host.
    pub memory: Reading<Memory>,
    /// How long tasks wait for memory.
    pub memory_pressure: Reading<Pressure>,
    /// The memory of control groups with a limit: our own group and those of jobs.
    pub groups: Vec<MemoryGroup>,
    /// OOM kills since boot.
    pub oom_kills: Reading<u64>,
    /// The monitored file systems.
    pub disks: Vec<Disk>,
}

/// Time of all CPUs since boot, in the kernel's ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTimes {
    /// Total.
    pub total: u64,
    /// Steal: a virtual machine's CPU was ready to run and the hypervisor ran something else.
    pub stolen: u64,
}

/// Pressure stall information: shares of the last ten seconds, in percent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pressure {
    /// Some task waited.
    pub some_avg10: f64,
    /// All tasks waited; the kernel does not report it for the CPUs of the whole host.
    pub full_avg10: f64,
}

/// The host's memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Total.
    pub total: u64,
    /// Available to programs without swapping.
    pub available: u64,
    /// Swap space.
    pub swap_total: u64,
    /// Used swap space.
    pub swap_used: u64,
}

/// A control group with a memory limit.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryGroup {
    /// The file that it was read from.
    pub source: String,
    /// Limit and use, in bytes.
    pub usage: Reading<GroupUsage>,
    /// Memory events in it, if the kernel reports them.
    pub events: Option<GroupEvents>,
}

/// The kernel's counters of a control group since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupEvents {
    /// OOM kills (`oom_kill`).
    pub kills: u64,
    /// How often the group reached its limit and had to reclaim memory (`max`; `memory.failcnt` in version 1).
    pub at_limit: u64,
}

/// Limit and use of a control group's memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupUsage {
    /// The lowest limit on the path to the root.
    pub limit: u64,
    /// Usage without reclaimable page cache.
    pub used: u64,
}

/// A monitored file system.
#[derive(Clone, Debug, PartialEq)]
pub struct Disk {
    /// Its mount point: one entry per mount.
    pub mount: String,
    /// The result of statvfs.
    pub space: Reading<Space>,
    /// Since when a request has not been answered.
    pub silent_since: Option<Mono>,
    /// Whether it is mounted read-only now.
    pub read_only: Reading<bool>,
    /// Whether `/etc/fstab` mounts it writable; `None` if it is not listed.
    pub meant_writable: Option<bool>,
}

/// Space on a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Its size in bytes.
    pub total: u64,
    /// What users other than root can still write, in bytes.
    pub free: u64,
    /// Inodes; 0 if the file system has no fixed number.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
}

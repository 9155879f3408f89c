//! What was read of the host at one moment. Absent is not zero: what could not be read says why.

use crate::base::time::Mono;

/// A reading, or why there is none.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading<T> {
    /// It was read.
    Value(T),
    /// This host does not offer it (an older kernel, no control groups). The others suffice without it, where they can.
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
    /// What the CPUs' time was spent on since boot.
    pub cpu_times: Reading<CpuTimes>,
    /// How long tasks wait for a CPU.
    pub cpu_pressure: Reading<Pressure>,
    /// The memory of the whole host.
    pub memory: Reading<Memory>,
    /// How long tasks wait for memory.
    pub memory_pressure: Reading<Pressure>,
    /// The memory of control groups with a limit: our own and those of jobs.
    pub groups: Vec<MemoryGroup>,
    /// Processes that the kernel killed for lack of memory since boot.
    pub oom_kills: Reading<u64>,
    /// The file systems of interest.
    pub disks: Vec<Disk>,
}

/// Time of all CPUs since boot, in the kernel's ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTimes {
    /// All of it.
    pub total: u64,
    /// In which a virtual machine's CPU was ready to run and the host ran something else.
    pub stolen: u64,
}

/// Pressure stall information: shares of the last ten seconds, in percent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pressure {
    /// In which some task waited.
    pub some_avg10: f64,
    /// In which all tasks waited; the kernel does not tell it for CPUs of the whole host.
    pub full_avg10: f64,
}

/// The host's memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// What programs can have without swapping.
    pub available: u64,
    /// Swap space.
    pub swap_total: u64,
    /// Swap space in use.
    pub swap_used: u64,
}

/// A control group that has a memory limit.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryGroup {
    /// Where it was read.
    pub source: String,
    /// Limit and use, in bytes.
    pub usage: Reading<GroupUsage>,
    /// What happened in it for lack of memory, where the kernel tells.
    pub events: Option<GroupEvents>,
}

/// What the kernel counted of a control group since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupEvents {
    /// Processes that it killed for lack of memory (`oom_kill`).
    pub kills: u64,
    /// How often the group came to its limit and had to give memory back (`max`; `memory.failcnt` in version 1).
    pub at_limit: u64,
}

/// Limit and use of a control group's memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupUsage {
    /// The lowest limit on the way to the root.
    pub limit: u64,
    /// In use, without page cache that can be dropped.
    pub used: u64,
}

/// A file system of interest.
#[derive(Clone, Debug, PartialEq)]
pub struct Disk {
    /// Where it is mounted: one entry per mount.
    pub mount: String,
    /// What statvfs told.
    pub space: Reading<Space>,
    /// When it was asked, if it has not answered since.
    pub silent_since: Option<Mono>,
    /// Whether it is mounted read-only now.
    pub read_only: Reading<bool>,
    /// Whether `/etc/fstab` says that it is to be writable; none if it does not speak of it.
    pub meant_writable: Option<bool>,
}

/// Room on a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Its size in bytes.
    pub total: u64,
    /// What users other than root can still write, in bytes.
    pub free: u64,
    /// Inodes; 0 where the file system has no fixed number of them.
    pub inodes: u64,
    /// Inodes that are free.
    pub inodes_free: u64,
}

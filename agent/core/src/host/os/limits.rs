//! When the host counts as degraded or unhealthy. Defaults are chosen to be silent on a host that trains well:
//! full CPUs and a well filled page cache are what such a host is for.

use crate::base::units::{Bytes, Percent, Period};
use crate::settings;

settings! {
    /// How the host is judged.
    pub struct HostLimits {
        /// Readings in a row that must be beyond a limit before a component gets worse.
        worsen_after: u32 = 3,
        /// Readings in a row that must be well within the limits before a component gets better, or is believed
        /// again after it could not be read.
        recover_after: u32 = 6,
        /// How far within a limit a reading must be to count for getting better, in percent of the limit.
        margin: Percent = Percent(10.0),
    }
    sections {
        /// The component host.cpu.
        cpu: CpuLimits,
        /// The component host.memory.
        memory: MemoryLimits,
        /// The component host.disk.
        disk: DiskLimits,
        /// The component host.oom.
        oom: OomLimits,
    }
}

settings! {
    /// When the CPUs are degraded. They are never unhealthy: a busy host trains, if slowly.
    pub struct CpuLimits {
        /// Load average of one minute, per CPU, from which host.cpu is degraded.
        load_per_cpu: f64 = 8.0,
        /// Share of time in which some task waited for a CPU (pressure some avg10) from which host.cpu is degraded.
        pressure: Percent = Percent(95.0),
        /// Share of the time of a virtual machine's CPUs that its host gave to others from which host.cpu is degraded.
        stolen: Percent = Percent(10.0),
    }
    sections {}
}

settings! {
    /// When memory is degraded or unhealthy.
    pub struct MemoryLimits {
        /// Available memory below which host.memory is degraded, if it is below degraded_bytes too.
        degraded_available: Percent = Percent(5.0),
        /// The same in bytes: on a large host a few percent are plenty.
        degraded_bytes: Bytes = Bytes(4 << 30),
        /// Available memory below which host.memory is unhealthy, if it is below unhealthy_bytes too.
        unhealthy_available: Percent = Percent(1.0),
        /// The same in bytes.
        unhealthy_bytes: Bytes = Bytes(512 << 20),
        /// Share of time in which all tasks waited for memory (pressure full avg10) from which host.memory is degraded.
        degraded_pressure: Percent = Percent(10.0),
        /// The same from which host.memory is unhealthy: the host does little but swap and reclaim.
        unhealthy_pressure: Percent = Percent(40.0),
        /// Share of a control group's memory limit, page cache that can be dropped not counted, from which
        /// host.memory is degraded: the OOM killer of that group is near.
        group_used: Percent = Percent(95.0),
    }
    sections {}
}

settings! {
    /// When file systems are degraded or unhealthy.
    pub struct DiskLimits {
        /// Free space below which host.disk is degraded, if it is below degraded_bytes too.
        degraded_free: Percent = Percent(10.0),
        /// The same in bytes: on a large file system a few percent are plenty.
        degraded_bytes: Bytes = Bytes(20 << 30),
        /// Free space below which host.disk is unhealthy, if it is below unhealthy_bytes too.
        unhealthy_free: Percent = Percent(2.0),
        /// The same in bytes.
        unhealthy_bytes: Bytes = Bytes(1 << 30),
        /// Free inodes below which host.disk is degraded.
        degraded_inodes: Percent = Percent(5.0),
        /// Free inodes below which host.disk is unhealthy.
        unhealthy_inodes: Percent = Percent(1.0),
    }
    sections {}
}

settings! {
    /// How long a kill for lack of memory is held against the host.
    pub struct OomLimits {
        /// How long host.oom stays degraded after the kernel killed a process for lack of memory.
        window: Period = Period::seconds(600),
    }
    sections {}
}

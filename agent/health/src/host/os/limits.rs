//! Limits of the host's states. The defaults report nothing on a host that trains well: busy CPUs and a full page cache
//! are normal for such a host.

use super::system::{
    BootLimits, ClockLimits, MemoryErrorLimits, MountLimits, ProcessLimits, ServiceLimits, SpeedLimits,
    SwitchLimits, TableLimits,
};
use crate::host::cloud::CloudLimits;
use mainstay_model::settings;
use mainstay_model::units::{Bytes, Percent, Period};

/// How far within a limit a reading must be for recovery, in percent of the limit.
pub(super) const MARGIN_PERCENT: f64 = 10.0;

settings! {
    /// Limits of the host's checks, by component.
    pub struct HostLimits {
        /// Readings in a row beyond a limit before a component gets worse.
        #[serde(skip)]
        worsen_after: u32 = 3,
        /// Readings in a row within the limits before a component gets better, or counts again after it could not be
        /// read.
        #[serde(skip)]
        recover_after: u32 = 6,
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
        /// The component host.memory_errors.
        memory_errors: MemoryErrorLimits,
        /// The component host.pcie_switches.
        pcie_switches: SwitchLimits,
        /// The component host.processes.
        processes: ProcessLimits,
        /// The component host.files, and the number of tasks in host.processes.
        files: TableLimits,
        /// The component host.clock.
        clock: ClockLimits,
        /// The component host.boot.
        boot: BootLimits,
        /// The component host.mounts.
        mounts: MountLimits,
        /// The component host.services.
        services: ServiceLimits,
        /// The component host.cpu_speed.
        cpu_speed: SpeedLimits,
        /// The component host.cloud.
        cloud: CloudLimits,
    }
}

settings! {
    /// When the CPUs are degraded. They are never unhealthy: a busy host still trains, if slowly.
    pub struct CpuLimits {
        /// One-minute load average per CPU from which host.cpu is degraded.
        load_per_cpu: f64 = 8.0,
        /// Share of time in which some task waited for a CPU (pressure some avg10) from which host.cpu is degraded.
        pressure: Percent = Percent(95.0),
        /// Share of a virtual machine's CPU time that the hypervisor gave to others (steal) from which host.cpu is
        /// degraded.
        stolen: Percent = Percent(10.0),
    }
    sections {}
}

settings! {
    /// When memory is degraded or unhealthy.
    pub struct MemoryLimits {
        /// Available memory below which host.memory is degraded, if it is also below degraded_bytes.
        degraded_available: Percent = Percent(5.0),
        /// Available memory in bytes below which host.memory is degraded: on a large host a few percent are plenty.
        degraded_bytes: Bytes = Bytes(4 << 30),
        /// Available memory below which host.memory is unhealthy, if it is also below unhealthy_bytes.
        unhealthy_available: Percent = Percent(1.0),
        /// Available memory in bytes below which host.memory is unhealthy.
        unhealthy_bytes: Bytes = Bytes(512 << 20),
        /// Share of time in which all tasks waited for memory (pressure full avg10) from which host.memory is degraded.
        degraded_pressure: Percent = Percent(10.0),
        /// Share of time in which all tasks waited for memory from which host.memory is unhealthy: the host mostly
        /// swaps and reclaims.
        unhealthy_pressure: Percent = Percent(40.0),
        /// Share of a control group's memory limit, without reclaimable page cache, from which host.memory is degraded:
        /// the group's OOM killer is near.
        group_used: Percent = Percent(95.0),
    }
    sections {}
}

settings! {
    /// When file systems are degraded or unhealthy.
    pub struct DiskLimits {
        /// Free space below which host.disk is degraded, if it is also below degraded_bytes.
        degraded_free: Percent = Percent(10.0),
        /// Free space in bytes below which host.disk is degraded: on a large file system a few percent are plenty.
        degraded_bytes: Bytes = Bytes(20 << 30),
        /// Free space below which host.disk is unhealthy, if it is also below unhealthy_bytes.
        unhealthy_free: Percent = Percent(2.0),
        /// Free space in bytes below which host.disk is unhealthy.
        unhealthy_bytes: Bytes = Bytes(1 << 30),
        /// Free inodes below which host.disk is degraded.
        degraded_inodes: Percent = Percent(5.0),
        /// Free inodes below which host.disk is unhealthy.
        unhealthy_inodes: Percent = Percent(1.0),
    }
    sections {}
}

settings! {
    /// How long an OOM kill counts against the host.
    pub struct OomLimits {
        /// How long host.oom stays degraded after the kernel killed a process because of low memory.
        window: Period = Period::seconds(600),
    }
    sections {}
}

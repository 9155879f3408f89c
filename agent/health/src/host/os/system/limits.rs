//! Limits of the operating system's states.

use mainstay_model::settings;
use mainstay_model::time::Span;
use mainstay_model::units::{Percent, Period};

/// Samples in a row in which a management controller sensor must be faulty before host.chassis is degraded.
pub(super) const SENSOR_LOOKS: u32 = 2;

/// Samples in which a process must be stuck.
pub(super) const STUCK_LOOKS: u32 = 3;

/// Zombie processes as a share of all processes from which host.processes is degraded.
pub(super) const ZOMBIE_PERCENT: f64 = 20.0;

/// How long a jump counts against the clock.
pub(super) const JUMP_WINDOW: Span = Span::seconds(600);

/// How long after boot the clock may jump, since it is being set.
pub(super) const BOOT_GRACE: Span = Span::seconds(600);

/// Answers in a row after which a network file system counts again.
pub(super) const MOUNT_ANSWERS: u32 = 2;

/// Samples in a row in which a service must have failed.
pub(super) const FAILED_LOOKS: u32 = 2;

settings! {
    /// When memory modules are faulty.
    pub struct MemoryErrorLimits {
        /// Corrected memory errors on one module within an hour from which host.memory_errors is degraded.
        corrected_errors: u64 = 1000,
    }
    sections {}
}

settings! {
    /// When PCIe switches slow down traffic.
    pub struct SwitchLimits {
        /// Whether host.pcie_switches is degraded if switches route traffic between GPUs and network cards through the
        /// CPU (ACS). Hosts of virtual machines need ACS.
        redirecting_switches: bool = true,
    }
    sections {}
}

settings! {
    /// When processes are stuck or dead.
    pub struct ProcessLimits {
        /// How long a process must be in uninterruptible sleep, without having run at all, before it counts as stuck.
        stuck_after: Period = Period::seconds(120),
        /// Zombie processes from which host.processes is degraded, if they are also a fifth of all processes.
        zombies: u64 = 100,
    }
    sections {}
}

settings! {
    /// When a kernel table is too full.
    pub struct TableLimits {
        /// Share in use from which a component is degraded.
        degraded: Percent = Percent(80.0),
        /// Share in use from which it is unhealthy.
        unhealthy: Percent = Percent(95.0),
    }
    sections {}
}

settings! {
    /// When the clock is wrong.
    pub struct ClockLimits {
        /// How far the wall clock may jump at once.
        jump: Period = Period::seconds(1),
        /// How long a clock that was once synchronized may be unsynchronized before host.clock is degraded.
        unsynchronised_after: Period = Period::seconds(900),
        /// Maximum error of a synchronized clock, by the kernel's estimate.
        max_error: Period = Period::seconds(5),
    }
    sections {}
}

settings! {
    /// When a host reboots too often.
    pub struct BootLimits {
        /// Boots within the window from which host.boot is degraded.
        boots: u64 = 3,
        /// The window of boots.
        window: Period = Period::seconds(3600),
    }
    sections {}
}

settings! {
    /// When a network file system hangs.
    pub struct MountLimits {
        /// How long a network file system may take to answer.
        deadline: Period = Period::seconds(20),
    }
    sections {}
}

settings! {
    /// When CPUs are too slow.
    pub struct SpeedLimits {
        /// Minutes out of the last ten in which a CPU package was throttled for heat from which host.cpu_speed is
        /// degraded.
        hot_minutes: u64 = 6,
        /// Minimum share of its highest frequency that each CPU must be allowed to run at.
        least_share: Percent = Percent(50.0),
        /// The frequency governor that all CPUs must have, such as "performance". Empty: any.
        governor: String = String::new(),
    }
    sections {}
}

settings! {
    /// When a service has failed.
    pub struct ServiceLimits {
        /// Starts by systemd within an hour from which a service counts as failing.
        restarts: u64 = 5,
    }
    sections {}
}

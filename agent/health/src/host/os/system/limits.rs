//! Limits of the operating system's states.

use mainstay_model::settings;
use mainstay_model::units::{Percent, Period};

settings! {
    /// Limits of the operating system checks.
    pub struct SystemLimits {
        /// Corrected memory errors on one module within an hour from which host.memory_errors is degraded.
        corrected_errors: u64 = 1000,
        /// Whether host.pcie_switches is degraded if switches route traffic between GPUs and network cards through the
        /// CPU (ACS). Hosts of virtual machines need ACS.
        redirecting_switches: bool = true,
        /// Samples in a row in which a management controller sensor must be faulty before host.chassis is degraded.
        sensor_looks: u32 = 2,
    }
    sections {
        /// The component host.processes.
        processes: ProcessLimits,
        /// Open files and tasks: the components host.files and host.processes.
        tables: TableLimits,
        /// The component host.clock.
        clock: ClockLimits,
        /// The component host.boot.
        boot: BootLimits,
        /// The component host.mounts.
        mounts: MountLimits,
        /// The component host.services.
        services: ServiceLimits,
        /// The component host.cpu_speed.
        speed: SpeedLimits,
    }
}

settings! {
    /// When processes are stuck or dead.
    pub struct ProcessLimits {
        /// How long a process must be in uninterruptible sleep, without having run at all, before it counts as stuck.
        stuck_after: Period = Period::seconds(120),
        /// Samples in which the process must be stuck.
        stuck_looks: u32 = 3,
        /// Zombie processes from which host.processes is degraded, if they also exceed zombie_share.
        zombies: u64 = 100,
        /// Zombie processes as a share of all processes from which host.processes is degraded.
        zombie_share: Percent = Percent(20.0),
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
        /// How long a jump counts against the clock.
        jump_window: Period = Period::seconds(600),
        /// How long after boot the clock may jump, since it is being set.
        boot_grace: Period = Period::seconds(600),
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
        /// Answers in a row after which the file system counts again.
        recover_after: u32 = 2,
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
        /// Samples in a row in which a service must have failed.
        failed_looks: u32 = 2,
        /// Starts by systemd within an hour from which a service counts as failing.
        restarts: u64 = 5,
    }
    sections {}
}

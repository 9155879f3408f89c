//! The state of the operating system: processes, tables, clocks, network mounts, services, modules, memory errors and
//! throttled CPUs. Reads procfs and sysfs and asks child processes; judges nothing.
//!
//! Expensive readings are rare: processes are scanned at a separate interval, which grows with their number; services,
//! memory and CPUs are read once a minute. Sources that may hang (a network file system, systemd) are asked in a child
//! process, of which there is at most one for each source.

mod chassis;
mod child;
mod hardware;
mod mounts;
mod processes;
mod services;
mod tables;

use std::path::PathBuf;
use std::time::Duration;

use mainstay_health::host::os::{ClockReading, Reading, SystemSample};
use mainstay_model::time::{Mono, Span};

use super::Roots;
use mainstay_sys::clock;

/// What to read, and how.
#[derive(Clone, Debug)]
pub struct SystemPlan {
    /// Where the kernel's files are.
    pub roots: Roots,
    /// This program, which also runs the probes.
    pub program: PathBuf,
    /// The minimum time between two scans of all processes.
    pub scan_every: Duration,
    /// Time between two requests to a network file system.
    pub ask_mounts_every: Duration,
    /// How long such a request may stay unanswered.
    pub mount_deadline: Duration,
    /// Mounts to leave out.
    pub exclude_mounts: Vec<PathBuf>,
    /// Types of network file systems in addition to the built-in list.
    pub file_systems: Vec<String>,
    /// The program that reports on services; none for `systemctl`, if systemd runs.
    pub systemctl: Option<PathBuf>,
    /// The program that asks the management controller; none for `ipmitool`, if the kernel has a controller.
    pub ipmitool: Option<PathBuf>,
    /// Services to watch.
    pub units: Vec<String>,
    /// Kernel modules that must be loaded.
    pub modules: Vec<String>,
}

/// How often slowly changing data is read.
const SLOW_READ_INTERVAL: Span = Span::seconds(60);

/// The clocks are read again if this much time passed between them: another process had the CPU.
const CLOSE: Span = Span::millis(20);

/// Reads the operating system.
#[derive(Debug)]
pub struct SystemSource {
    processes: processes::Processes,
    mounts: mounts::MountProbes,
    services: services::ServiceProbe,
    hardware: hardware::Hardware,
    chassis: chassis::ChassisProbe,
    read_seldom: Option<Mono>,
    /// Constant while the machine runs.
    has_fast_counter: bool,
    plan: SystemPlan,
}

impl SystemSource {
    /// A source that has read nothing yet.
    pub fn new(plan: SystemPlan) -> SystemSource {
        SystemSource {
            processes: processes::Processes::new(plan.scan_every),
            mounts: mounts::MountProbes::new(&plan),
            services: services::ServiceProbe::new(&plan),
            hardware: hardware::Hardware::default(),
            chassis: chassis::ChassisProbe::new(&plan),
            read_seldom: None,
            has_fast_counter: hardware::has_fast_counter(&plan.roots.proc),
            plan,
        }
    }

    /// Reads everything once; expensive data only when it is due. Returns within about a second.
    pub fn sample(&mut self, now: Mono) -> SystemSample {
        let Roots { proc, sys, .. } = &self.plan.roots;
        let seldom = self.read_seldom.is_none_or(|last| now.since(last) >= SLOW_READ_INTERVAL);
        if seldom {
            self.read_seldom = Some(now);
            self.hardware.read(sys);
        }
        let (wall, since_boot) = clocks();
        SystemSample {
            wall,
            since_boot,
            clock: kept(sys, self.has_fast_counter),
            tables: tables::read_tables(proc, sys),
            scan: self.processes.poll(now, proc),
            mounts: self.mounts.poll(now, proc),
            services: self.services.poll(now, seldom, sys),
            sensors: self.chassis.poll(now),
            modules: hardware::modules(proc, sys, &self.plan.modules),
            memory: self.hardware.memory.clone(),
            throttled: self.hardware.throttled(),
            governors: self.hardware.governors.clone(),
            held_low: self.hardware.held_low,
            capped: self.hardware.capped,
            switch_ports: self.hardware.switch_ports.clone(),
        }
    }
}

/// The wall clock and the clock since boot at the same moment; without the latter if no two reads were close enough.
fn clocks() -> (mainstay_model::time::Wall, Option<Mono>) {
    for _ in 0..3 {
        let before = clock::since_boot();
        let wall = clock::now().wall;
        if clock::since_boot().since(before) < CLOSE {
            return (wall, Some(before));
        }
    }
    (clock::now().wall, None)
}

fn kept(sys: &std::path::Path, has_fast: bool) -> Reading<ClockReading> {
    let source = sys.join("devices/system/clocksource/clocksource0/current_clocksource");
    match clock::kept() {
        Ok(kept) => Reading::Value(ClockReading {
            synchronised: kept.synchronised,
            max_error: kept.max_error,
            source: std::fs::read_to_string(source).ok().map(|name| name.trim().to_owned()),
            has_fast,
        }),
        Err(error) => Reading::NotAvailable(format!("adjtimex: {error}")),
    }
}

//! The operating system as it stands: processes, tables, clocks, network mounts, services, modules, memory errors and
//! throttled CPUs. Reads procfs and sysfs and asks child processes; judges nothing.
//!
//! What is dear is done seldom: processes are looked through at a pace of their own, and less often the more there
//! are; services, memory and CPUs once a minute. What may hang (a network file system, systemd) is asked in a child
//! process, of which there is never a second one for the same thing.

mod chassis;
mod child;
mod hardware;
mod mounts;
mod processes;
mod services;
mod tables;

use std::path::PathBuf;
use std::time::Duration;

use mainstay_core::base::time::{Mono, Span};
use mainstay_core::host::os::{ClockReading, Reading, SystemSample};

use super::Roots;
use crate::os::clock;

/// What is read, and how.
#[derive(Clone, Debug)]
pub struct SystemPlan {
    /// Where the kernel's files are.
    pub roots: Roots,
    /// This program, to be started as a probe.
    pub program: PathBuf,
    /// The least time between two looks through all processes.
    pub scan_every: Duration,
    /// Time between two questions to a network file system.
    pub ask_mounts_every: Duration,
    /// How long such a question may stay unanswered.
    pub mount_deadline: Duration,
    /// Mounts that are not asked.
    pub exclude_mounts: Vec<PathBuf>,
    /// Types of network file systems beside those that are known.
    pub file_systems: Vec<String>,
    /// The program that knows services; none where it is `systemctl`, if systemd runs.
    pub systemctl: Option<PathBuf>,
    /// The program that asks the management controller; none where it is `ipmitool`, if the kernel has a controller.
    pub ipmitool: Option<PathBuf>,
    /// Services that matter.
    pub units: Vec<String>,
    /// Kernel modules that must be loaded.
    pub modules: Vec<String>,
}

/// How often what changes seldom is read.
const SELDOM: Span = Span::seconds(60);

/// The clocks are read again when this much passed between them: somebody else had the CPU.
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
    /// It is the same for as long as the machine runs.
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

    /// Reads everything once, what is dear only when it is time. Returns within a second or so.
    pub fn sample(&mut self, now: Mono) -> SystemSample {
        let Roots { proc, sys, .. } = &self.plan.roots;
        let seldom = self.read_seldom.is_none_or(|last| now.since(last) >= SELDOM);
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
            scan: self.processes.look(now, proc),
            mounts: self.mounts.look(now, proc),
            services: self.services.look(now, seldom, sys),
            sensors: self.chassis.look(now),
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

/// The wall clock and the clock since boot in one moment; without the latter where no moment was short enough.
fn clocks() -> (mainstay_core::base::time::Wall, Option<Mono>) {
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

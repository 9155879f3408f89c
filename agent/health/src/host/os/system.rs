//! The judge of the host's operating system: stuck and dead processes, kernel tables, clocks, network mounts, services,
//! modules, reboots, memory errors and throttled CPUs.
//!
//! The states reflect the present, except where the kernel forgets: reboots, and that the clock was once synchronized,
//! are restored from the journal. What a host does not have is not shown.

mod chassis;
mod clock;
mod hardware;
mod limits;
mod mounts;
mod processes;
mod sample;
mod services;

use std::collections::BTreeMap;

pub use limits::{
    BootLimits, ClockLimits, MemoryErrorLimits, MountLimits, ProcessLimits, ServiceLimits, SpeedLimits,
    SwitchLimits, TableLimits,
};
pub use sample::{
    Blocked, Capped, ClockReading, MemoryModule, Modules, MountReading, MountState, ProcessScan, Service,
    Services, SwitchPorts, SystemSample, Tables, Usage,
};

use chassis::ChassisWatch;
use clock::ClockWatch;
use hardware::HardwareWatch;
use mounts::MountWatch;
use processes::ProcessWatch;
use services::ServiceWatch;

use super::findings::Findings;
use super::limits::MARGIN_PERCENT;
use super::{Checks, HostLimits, Recall, show};
use crate::state::{Hysteresis, ReportedState};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::id::BootId;
use mainstay_model::observation::Observation;
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Span, Stamp, Wall};

const BOOT: &str = "host.boot";
const BOOTED: &str = "boot";

/// Judges the operating system from successive samples.
#[derive(Clone, Debug)]
pub struct SystemJudge {
    limits: HostLimits,
    patience: Hysteresis,
    margin: f64,
    recall: Recall,
    shown: BTreeMap<String, ReportedState>,
    boots: Vec<Wall>,
    /// This boot is not in the journal yet.
    new_boot: bool,
    processes: ProcessWatch,
    clock: ClockWatch,
    mounts: MountWatch,
    services: ServiceWatch,
    hardware: HardwareWatch,
    chassis: ChassisWatch,
}

impl SystemJudge {
    /// A judge without any sample yet. Changes need as many readings as those of the host.
    pub fn new(limits: HostLimits) -> SystemJudge {
        SystemJudge {
            patience: Hysteresis { worsen_after: limits.worsen_after, recover_after: limits.recover_after },
            margin: MARGIN_PERCENT / 100.0,
            limits,
            recall: Recall::default(),
            shown: BTreeMap::new(),
            boots: Vec::new(),
            new_boot: false,
            processes: ProcessWatch::default(),
            clock: ClockWatch::default(),
            mounts: MountWatch::default(),
            services: ServiceWatch::default(),
            hardware: HardwareWatch::default(),
            chassis: ChassisWatch::default(),
        }
    }

    /// Restores observations from before this start. `boot` is the current boot, `now` the current time.
    pub fn recall(&mut self, now: Stamp, boot: &BootId, observed: &[(Stamp, BootId, Observation)]) {
        let boots: BTreeMap<&BootId, Wall> = observed
            .iter()
            .filter(|(.., observation)| observation.component == BOOT && observation.event == BOOTED)
            .map(|(at, boot, _)| (boot, booted_at(*at)))
            .collect();
        self.new_boot = !boots.contains_key(boot);
        self.boots = boots.into_values().collect();
        if self.new_boot {
            self.boots.push(booted_at(now));
        }
        self.clock.recall(observed);
    }

    /// Judges the sample taken at `at`.
    pub fn step(&mut self, at: Mono, sample: &SystemSample) -> SensorReport {
        let mut facts = Vec::new();
        if std::mem::take(&mut self.new_boot) {
            facts.push(Observation {
                component: BOOT.to_owned(),
                event: BOOTED.to_owned(),
                detail: format!("the host booted {} ago", lasting(Span(at.0))),
                ..Observation::default()
            });
        }
        let mut found: Vec<(&str, Findings)> = Vec::new();
        let mut checks = Checks { recall: &mut self.recall, patience: self.patience, margin: self.margin };
        let (processes, tables) = (&self.limits.processes, &self.limits.files);
        found.push(("host.processes", self.processes.judge(processes, tables, at, sample, &mut checks)));
        found.push(("host.files", judge_files(&self.limits.files, &sample.tables, &mut checks)));
        found.push(("host.clock", self.clock.judge(&self.limits.clock, at, sample, &mut facts)));
        found.push((BOOT, judge_boots(&self.limits.boot, at, sample.wall, &self.boots)));
        found.extend(self.mounts.judge(&self.limits.mounts, at, sample).map(|it| ("host.mounts", it)));
        found.extend(self.services.judge(&self.limits.services, at, sample).map(|it| ("host.services", it)));
        found.extend(hardware::judge_modules(sample).map(|it| ("host.modules", it)));
        let errors = self.hardware.judge_memory(self.limits.memory_errors.corrected_errors, at, sample);
        found.extend(errors.map(|it| ("host.memory_errors", it)));
        let speed = self.hardware.judge_speed(&self.limits.cpu_speed, at, sample);
        found.extend(speed.map(|it| ("host.cpu_speed", it)));
        let switches = hardware::judge_switches(self.limits.pcie_switches.redirecting_switches, sample);
        found.extend(switches.map(|it| ("host.pcie_switches", it)));
        found.extend(self.chassis.judge(sample).map(|it| ("host.chassis", it)));
        let shown = &mut self.shown;
        let components: Vec<Component> =
            found.into_iter().map(|(name, findings)| show(shown, name, at, findings)).collect();
        self.shown.retain(|name, _| components.iter().any(|component| component.name == *name));
        SensorReport { components, facts: facts.into_iter().map(Fact::Observed).collect() }
    }
}

fn judge_files(limits: &TableLimits, tables: &Tables, checks: &mut Checks<'_>) -> Findings {
    let mut findings = Findings::default();
    if let Some(files) = checks.needed("the number of open files", &tables.files, &mut findings) {
        judge_table(limits, "open files", "/proc/sys/fs/file-nr", *files, checks, &mut findings);
    }
    findings
}

/// Judges a kernel table: once it is full, new entries fail for all processes.
fn judge_table(
    limits: &TableLimits,
    what: &str,
    source: &str,
    usage: Usage,
    checks: &mut Checks<'_>,
    findings: &mut Findings,
) {
    let Usage { used, limit } = usage;
    let share = super::percent_of(used, limit);
    let (degraded, unhealthy) = (limits.degraded.0, limits.unhealthy.0);
    findings.summary(format!("{used} {what}"));
    findings.evidence(source, format!("{used} of {limit} {what}"), Some(format!("{degraded} %")));
    let state = checks.above(what, share, degraded, unhealthy);
    findings.problem(
        state,
        format!("{used} of {limit} {what} are in use (limit {degraded} %)"),
        RecommendedAction::RestartProcess,
    );
}

/// When the host booted, from a time on both clocks.
fn booted_at(at: Stamp) -> Wall {
    Wall(at.wall.0.saturating_sub(i64::try_from(at.mono.0).unwrap_or(i64::MAX)))
}

/// Judges how often the host reboots.
fn judge_boots(limits: &BootLimits, at: Mono, now: Wall, boots: &[Wall]) -> Findings {
    let mut findings = Findings::default();
    let window = i64::try_from(limits.window.0.0).unwrap_or(i64::MAX);
    let lately = boots.iter().filter(|boot| now.0.saturating_sub(boot.0) < window).count();
    let up = Span(at.0);
    findings.summary(format!("up for {}", lasting(up)));
    findings.evidence(
        "the journal",
        format!("{lately} boots within {}", limits.window),
        Some(limits.boots.to_string()),
    );
    if lately as u64 >= limits.boots {
        findings.problem(
            HealthState::Degraded,
            format!("it booted {lately} times within {}, the last time {} ago", limits.window, lasting(up)),
            RecommendedAction::ContactSupport,
        );
    }
    findings
}

/// A span in its largest unit.
fn lasting(span: Span) -> String {
    match span.0 / 1_000_000_000 {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

//! The judge of the host itself: CPU, memory, file systems, OOM kills. It turns readings and times into components.
//!
//! - What cannot be read is unknown, never healthy, and counts again only after several readings.
//! - Limits need several readings in a row in both directions, with a margin between worsening and recovering.
//! - What the kernel reports explicitly (a read-only file system, an OOM kill) counts at once.

mod disk;
mod findings;
mod groups;
mod latch;
mod limits;
mod sample;
mod system;

use std::collections::{BTreeMap, BTreeSet};

use limits::MARGIN_PERCENT;
pub use limits::{CpuLimits, DiskLimits, HostLimits, MemoryLimits, OomLimits};
pub use sample::{
    CpuTimes, Disk, GroupEvents, GroupUsage, HostSample, Memory, MemoryGroup, Pressure, Reading, Space,
};
pub use system::{
    Blocked, BootLimits, Capped, ClockLimits, ClockReading, MemoryErrorLimits, MemoryModule, Modules,
    MountLimits, MountReading, MountState, ProcessLimits, ProcessScan, Service, ServiceLimits, Services,
    SpeedLimits, SwitchLimits, SwitchPorts, SystemJudge, SystemSample, TableLimits, Tables, Usage,
};

use findings::Findings;
use groups::GroupWatch;
use latch::{Latch, Level, Presence};

use crate::state::{Hysteresis, ReportedState};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthChange, HealthState, RecommendedAction};
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Span};
use mainstay_model::units::Bytes;

/// The components of this judge.
pub const COMPONENTS: [&str; 4] = ["host.cpu", "host.memory", "host.disk", "host.oom"];

/// Judges a host from successive samples.
#[derive(Clone, Debug)]
pub struct HostJudge {
    limits: HostLimits,
    memory: Recall,
    cpu_times: Option<CpuTimes>,
    shown: BTreeMap<String, ReportedState>,
    oom: OomWatch,
    groups: GroupWatch,
}

/// State kept from sample to sample, by the name of a check.
#[derive(Clone, Debug, Default)]
struct Recall {
    latches: BTreeMap<String, Latch>,
    presences: BTreeMap<String, Presence>,
    /// Mounts that were seen writable.
    writable: BTreeSet<String>,
}

impl Recall {
    /// Drops the state of control groups that no longer exist: groups appear and disappear with jobs.
    fn forget_groups(&mut self, groups: &[MemoryGroup]) {
        let prefix = memory_of("");
        let gone = |name: &str| {
            name.strip_prefix(&prefix).is_some_and(|source| groups.iter().all(|group| group.source != source))
        };
        self.latches.retain(|name, _| !gone(name));
        self.presences.retain(|name, _| !gone(name));
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct OomWatch {
    count: Option<u64>,
    last: Option<(Mono, u64)>,
}

/// The changes between two sets of components: new ones and those in another state.
pub fn changes(before: &BTreeMap<String, Component>, now: &[Component]) -> Vec<HealthChange> {
    now.iter()
        .filter_map(|component| {
            let from = before.get(&component.name).map(|before| before.state);
            (from != Some(component.state)).then(|| HealthChange { from, component: component.clone() })
        })
        .collect()
}

impl HostJudge {
    /// A judge without any sample yet.
    pub fn new(limits: HostLimits) -> HostJudge {
        HostJudge {
            limits,
            memory: Recall::default(),
            cpu_times: None,
            shown: BTreeMap::new(),
            oom: OomWatch::default(),
            groups: GroupWatch::default(),
        }
    }

    /// Judges the sample taken at `at`.
    pub fn step(&mut self, at: Mono, sample: &HostSample) -> SensorReport {
        let patience =
            Hysteresis { worsen_after: self.limits.worsen_after, recover_after: self.limits.recover_after };
        let margin = MARGIN_PERCENT / 100.0;
        let mut checks = Checks { recall: &mut self.memory, patience, margin };
        let mut cpu = judge_cpu(&self.limits.cpu, sample, &mut checks);
        judge_stolen(&self.limits.cpu, sample, &mut self.cpu_times, &mut checks, &mut cpu);
        let memory = judge_memory(&self.limits.memory, sample, &mut checks);
        let disk = disk::judge(&self.limits.disk, at, &sample.disks, &mut checks);
        let mut facts = Vec::new();
        let oom = judge_oom(&self.limits.oom, at, sample, &mut self.oom, &mut checks, &mut facts);
        self.memory.forget_groups(&sample.groups);
        facts.extend(self.groups.step(at, &sample.groups, self.limits.oom.window.0));
        let findings = [cpu, memory, disk, oom];
        let components = COMPONENTS
            .into_iter()
            .zip(findings)
            .map(|(name, found)| show(&mut self.shown, name, at, found))
            .collect();
        SensorReport { components, facts }
    }
}

/// Combines findings into a component, given its last reported state.
fn show(shown: &mut BTreeMap<String, ReportedState>, name: &str, at: Mono, findings: Findings) -> Component {
    let state = findings.state();
    let shown = shown.entry(name.to_owned()).or_default();
    let since = shown.since(state, at);
    let read_at = shown.read_at(findings.complete(), at);
    Component {
        name: name.to_owned(),
        state,
        reason: findings.reason(),
        action: findings.action(),
        evidence: findings.into_evidence(),
        read_at,
        since,
        ..Component::default()
    }
}

/// The result of a check.
#[derive(Clone, Copy, Debug)]
struct Checked {
    state: HealthState,
    /// The reading is already better than the state.
    recovering: bool,
}

/// What the kernel reports explicitly needs no second reading.
impl From<HealthState> for Checked {
    fn from(state: HealthState) -> Checked {
        Checked { state, recovering: false }
    }
}

/// The checks of one sample, with the state from earlier samples.
struct Checks<'a> {
    recall: &'a mut Recall,
    patience: Hysteresis,
    margin: f64,
}

impl Checks<'_> {
    /// Checks a value that is bad at or above a limit.
    fn above(&mut self, name: &str, value: f64, degraded: f64, unhealthy: f64) -> Checked {
        let eased = 1.0 - self.margin;
        self.latch(
            name,
            Level {
                raw: level_of(value >= degraded, value >= unhealthy),
                eased: level_of(value >= degraded * eased, value >= unhealthy * eased),
            },
        )
    }

    /// Checks a value that is bad below a limit.
    fn below(&mut self, name: &str, value: f64, degraded: f64, unhealthy: f64) -> Checked {
        let eased = 1.0 + self.margin;
        self.latch(
            name,
            Level {
                raw: level_of(value < degraded, value < unhealthy),
                eased: level_of(value < degraded * eased, value < unhealthy * eased),
            },
        )
    }

    fn latch(&mut self, name: &str, level: Level) -> Checked {
        let state = self.recall.latches.entry(name.to_owned()).or_default().step(level, self.patience);
        Checked { state, recovering: level.raw < state }
    }

    /// The value of a required reading. If it is missing, or was missing until recently, the finding is unknown.
    fn needed<'r, T>(
        &mut self,
        what: &str,
        reading: &'r Reading<T>,
        findings: &mut Findings,
    ) -> Option<&'r T> {
        let presence = self.recall.presences.entry(what.to_owned()).or_default();
        let to_go = presence.step(reading.value().is_some(), self.patience);
        match reading {
            Reading::Value(_) if to_go > 0 => {
                findings.unknown(format!("{what} can be read again; {to_go} more readings until it counts"));
            }
            Reading::Value(_) => {}
            Reading::NotAvailable(why) | Reading::Failed(why) => {
                findings.unreadable(format!("{what} cannot be read: {why}"));
            }
        }
        reading.value()
    }

    /// The value of an optional reading: if the host does not have it, the other readings decide. A failure is still
    /// unknown.
    fn offered<'r, T>(
        &mut self,
        what: &str,
        reading: &'r Reading<T>,
        findings: &mut Findings,
    ) -> Option<&'r T> {
        match reading {
            Reading::NotAvailable(why) => {
                findings.note(format!("judged without {what}: {why}"));
                None
            }
            Reading::Value(_) | Reading::Failed(_) => self.needed(what, reading, findings),
        }
    }
}

fn level_of(degraded: bool, unhealthy: bool) -> HealthState {
    match (degraded, unhealthy) {
        (_, true) => HealthState::Unhealthy,
        (true, false) => HealthState::Degraded,
        (false, false) => HealthState::Healthy,
    }
}

fn judge_cpu(limits: &CpuLimits, sample: &HostSample, checks: &mut Checks<'_>) -> Findings {
    let mut findings = Findings::default();
    let cpus = checks.needed("the number of CPUs", &sample.cpus, &mut findings);
    let load = checks.needed("the load average", &sample.load, &mut findings);
    if let (Some(cpus), Some(load)) = (cpus, load) {
        let limit = limits.load_per_cpu * f64::from(*cpus);
        findings.summary(format!("load {load:.1} on {cpus} CPUs"));
        findings.evidence(
            "/proc/loadavg",
            format!("load1={load:.2} on {cpus} CPUs"),
            Some(format!("{limit:.0}")),
        );
        let state = checks.above("cpu.load", *load, limit, f64::INFINITY);
        findings.problem(
            state,
            format!("the load of {load:.1} is high for {cpus} CPUs (limit {limit:.0})"),
            RecommendedAction::None,
        );
    }
    if let Some(pressure) = checks.offered("CPU pressure", &sample.cpu_pressure, &mut findings) {
        let limit = limits.pressure.0;
        let reading =
            format!("some avg10={:.1} % full avg10={:.1} %", pressure.some_avg10, pressure.full_avg10);
        findings.evidence("/proc/pressure/cpu", reading, Some(format!("some {limit} %")));
        let state = checks.above("cpu.pressure", pressure.some_avg10, limit, f64::INFINITY);
        findings.problem(
            state,
            format!("tasks waited for a CPU {:.0} % of the time (limit {limit} %)", pressure.some_avg10),
            RecommendedAction::None,
        );
    }
    findings
}

/// Steal time: the hypervisor gives this machine's CPUs to others. No process of ours causes it, and none can fix it.
fn judge_stolen(
    limits: &CpuLimits,
    sample: &HostSample,
    last: &mut Option<CpuTimes>,
    checks: &mut Checks<'_>,
    findings: &mut Findings,
) {
    let now = sample.cpu_times.value().copied();
    let before = std::mem::replace(last, now);
    let (Some(now), Some(before)) = (now, before) else { return };
    let passed = now.total.saturating_sub(before.total);
    if passed == 0 {
        return;
    }
    let share = percent_of(now.stolen.saturating_sub(before.stolen), passed);
    let limit = limits.stolen.0;
    if share > 0.0 {
        findings.evidence("/proc/stat", format!("stolen {share:.1} %"), Some(format!("{limit} %")));
    }
    let state = checks.above("cpu.stolen", share, limit, f64::INFINITY);
    findings.problem(
        state,
        format!(
            "{share:.0} % of the CPUs' time went to other virtual machines of this host (limit {limit} %)"
        ),
        RecommendedAction::ContactSupport,
    );
}

fn judge_memory(limits: &MemoryLimits, sample: &HostSample, checks: &mut Checks<'_>) -> Findings {
    let mut findings = Findings::default();
    if let Some(memory) = checks.needed("the memory in use", &sample.memory, &mut findings) {
        judge_available(limits, memory, checks, &mut findings);
    }
    if let Some(pressure) = checks.offered("memory pressure", &sample.memory_pressure, &mut findings) {
        let (degraded, unhealthy) = (limits.degraded_pressure.0, limits.unhealthy_pressure.0);
        let reading =
            format!("some avg10={:.1} % full avg10={:.1} %", pressure.some_avg10, pressure.full_avg10);
        findings.evidence("/proc/pressure/memory", reading, Some(format!("full {degraded} %")));
        let state = checks.above("memory.pressure", pressure.full_avg10, degraded, unhealthy);
        findings.problem(
            state,
            format!(
                "everything waited for memory {:.0} % of the time (limit {degraded} %)",
                pressure.full_avg10
            ),
            RecommendedAction::RestartProcess,
        );
    }
    for group in &sample.groups {
        let what = memory_of(&group.source);
        let Some(usage) = checks.offered(&what, &group.usage, &mut findings) else { continue };
        let share = percent_of(usage.used, usage.limit);
        let (used, limit) = (Bytes(usage.used).rounded(), Bytes(usage.limit).rounded());
        findings.evidence(
            &group.source,
            format!("{used} of {limit} in use"),
            Some(format!("{} %", limits.group_used.0)),
        );
        let state = checks.above(&what, share, limits.group_used.0, f64::INFINITY);
        findings.problem(
            state,
            format!("the control group {} uses {used} of its limit of {limit}", group.source),
            RecommendedAction::RestartProcess,
        );
    }
    findings
}

fn memory_of(group: &str) -> String {
    format!("the memory of the control group {group}")
}

fn judge_available(limits: &MemoryLimits, memory: &Memory, checks: &mut Checks<'_>, findings: &mut Findings) {
    let degraded = lower_of(memory.total, limits.degraded_available.0, limits.degraded_bytes);
    let unhealthy = lower_of(memory.total, limits.unhealthy_available.0, limits.unhealthy_bytes);
    let (available, total) = (Bytes(memory.available).rounded(), Bytes(memory.total).rounded());
    findings.summary(format!("{available} of {total} available"));
    findings.evidence(
        "/proc/meminfo",
        format!(
            "{available} of {total} available, {} of {} swap in use",
            Bytes(memory.swap_used).rounded(),
            Bytes(memory.swap_total).rounded()
        ),
        Some(Bytes(degraded as u64).rounded()),
    );
    let state = checks.below("memory.available", memory.available as f64, degraded, unhealthy);
    findings.problem(
        state,
        format!(
            "only {available} of {total} memory are available (limit {})",
            Bytes(degraded as u64).rounded()
        ),
        RecommendedAction::RestartProcess,
    );
}

fn judge_oom(
    limits: &OomLimits,
    at: Mono,
    sample: &HostSample,
    watch: &mut OomWatch,
    checks: &mut Checks<'_>,
    facts: &mut Vec<Fact>,
) -> Findings {
    let mut findings = Findings::default();
    if let Some(count) = checks.needed("the count of OOM kills", &sample.oom_kills, &mut findings).copied() {
        let new = watch.count.map_or(0, |before| count.saturating_sub(before));
        watch.count = Some(count);
        if new > 0 {
            watch.last = Some((at, new));
            facts.push(Fact::OutOfMemoryKills { count: new });
        }
        findings.summary("no kill for lack of memory lately".to_owned());
        findings.evidence("/proc/vmstat", format!("oom_kill={count}"), None);
    }
    let lately = watch.last.filter(|(last, _)| at.since(*last) < limits.window.0);
    if let Some((last, killed)) = lately {
        let (processes, ago) = (if killed == 1 { "process" } else { "processes" }, ago(at.since(last)));
        findings.problem(
            HealthState::Degraded,
            format!("the kernel killed {killed} {processes} for lack of memory {ago}"),
            RecommendedAction::RestartProcess,
        );
    }
    findings
}

/// The lower of a share of `total` and a number of bytes, so that the limit fits hosts of any size.
fn lower_of(total: u64, percent: f64, bytes: Bytes) -> f64 {
    (total as f64 * percent / 100.0).min(bytes.0 as f64)
}

/// `part` as a percentage of `whole`; 100 if `whole` is 0.
fn percent_of(part: u64, whole: u64) -> f64 {
    if whole == 0 { 100.0 } else { part as f64 / whole as f64 * 100.0 }
}

fn ago(span: Span) -> String {
    match span.0 / 1_000_000_000 {
        0..5 => "just now".to_owned(),
        seconds @ 5..120 => format!("{seconds} s ago"),
        seconds => format!("{} min ago", seconds / 60),
    }
}

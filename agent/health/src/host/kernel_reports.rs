//! The judge of the kernel's reports about the host. `host.kernel_log` shows whether the log can be read;
//! `host.storage`, `host.hardware` and so on appear once the kernel has reported something about them.

use std::collections::{BTreeMap, VecDeque};

use crate::hardware::catalog::{Catalog, KernelMeaning};
use crate::parse::host::is_virtual_disk;
use mainstay_model::entry::Fact;
use mainstay_model::fault_code::FaultCode;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::kernel::{KernelClass, KernelReport};
use mainstay_model::time::Mono;

/// The component of the log.
pub const LOG: &str = "host.kernel_log";

/// Maximum number of remembered reports per class, with their times; older ones are dropped.
const MAX_REMEMBERED_REPORTS: usize = 256;

/// Maximum number of remembered devices per class.
const SUBJECTS: usize = 64;

/// Maximum number of devices that a reason names, with a log line each.
const MAX_NAMED_DEVICES: usize = 3;

/// Whether the log can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogState {
    /// It is being read.
    Reading,
    /// Another log is read instead: which, and why.
    ReadingInstead(String),
    /// It cannot be read: why, and how to fix it.
    Unreadable(String),
    /// There is none here, as in most containers: there is no component of it, and nothing is known from it.
    Absent(String),
}

impl LogState {
    /// Whether a log is read.
    pub fn is_read(&self) -> bool {
        matches!(self, LogState::Reading | LogState::ReadingInstead(_))
    }
}

/// Judges the host by its kernel log.
#[derive(Clone, Debug)]
pub struct HostLogJudge {
    catalog: Catalog,
    path: String,
    state: Option<LogState>,
    read_at: Option<Mono>,
    gaps: u64,
    classes: BTreeMap<KernelClass, BTreeMap<Option<String>, Reports>>,
    shown: BTreeMap<String, (HealthState, Mono)>,
}

/// The reports about one device in one class.
#[derive(Clone, Debug, Default)]
struct Reports {
    /// Times and counts.
    times: VecDeque<(Mono, u64)>,
    line: String,
}

impl HostLogJudge {
    /// A judge of the log at `path`, before any line.
    pub fn new(catalog: Catalog, path: &str) -> HostLogJudge {
        HostLogJudge {
            catalog,
            path: path.to_owned(),
            state: None,
            read_at: None,
            gaps: 0,
            classes: BTreeMap::new(),
            shown: BTreeMap::new(),
        }
    }

    /// Notes at `at` whether the log could be read.
    pub fn log_is(&mut self, at: Mono, state: LogState) {
        if state.is_read() {
            self.read_at = Some(at);
        }
        self.state = Some(state);
    }

    /// Processes a fact from the kernel log at `at`; facts of other kinds are ignored.
    pub fn take_in(&mut self, at: Mono, fact: &Fact) {
        match fact {
            Fact::KernelReport(report) => self.record_report(at, report),
            Fact::KernelLinesLeftOut { of, count } => {
                let class = KernelClass::ALL.iter().find(|class| class.name() == of);
                let subjects = class.and_then(|class| self.classes.get_mut(class));
                // Their device is unknown; the one that was reported last is the most likely.
                let newest =
                    subjects.and_then(|subjects| subjects.values_mut().max_by_key(|reports| reports.last()));
                if let Some(reports) = newest {
                    reports.count(at, *count);
                }
            }
            Fact::KernelLogGap { .. } => self.gaps = self.gaps.saturating_add(1),
            _ => {}
        }
    }

    fn record_report(&mut self, at: Mono, report: &KernelReport) {
        if report.class == KernelClass::KernelStarted {
            self.classes.clear();
            return;
        }
        let over = self.catalog.kernel(report.class).and_then(|meaning| meaning.cancels);
        if let Some(subjects) = over.and_then(|over| self.classes.get_mut(&over)) {
            subjects.remove(&report.subject);
        }
        let subjects = self.classes.entry(report.class).or_default();
        if subjects.len() >= SUBJECTS && !subjects.contains_key(&report.subject) {
            let oldest = subjects.iter().min_by_key(|(_, reports)| reports.last());
            let oldest = oldest.map(|(subject, _)| subject.clone());
            oldest.map(|oldest| subjects.remove(&oldest));
        }
        let reports = subjects.entry(report.subject.clone()).or_default();
        reports.count(at, 1);
        reports.line.clone_from(&report.place.line);
    }

    /// Clears reports about the component up to `at`: an operator has acknowledged them. Later reports count again.
    pub fn acknowledge(&mut self, component: &str, at: Mono) {
        for meaning in self.catalog.kernel_meanings() {
            if meaning.component.as_deref() == Some(component)
                && let Some(subjects) = self.classes.get_mut(&meaning.class)
            {
                subjects.retain(|_, reports| reports.last() > at);
            }
        }
    }

    /// The components at `now`.
    pub fn components(&mut self, now: Mono) -> Vec<Component> {
        let mut found: BTreeMap<String, Component> = BTreeMap::new();
        if let Some(log) = self.state.as_ref().and_then(|state| self.log(state, now)) {
            found.insert(LOG.to_owned(), log);
        }
        for meaning in self.catalog.kernel_meanings() {
            let Some(name) = &meaning.component else { continue };
            let Some(subjects) = self.classes.get_mut(&meaning.class) else { continue };
            // A report that names a GPU belongs to that GPU's component.
            let own = |subject: &Option<String>| !meaning.class.is_of_a_gpu() || subject.is_none();
            if !subjects.keys().any(own) {
                continue;
            }
            let mut held = Vec::new();
            for (subject, reports) in subjects.iter_mut().filter(|(subject, _)| own(subject)) {
                let count = reports.within(meaning, now);
                if count >= meaning.count {
                    held.push((subject.as_deref(), count, &*reports));
                }
            }
            let component = found.entry(name.clone()).or_insert_with(|| calm(name, self.read_at, now));
            hold_against(component, meaning, &held);
        }
        let mut components: Vec<Component> = found.into_values().collect();
        for component in &mut components {
            component.since = match self.shown.get(&component.name) {
                Some((state, since)) if *state == component.state => *since,
                // The state improved now.
                Some((state, _)) if *state > component.state => now,
                Some(_) | None => component.since,
            };
            self.shown.insert(component.name.clone(), (component.state, component.since));
        }
        components
    }

    fn log(&self, state: &LogState, now: Mono) -> Option<Component> {
        let mut log = calm(LOG, self.read_at, now);
        match state {
            LogState::Reading if self.gaps > 0 => {
                log.reason = format!(
                    "{} is read; {} times records were overwritten before they were read",
                    self.path, self.gaps
                );
            }
            LogState::Reading => log.reason = format!("{} is read", self.path),
            LogState::ReadingInstead(what) => log.reason.clone_from(what),
            LogState::Unreadable(why) => {
                log.state = HealthState::Unknown;
                log.reason.clone_from(why);
            }
            LogState::Absent(_) => return None,
        }
        Some(log)
    }
}

fn calm(name: &str, read_at: Option<Mono>, now: Mono) -> Component {
    Component {
        name: name.to_owned(),
        state: HealthState::Healthy,
        reason: "nothing new in the kernel log".to_owned(),
        action: RecommendedAction::None,
        evidence: Vec::new(),
        read_at,
        since: now,
        ..Component::default()
    }
}

impl Reports {
    fn count(&mut self, at: Mono, count: u64) {
        if self.times.len() == MAX_REMEMBERED_REPORTS {
            self.times.pop_front();
        }
        self.times.push_back((at, count));
    }

    fn first(&self) -> Mono {
        self.times.front().map_or(Mono(0), |(at, _)| *at)
    }

    fn last(&self) -> Mono {
        self.times.back().map_or(Mono(0), |(at, _)| *at)
    }

    /// The number of reports within the window in which they count.
    fn within(&mut self, meaning: &KernelMeaning, now: Mono) -> u64 {
        if let Some(window) = meaning.window {
            self.times.retain(|(at, _)| now.since(*at) <= window.0);
        }
        self.times.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }
}

fn hold_against(component: &mut Component, meaning: &KernelMeaning, held: &[(Option<&str>, u64, &Reports)]) {
    if held.is_empty() || meaning.state == HealthState::Healthy {
        return;
    }
    let devices: Vec<&str> =
        held.iter().filter_map(|(subject, ..)| *subject).take(MAX_NAMED_DEVICES).collect();
    let more = held.len().saturating_sub(devices.len().max(1));
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let devices = if devices.is_empty() { String::new() } else { format!(" ({}{more})", devices.join(", ")) };
    let count: u64 = held.iter().fold(0, |sum, (_, count, _)| sum.saturating_add(*count));
    let times = if count > 1 { format!(", {count} times") } else { String::new() };
    let words = format!("{}{devices}{times}", meaning.name);
    if component.state == HealthState::Healthy {
        component.reason = words;
    } else {
        component.reason = format!("{}; {words}", component.reason);
    }
    let only_virtual = held.iter().all(|(subject, ..)| subject.is_some_and(is_virtual_disk));
    let (state, action) = if only_virtual {
        (meaning.state.min(HealthState::Degraded), RecommendedAction::None)
    } else {
        (meaning.state, meaning.action)
    };
    // Since the first of the lines that cause the state: the log may be older than the agent.
    let began = held.iter().map(|(_, _, reports)| reports.first()).min().unwrap_or(component.since);
    if state > component.state {
        component.since = began;
    } else if state == component.state {
        component.since = component.since.min(began);
    }
    component.state = component.state.max(state);
    component.action = component.action.max(action);
    let limit = (meaning.count > 1).then(|| meaning.count.to_string());
    for (_, _, reports) in held.iter().take(MAX_NAMED_DEVICES) {
        component.evidence.push(Evidence {
            limit: limit.clone(),
            code: Some(FaultCode::KernelLine(meaning.class)),
            meaning: Some(meaning.name.clone()),
            ..Evidence::new("kernel log", &reports.line)
        });
        component.fault_at = component.fault_at.max(Some(reports.last()));
    }
}

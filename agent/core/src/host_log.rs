//! The judge of what the kernel reports of the host: `host.kernel_log` says whether its log can be read, and
//! `host.storage`, `host.hardware` and their like appear once there was anything to say of them.

use std::collections::{BTreeMap, VecDeque};

use crate::catalog::{Catalog, KernelMeaning};
use crate::entry::Fact;
use crate::health::{Component, Evidence, HealthState, RecommendedAction};
use crate::kernel::KernelClass;
use crate::time::Mono;

/// The component of the log itself.
pub const LOG: &str = "host.kernel_log";

/// Reports of a class that are remembered with their time; more are only counted.
const REMEMBERED: usize = 256;

/// Whether the log can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogState {
    /// It is being read.
    Reading,
    /// It cannot be: why, and what to do.
    Unreadable(String),
}

/// Judges the host by its kernel log.
#[derive(Clone, Debug)]
pub struct HostLogJudge {
    catalog: Catalog,
    path: String,
    state: Option<LogState>,
    read_at: Option<Mono>,
    gaps: u64,
    classes: BTreeMap<KernelClass, Reports>,
    shown: BTreeMap<String, (HealthState, Mono)>,
}

#[derive(Clone, Debug, Default)]
struct Reports {
    /// When, and how many.
    times: VecDeque<(Mono, u64)>,
    line: String,
    subject: Option<String>,
}

impl HostLogJudge {
    /// A judge of the log at `path`, of which nothing was read yet.
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

    /// Takes in whether the log could be read at `at`.
    pub fn log_is(&mut self, at: Mono, state: LogState) {
        if state == LogState::Reading {
            self.read_at = Some(at);
        }
        self.state = Some(state);
    }

    /// Takes in what the kernel log told at `at`; facts of other kinds are passed over.
    pub fn take_in(&mut self, at: Mono, fact: &Fact) {
        match fact {
            Fact::KernelReport(report) => {
                let reports = self.classes.entry(report.class).or_default();
                reports.count(at, 1);
                reports.line.clone_from(&report.place.line);
                reports.subject.clone_from(&report.subject);
            }
            Fact::KernelLinesLeftOut { of, count } => {
                let class = KernelClass::ALL.iter().find(|class| class.name() == of);
                if let Some(reports) = class.and_then(|class| self.classes.get_mut(class)) {
                    reports.count(at, *count);
                }
            }
            Fact::KernelLogGap { .. } => self.gaps = self.gaps.saturating_add(1),
            _ => {}
        }
    }

    /// The components as they stand at `now`.
    pub fn components(&mut self, now: Mono) -> Vec<Component> {
        let mut found: BTreeMap<String, Component> = BTreeMap::new();
        if let Some(state) = &self.state {
            found.insert(LOG.to_owned(), self.log(state, now));
        }
        for meaning in self.catalog.kernel_meanings() {
            let Some(name) = &meaning.component else { continue };
            let Some(reports) = self.classes.get_mut(&meaning.class) else { continue };
            let component = found.entry(name.clone()).or_insert_with(|| calm(name, self.read_at, now));
            reports.hold_against(component, meaning, now);
        }
        let mut components: Vec<Component> = found.into_values().collect();
        for component in &mut components {
            let before = self.shown.get(&component.name).filter(|(state, _)| *state == component.state);
            component.since = before.map_or(now, |(_, since)| *since);
            self.shown.insert(component.name.clone(), (component.state, component.since));
        }
        components
    }

    fn log(&self, state: &LogState, now: Mono) -> Component {
        let mut log = calm(LOG, self.read_at, now);
        match state {
            LogState::Reading if self.gaps > 0 => {
                log.reason = format!(
                    "{} is read; {} times records were overwritten before they were read",
                    self.path, self.gaps
                );
            }
            LogState::Reading => log.reason = format!("{} is read", self.path),
            LogState::Unreadable(why) => {
                log.state = HealthState::Unknown;
                log.reason.clone_from(why);
            }
        }
        log
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
        if self.times.len() == REMEMBERED {
            self.times.pop_front();
        }
        self.times.push_back((at, count));
    }

    fn hold_against(&mut self, component: &mut Component, meaning: &KernelMeaning, now: Mono) {
        if let Some(window) = meaning.window {
            self.times.retain(|(at, _)| now.since(*at) <= window.0);
        }
        let count: u64 = self.times.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count));
        if count < meaning.count {
            return;
        }
        let of = self.subject.as_ref().map(|subject| format!(" ({subject})")).unwrap_or_default();
        let times = if count > 1 { format!(", {count} times") } else { String::new() };
        let told = format!("{}{of}{times}", meaning.name);
        if component.state == HealthState::Healthy {
            component.reason = told;
        } else {
            component.reason = format!("{}; {told}", component.reason);
        }
        component.state = component.state.max(meaning.state);
        component.action = component.action.max(meaning.action);
        let limit = (meaning.count > 1).then(|| meaning.count.to_string());
        let reading = self.line.clone();
        component.evidence.push(Evidence {
            source: "kernel log".to_owned(),
            reading,
            limit,
            ..Evidence::default()
        });
    }
}

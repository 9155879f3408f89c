//! What NVIDIA's DCGM reports, if it runs: a second opinion on GPUs, shown on each GPU's component by PCI address. A
//! GPU whose address DCGM does not report is a component `dcgm.gpu0`.
//!
//! - The first check after its watches are set has no results yet; the GPUs get no opinion from it.
//! - Its XID history goes back to the start of its host engine and never heals, and its table of XIDs contradicts
//!   NVIDIA's own. An XID from DCGM is an event and evidence, not a fault. The kernel log is the source for XIDs.
//! - Power at the cap, and what only its diagnostics test, is not a fault either.
//! - What DCGM only warns about (`WARN`) makes no GPU unhealthy.
//! - A violation of an operator's policy is an event: the readings decide what it means.

mod catalog;
mod exporter;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use catalog::{DcgmCatalog, DcgmFile, DcgmMeaning};
pub use exporter::{ExporterJudge, ExporterReport};

use crate::hardware::gpu::Opinion;
use mainstay_model::component_id::ComponentId;
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::pci::PciAddress;
use mainstay_model::report::SensorReport;
use mainstay_model::time::Mono;

/// The result of asking the probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DcgmReport {
    /// DCGM is not installed, or its host engine does not run.
    Absent(String),
    /// It refused or failed; its message.
    Failed(String),
    /// It did not answer in time.
    Silent,
    /// It answered.
    Health(DcgmHealth),
}

/// One health check of all GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DcgmHealth {
    /// The GPUs that it watches, by its numbers.
    pub gpus: Vec<u32>,
    /// What it found.
    pub incidents: Vec<Incident>,
    /// Its watches were only just set.
    #[serde(default)]
    pub first: bool,
    /// PCI addresses of its GPUs by its numbers, as far as it reports them.
    #[serde(default)]
    pub addresses: BTreeMap<u32, PciAddress>,
    /// Policies that were violated since the last answer.
    #[serde(default)]
    pub violations: Vec<Violation>,
}

/// A violation of a DCGM policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// Which condition, by its bit.
    pub condition: u32,
    /// The GPU by DCGM's number, if reported.
    pub gpu: Option<u32>,
    /// The value: a count, a temperature in degrees Celsius or an XID.
    pub value: u64,
}

impl Violation {
    fn describe(&self) -> String {
        let value = self.value;
        match self.condition {
            0x1 => format!("{value} memory errors that could not be corrected"),
            0x2 => format!("{value} PCIe packets sent again"),
            0x4 => format!("{value} pages of memory taken out of use"),
            0x8 => format!("a temperature of {value} °C"),
            0x10 => format!("a power of {value} W"),
            0x20 => format!("{value} errors on NVLink"),
            0x40 => format!("XID {value}"),
            other => format!("condition {other:#x}, value {value}"),
        }
    }
}

/// One thing that DCGM found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Incident {
    /// The GPU by DCGM's number; `None` if it concerns no GPU (a switch, the host).
    pub gpu: Option<u32>,
    /// The watched subsystem, by its bit.
    pub system: u32,
    /// The severity: 10 warn, 20 fail.
    pub health: u32,
    /// Its code.
    pub code: u32,
    /// Its message.
    pub message: String,
}

/// DCGM's number for a failure.
const FAIL: u32 = 20;

/// Judges DCGM's reports.
#[derive(Clone, Debug)]
pub struct DcgmJudge {
    catalog: DcgmCatalog,
    /// The operator configured DCGM as running on this host.
    expected: bool,
    known: bool,
    shown: BTreeMap<String, (HealthState, Mono)>,
    reported_incidents: BTreeSet<(Option<u32>, u32)>,
    read_at: Option<Mono>,
    opinions: BTreeMap<PciAddress, Vec<Opinion>>,
}

impl DcgmJudge {
    /// A judge without any report yet. `expected`: missing DCGM is a problem.
    pub fn new(catalog: DcgmCatalog, expected: bool) -> DcgmJudge {
        let (shown, reported_incidents) = (BTreeMap::new(), BTreeSet::new());
        let opinions = BTreeMap::new();
        DcgmJudge { catalog, expected, known: false, shown, reported_incidents, read_at: None, opinions }
    }

    /// DCGM's opinion on each GPU with a known address, from its last answer; empty if it did not answer.
    pub fn opinions(&self) -> &BTreeMap<PciAddress, Vec<Opinion>> {
        &self.opinions
    }

    /// Judges the answer received at `at`.
    pub fn step(&mut self, at: Mono, report: &DcgmReport) -> SensorReport {
        self.opinions.clear();
        let unknown = match report {
            DcgmReport::Health(health) => return self.health(at, health),
            DcgmReport::Absent(why) => format!("no host engine answers: {why}"),
            DcgmReport::Failed(why) => format!("DCGM fails: {why}"),
            DcgmReport::Silent => "DCGM has not answered in time".to_owned(),
        };
        // If DCGM never answered and is not expected, it is not shown.
        if !self.expected && !self.known {
            return SensorReport::default();
        }
        let component = Component { reason: unknown, ..self.component("dcgm", HealthState::Unknown, at) };
        SensorReport { components: vec![component], facts: Vec::new() }
    }

    fn health(&mut self, at: Mono, health: &DcgmHealth) -> SensorReport {
        (self.known, self.read_at) = (true, Some(at));
        let mut facts = self.events(health);
        facts.extend(health.violations.iter().map(|violation| violated(violation, health)));
        let watched = format!("the host engine watches {} GPUs", health.gpus.len());
        if health.first {
            let reason = format!("{watched}; its first check has no result yet");
            let component = Component { reason, ..self.component("dcgm", HealthState::Healthy, at) };
            return SensorReport { components: vec![component], facts };
        }
        let mut components = vec![self.summed_up("dcgm", None, &health.incidents, at, &watched)];
        for gpu in &health.gpus {
            if let Some(address) = health.addresses.get(gpu) {
                let of_it = health.incidents.iter().filter(|incident| incident.gpu == Some(*gpu));
                let said = of_it.map(|incident| self.opinion(incident)).collect();
                self.opinions.insert(*address, said);
                continue;
            }
            let name = format!("dcgm.gpu{gpu}");
            components.push(self.summed_up(&name, Some(*gpu), &health.incidents, at, "DCGM finds nothing"));
        }
        SensorReport { components, facts }
    }

    /// Sums up the incidents of one GPU, or those of no GPU, as a component.
    fn summed_up(
        &mut self,
        name: &str,
        gpu: Option<u32>,
        incidents: &[Incident],
        at: Mono,
        well: &str,
    ) -> Component {
        let mut state = HealthState::Healthy;
        let mut action = RecommendedAction::None;
        let (mut reasons, mut evidence) = (Vec::new(), Vec::new());
        for incident in incidents.iter().filter(|incident| incident.gpu == gpu) {
            let (of_one, needed, words) = self.weigh(incident);
            if of_one > HealthState::Healthy {
                reasons.push(words);
                action = action.max(needed);
            }
            state = state.max(of_one);
            evidence.push(Evidence {
                source: format!("DCGM error {}", incident.code),
                reading: incident.message.clone(),
                ..Evidence::default()
            });
        }
        let reason = if reasons.is_empty() { well.to_owned() } else { reasons.join("; ") };
        Component { reason, action, evidence, confidence: 0.7, ..self.component(name, state, at) }
    }

    fn opinion(&self, incident: &Incident) -> Opinion {
        let (state, action, reason) = self.weigh(incident);
        let checks = self.catalog.meaning(incident.code).map(|meaning| meaning.checks.clone());
        let evidence = Evidence::new(format!("DCGM error {}", incident.code), &incident.message);
        Opinion { state, action, reason, evidence, checks: checks.unwrap_or_default() }
    }

    /// State, action and words for an incident.
    fn weigh(&self, incident: &Incident) -> (HealthState, RecommendedAction, String) {
        // What DCGM only warns about is at most degraded.
        let most = if incident.health >= FAIL { HealthState::Unhealthy } else { HealthState::Degraded };
        match self.catalog.meaning(incident.code) {
            Some(meaning) => {
                let words = format!("{} (DCGM {}): {}", meaning.name, incident.code, incident.message);
                (meaning.state.min(most), meaning.action, words)
            }
            None => {
                let words = format!("DCGM {}: {}", incident.code, incident.message);
                (HealthState::Degraded, RecommendedAction::ContactSupport, words)
            }
        }
    }

    /// Returns one event for each incident that the last answer did not have.
    fn events(&mut self, health: &DcgmHealth) -> Vec<Fact> {
        let incidents = &health.incidents;
        let now: BTreeSet<(Option<u32>, u32)> =
            incidents.iter().map(|incident| (incident.gpu, incident.code)).collect();
        let mut said = BTreeSet::new();
        let new = incidents.iter().filter(|incident| {
            let key = (incident.gpu, incident.code);
            !self.reported_incidents.contains(&key) && said.insert(key)
        });
        let facts = new
            .map(|incident| {
                let weight = match self.weigh(incident).0 {
                    HealthState::Healthy | HealthState::Unknown => Weight::Info,
                    HealthState::Degraded => Weight::Warning,
                    HealthState::Unhealthy => Weight::Error,
                };
                let values =
                    [("code", incident.code), ("system", incident.system), ("health", incident.health)];
                Fact::Observed(Observation {
                    component: component_of(incident.gpu, health),
                    event: "dcgm_incident".to_owned(),
                    weight,
                    detail: incident.message.clone(),
                    values: values.map(|(name, value)| (name.to_owned(), value.to_string())).into(),
                })
            })
            .collect();
        self.reported_incidents = now;
        facts
    }

    fn component(&mut self, name: &str, state: HealthState, at: Mono) -> Component {
        let before = self.shown.get(name).filter(|(shown, _)| *shown == state);
        let since = before.map_or(at, |(_, since)| *since);
        self.shown.insert(name.to_owned(), (state, since));
        Component { name: name.to_owned(), state, read_at: self.read_at, since, ..Component::default() }
    }
}

/// The component of one of DCGM's GPUs, or of DCGM itself.
fn component_of(gpu: Option<u32>, health: &DcgmHealth) -> String {
    let Some(gpu) = gpu else { return "dcgm".to_owned() };
    let address = health.addresses.get(&gpu);
    address.map_or_else(|| format!("dcgm.gpu{gpu}"), |address| ComponentId::Gpu(*address).to_string())
}

fn violated(violation: &Violation, health: &DcgmHealth) -> Fact {
    let values = [
        ("condition".to_owned(), format!("{:#x}", violation.condition)),
        ("value".to_owned(), violation.value.to_string()),
    ];
    Fact::Observed(Observation {
        component: component_of(violation.gpu, health),
        event: "dcgm_policy_violated".to_owned(),
        weight: Weight::Warning,
        detail: format!("a policy of DCGM was violated: {}", violation.describe()),
        values: values.into(),
    })
}

//! The judge of TPUs: `tpu.runtime` shows whether libtpu's metrics service answers; `tpu.0`, `tpu.1` and so on show the
//! state of each chip.
//!
//! - Chips that no process holds are idle: no service answers then, which is normal.
//! - If processes cannot be inspected, it is unknown who holds a chip; it does not count as free.
//! - A core that is behind the others is reported only after no core has moved for a while: in a running job, some core
//!   is always briefly behind.
//! - A chip that was on the bus earlier in this boot and no longer is counts as missing, also across restarts of the
//!   agent.

mod driver;
pub mod outlier;
mod sample;
mod texts;

use std::collections::BTreeMap;

pub use driver::{DriverReport, TpuProblem, read as read_driver_line};
pub use outlier::{Differs, Outlier, outliers};
pub use sample::{
    Chip, ChipHolder, CoreState, Holders, Runtime, RuntimeReply, RuntimeService, Stall, TpuSample, chip_kind,
};
pub use texts::{STALL, metric};

use mainstay_model::component_id::ComponentId;
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::pci::PciAddress;
use mainstay_model::report::SensorReport;
use mainstay_model::settings;
use mainstay_model::time::{Mono, Span};
use mainstay_model::units::Period;

settings! {
    /// Limits of the TPU checks.
    pub struct TpuLimits {
        /// How long no core must move before a core that differs from the others counts as what holds them up.
        still_for: Period = Period::seconds(60),
    }
    sections {}
}

/// How long a line of the driver's log about this host counts against tpu.runtime.
const DRIVER_TROUBLE: Span = Span::seconds(600);

/// Confidence that a core that differs is what the others wait for.
const INFERRED: f64 = 0.8;

/// Maximum number of remembered driver lines: a log full of different lines is one incident.
const DRIVER_REPORTS: usize = 16;

/// The event that remembers a chip across restarts.
const FOUND: &str = "chip_found";

/// Judges the TPUs of a host.
#[derive(Clone, Debug)]
pub struct TpuJudge {
    limits: TpuLimits,
    /// Chips that were on the bus in this boot.
    known_chips: BTreeMap<PciAddress, KnownChip>,
    /// Since when chips are or may be held while their service does not answer.
    silent_since: Option<Mono>,
    /// Whether the present holder's service has answered.
    answered: bool,
    /// Whether its silence has been reported.
    silence_reported: bool,
    cores: Cores,
    /// The lines of the driver's log, and their times.
    driver: BTreeMap<DriverReport, Mono>,
    shown: BTreeMap<String, (HealthState, Mono)>,
}

#[derive(Clone, Debug)]
struct KnownChip {
    number: u32,
    kind: String,
    /// Its address with the PCI function; journals of older versions have the address without it.
    bus_id: String,
}

/// The cores' last positions, and since when they have not moved.
#[derive(Clone, Debug, Default)]
struct Cores {
    last: Vec<CoreState>,
    still_since: Option<Mono>,
    /// The outliers that were reported.
    outliers: Vec<Outlier>,
}

impl TpuJudge {
    /// A judge without any sample yet.
    pub fn new(limits: TpuLimits) -> TpuJudge {
        TpuJudge {
            limits,
            known_chips: BTreeMap::new(),
            silent_since: None,
            answered: false,
            silence_reported: false,
            cores: Cores::default(),
            driver: BTreeMap::new(),
            shown: BTreeMap::new(),
        }
    }

    /// Restores an observation from earlier in this boot, before the agent restarted.
    pub fn recall(&mut self, observation: &Observation) {
        if observation.event != FOUND {
            return;
        }
        let value = |name: &str| observation.values.get(name).map(String::as_str).unwrap_or_default();
        if let (ComponentId::Tpu(number), Some(address)) =
            (ComponentId::parse(&observation.component), PciAddress::parse(value("address")))
        {
            self.known_chips.insert(
                address,
                KnownChip { number, kind: value("kind").to_owned(), bus_id: value("address").to_owned() },
            );
        }
    }

    /// Judges one sample at `now`. A host without TPUs has no components.
    pub fn step(&mut self, now: Mono, sample: &TpuSample) -> SensorReport {
        let mut facts = Vec::new();
        let none = Vec::new();
        let chips = sample.chips.as_ref().unwrap_or(&none);
        self.remember(chips, &mut facts);
        if self.known_chips.is_empty() && sample.services.is_empty() {
            return SensorReport::default();
        }
        let stuck = self.follow_cores(now, sample, &mut facts);
        facts.extend(sample.stalls.iter().map(texts::stall_event));
        self.follow_driver(now, &sample.driver, &mut facts);
        let mut components = vec![self.runtime(now, sample, chips, &mut facts)];
        self.hold_against(&mut components[0]);
        components.extend(self.chips(now, sample, chips, &stuck));
        for component in &mut components {
            let before = self.shown.get(&component.name).filter(|(state, _)| *state == component.state);
            component.since = before.map_or(now, |(_, since)| *since);
            self.shown.insert(component.name.clone(), (component.state, component.since));
        }
        SensorReport { components, facts }
    }

    fn remember(&mut self, chips: &[Chip], facts: &mut Vec<Fact>) {
        for chip in chips {
            if self.known_chips.contains_key(&chip.address) {
                continue;
            }
            let known = KnownChip { number: chip.number, kind: chip.kind.to_owned(), bus_id: chip.bus_id() };
            self.known_chips.insert(chip.address, known);
            let values = [("address", chip.bus_id()), ("kind", chip.kind.to_owned())];
            facts.push(Fact::Observed(Observation {
                component: ComponentId::Tpu(chip.number).to_string(),
                event: FOUND.to_owned(),
                weight: Weight::Info,
                detail: format!("a TPU {} is on the PCI bus at {}", chip.kind, chip.bus_id()),
                values: values.map(|(name, value)| (name.to_owned(), value)).into(),
            }));
        }
    }

    /// The service as a whole.
    fn runtime(&mut self, now: Mono, sample: &TpuSample, chips: &[Chip], facts: &mut Vec<Fact>) -> Component {
        let mut runtime = component("tpu.runtime", Some(now));
        runtime.evidence = sample.services.iter().map(texts::service_evidence).collect();
        let unanswered: Vec<&RuntimeService> = sample
            .services
            .iter()
            .filter(|service| !matches!(service.answer, RuntimeReply::Reported(_)))
            .collect();
        if !sample.services.is_empty() && unanswered.is_empty() {
            self.silent_since = None;
            self.answered = true;
            if std::mem::take(&mut self.silence_reported) {
                facts.push(texts::runtime_event(
                    "runtime_answers",
                    Weight::Info,
                    "libtpu answers again".into(),
                ));
            }
            runtime.reason = texts::answering(&sample.services);
            return runtime;
        }
        // A configured service, too, is expected to answer only while a process may hold a chip.
        if !chips.is_empty() && chips.iter().all(|chip| chip.holders.is_free()) {
            self.silent_since = None;
            (self.answered, self.silence_reported) = (false, false);
            runtime.reason = texts::idle(&sample.services);
            return runtime;
        }
        let since = *self.silent_since.get_or_insert(now);
        runtime.state = HealthState::Unknown;
        runtime.read_at = None;
        runtime.reason = texts::unanswered(now, since, &unanswered, chips, &sample.chips);
        if self.answered && !std::mem::replace(&mut self.silence_reported, true) {
            facts.push(texts::runtime_event("runtime_silent", Weight::Warning, runtime.reason.clone()));
        }
        runtime
    }

    /// The driver writes the same line repeatedly, and into the file of each severity: it is reported once per window.
    fn follow_driver(&mut self, now: Mono, reports: &[DriverReport], facts: &mut Vec<Fact>) {
        self.driver.retain(|_, at| now.since(*at) < DRIVER_TROUBLE);
        for report in reports.iter().take(DRIVER_REPORTS) {
            if !self.driver.contains_key(report) && self.driver.len() < DRIVER_REPORTS {
                facts.push(texts::driver_event(report));
                self.driver.insert(report.clone(), now);
            }
        }
    }

    fn hold_against(&self, runtime: &mut Component) {
        let Some((report, _)) = self.driver.iter().find(|(report, _)| report.problem.is_of_this_host())
        else {
            return;
        };
        runtime.evidence.push(Evidence {
            source: "the log of libtpu's driver".to_owned(),
            reading: report.message.clone(),
            ..Evidence::default()
        });
        if runtime.state < HealthState::Degraded {
            runtime.state = HealthState::Degraded;
            runtime.action = RecommendedAction::RestartProcess;
            runtime.reason = format!("libtpu's driver: {}; {}", report.message, runtime.reason);
        }
    }

    fn chips(&self, now: Mono, sample: &TpuSample, chips: &[Chip], stuck: &[Outlier]) -> Vec<Component> {
        let outliers: Vec<&Runtime> =
            sample.services.iter().filter_map(|service| service.answer.runtime()).collect();
        let shares = texts::by_chip(&outliers, chips.len());
        let cores: Vec<&CoreState> =
            outliers.iter().filter_map(|runtime| runtime.cores.as_ref()).flatten().collect();
        let mut components = Vec::new();
        for (index, chip) in chips.iter().enumerate() {
            let mut chip_component = component(&ComponentId::Tpu(chip.number).to_string(), Some(now));
            let readings = shares.get(index).map(texts::readings).unwrap_or_default();
            chip_component.reason = texts::chip(chip, &readings);
            chip_component.evidence = texts::chip_evidence(chip, &readings);
            chip_component.gauges = shares.get(index).map(texts::gauges).unwrap_or_default();
            let its = |core: &&CoreState| texts::place_of(core, &cores, chips.len()) == Some(index);
            let unclear = matches!(&chip.holders, Holders::Partly(holders, _) if holders.is_empty());
            if unclear && outliers.is_empty() {
                chip_component.state = HealthState::Unknown;
            }
            if chip.nodes.is_empty() {
                chip_component.state = HealthState::Degraded;
                chip_component.action = RecommendedAction::ContactSupport;
                chip_component.reason = format!(
                    "{} at {}: it has no device node, no driver is bound to it",
                    chip.kind,
                    chip.bus_id()
                );
            }
            if let Some((core, error)) =
                cores.iter().filter(|core| its(core)).find_map(|core| Some((core, core.error.as_ref()?)))
            {
                let broken = is_uncorrectable_memory(error);
                chip_component.state = chip_component.state.max(if broken {
                    HealthState::Unhealthy
                } else {
                    HealthState::Unknown
                });
                if broken {
                    chip_component.action = chip_component.action.max(RecommendedAction::ReplaceNode);
                    chip_component.evidence.push(Evidence {
                        source: "core states of libtpu".to_owned(),
                        reading: format!("core {}: {error}", core.core),
                        limit: Some("no uncorrectable memory error".to_owned()),
                        ..Evidence::default()
                    });
                }
                chip_component.reason =
                    format!("libtpu reports for core {}: {error}; {}", core.core, chip_component.reason);
            }
            let outlier =
                stuck.iter().find(|outlier| cores.iter().any(|core| core.core == outlier.core && its(core)));
            if let Some(outlier) = outlier {
                chip_component.state = chip_component.state.max(HealthState::Degraded);
                chip_component.confidence = INFERRED;
                chip_component.action = chip_component.action.max(RecommendedAction::RestartProcess);
                let still = self.cores.still_since.map_or(now, |since| since);
                chip_component.reason = format!("{outlier}; no core has moved for {}", now.since(still));
                chip_component.evidence.push(Evidence {
                    source: "core states of libtpu".to_owned(),
                    reading: outlier.to_string(),
                    limit: Some(format!("unmoved for {}", self.limits.still_for)),
                    ..Evidence::default()
                });
            }
            components.push(chip_component);
        }
        components.extend(self.missing(now, sample, chips));
        components
    }

    /// Chips that were on the bus and no longer are.
    fn missing(&self, now: Mono, sample: &TpuSample, chips: &[Chip]) -> Vec<Component> {
        let gone = self
            .known_chips
            .iter()
            .filter(|(address, _)| !chips.iter().any(|chip| chip.address == **address));
        gone.map(|(_, known)| {
            let address = &known.bus_id;
            let mut known_component = component(&ComponentId::Tpu(known.number).to_string(), Some(now));
            match &sample.chips {
                Err(why) => {
                    known_component.state = HealthState::Unknown;
                    known_component.read_at = None;
                    known_component.reason = format!("{} at {address}: {why}", known.kind);
                }
                Ok(_) => {
                    known_component.state = HealthState::Unhealthy;
                    known_component.action = RecommendedAction::RebootNode;
                    known_component.reason = format!(
                        "{} at {address}: it was on the PCI bus in this boot and is gone",
                        known.kind
                    );
                }
            }
            known_component
        })
        .collect()
    }

    /// Follows the cores' positions. Returns the cores that hold up the others once no core has moved for long enough.
    fn follow_cores(&mut self, now: Mono, sample: &TpuSample, facts: &mut Vec<Fact>) -> Vec<Outlier> {
        let runtimes = sample.services.iter().filter_map(|service| service.answer.runtime());
        let cores: Vec<CoreState> =
            runtimes.filter_map(|runtime| runtime.cores.as_ref()).flatten().cloned().collect();
        let still = cores.len() == self.cores.last.len()
            && cores.iter().zip(&self.cores.last).all(|(core, before)| core.stands_as(before));
        if !still {
            self.cores = Cores { last: cores, still_since: Some(now), outliers: Vec::new() };
            return Vec::new();
        }
        self.cores.last = cores;
        let since = *self.cores.still_since.get_or_insert(now);
        if self.cores.last.is_empty() || now.since(since) < self.limits.still_for.0 {
            return Vec::new();
        }
        let named: Vec<(&str, &CoreState)> = self.cores.last.iter().map(|core| ("", core)).collect();
        let stuck = outliers(&named);
        if stuck != self.cores.outliers {
            for outlier in &stuck {
                facts.push(texts::outlier_event(outlier, now.since(since)));
            }
            self.cores.outliers.clone_from(&stuck);
        }
        stuck
    }
}

/// Whether a core's error is a fault of the chip's memory: `UNCORRECTABLE HBM ECC error on core 3`. Other core errors
/// may be the program's own, so the chip's state is unknown.
fn is_uncorrectable_memory(error: &str) -> bool {
    let error = error.to_ascii_lowercase();
    let uncorrectable = error.contains("uncorrectable") || error.contains("double bit");
    uncorrectable && (error.contains("ecc") || error.contains("hbm"))
}

/// A healthy component without a reason.
fn component(name: &str, read_at: Option<Mono>) -> Component {
    Component { name: name.to_owned(), state: HealthState::Healthy, read_at, ..Component::default() }
}

//! The judge of GPUs and of the switches between them, one component each: `gpu.0000:3b:00`, `nvswitch.0000:c1:00`, and
//! one for each faulty NVLink: `nvlink.0000:3b:00/4`.
//!
//! - A fault of a program does not count against the GPU: a faulty kernel shows nothing about the hardware.
//! - A consequence of a fault is folded into the fault, together with the driver's recommended action.
//! - A fault lasts until its condition is gone: until the driver reports so or is reloaded (what a reset heals), until
//!   the next boot, or for a limited time if new processes fix it. A replaced board starts without faults.
//! - Counters are judged by their increase, limits by several readings, the driver's own reports at once.
//! - What cannot be read is unknown. More severe evidence still counts.

mod checks;
mod dcgm_opinion;
mod details;
mod driver;
mod fabric;
mod faults;
mod history;
mod intake;
mod learned;
mod limits;
mod links;
mod log;
mod notes;
mod peers;
mod probe_protocol;
mod programs;
mod read;
mod reading;
mod readings;
pub mod reset;
mod rules;
mod siblings;
mod state;
mod watch;
mod xid_deduplicator;

use std::collections::{BTreeMap, BTreeSet};

pub use dcgm_opinion::Opinion;
pub use details::{EccCount, EccPlace, GpuDetails, LinkErrors, PeerAccess, SramErrors};
pub use learned::{board_of, learned_gpus, replaced_board};
pub use limits::{DeviceLimits, ExpectedGpus};
use limits::{PASSING, REPEATS_WINDOW, SIBLING_READINGS};
pub use probe_protocol::{DeviceReport, DriverTrouble, GpuEvent, ProbeAnswer, ProbeLine, ProbeRequest};
pub use reading::{
    Clocks, FabricInfo, GpuIdentity, GpuProcess, GpuReading, GpuTrouble, LinkReading, PcieLink, RemappedRows,
    Sampled, SlowdownTimes, settle,
};
pub use state::GpuView;

use driver::Driver;
use faults::Faults;
use programs::Programs;
use rules::{POWER_BRAKE, Rules};
use siblings::Sibling;
use state::{Around, Gpu, KnownGpu};
use watch::Change;
use xid_deduplicator::XidDeduplicator;

use crate::hardware::catalog::Catalog;
use crate::state::{Hysteresis, ReportedState};
use mainstay_model::component_id::ComponentId;
use mainstay_model::entry::Fact;
use mainstay_model::fault_code::FaultCode;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::operator::name;
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Mono;

/// XID of a GPU that has fallen off the bus.
const OFF_BUS: u32 = 79;
/// XID with which the driver reports the recovery action that a GPU needs.
const RECOVERY_ACTION: u32 = 154;

/// Judges GPUs and switches by the kernel log and the driver.
#[derive(Clone, Debug)]
pub struct DeviceJudge {
    catalog: Catalog,
    limits: DeviceLimits,
    expected: ExpectedGpus,
    gpus: BTreeMap<PciAddress, Gpu>,
    switches: BTreeMap<PciAddress, Switch>,
    driver: Driver,
    /// The power supply's brake, once it has slowed several GPUs down at the same time.
    power: Option<ReportedState>,
    xids: XidDeduplicator,
}

#[derive(Clone, Debug, Default)]
struct Switch {
    name: String,
    faults: Faults,
    shown: ReportedState,
}

impl DeviceJudge {
    /// A judge without any device yet.
    pub fn new(catalog: Catalog, limits: DeviceLimits) -> DeviceJudge {
        DeviceJudge {
            catalog,
            limits,
            expected: ExpectedGpus::default(),
            gpus: BTreeMap::new(),
            switches: BTreeMap::new(),
            driver: Driver::default(),
            power: None,
            xids: XidDeduplicator::default(),
        }
    }

    /// The same judge with the host's expected GPUs.
    pub fn expecting(self, expected: ExpectedGpus) -> DeviceJudge {
        DeviceJudge { expected, ..self }
    }

    /// Processes the result of asking the driver at `at`. Returns facts for the journal.
    pub fn report(&mut self, at: Mono, report: DeviceReport) -> Vec<Fact> {
        let silent_since = match self.driver.report.as_ref().map(|(_, report)| report) {
            Some(DeviceReport::Silent { since, .. }) => Some(*since),
            _ => None,
        };
        let mut facts = match (silent_since, &report) {
            (None, DeviceReport::Silent { since, .. }) => vec![Fact::GpuDriverSilent { since: *since }],
            (Some(since), DeviceReport::Answered(_)) => {
                vec![Fact::GpuDriverAnswered { after: at.since(since) }]
            }
            _ => Vec::new(),
        };
        match &report {
            DeviceReport::Answered(answer) => {
                self.driver.answered(at);
                if let ProbeAnswer::Gpus { gpus, .. } = answer {
                    self.driver.most = self.driver.most.max(gpus.len());
                    facts.extend(self.readings(at, gpus));
                }
            }
            DeviceReport::NoGpus => facts.extend(self.note_missing(at, &[])),
            DeviceReport::Silent { .. } | DeviceReport::Broken(_) => {}
        }
        self.driver.report = Some((at, report));
        facts
    }

    fn readings(&mut self, at: Mono, readings: &[GpuReading]) -> Vec<Fact> {
        let mut facts = self.note_missing(at, readings);
        for reading in readings {
            let Some(identity) = &reading.identity else { continue };
            let gpu = self.gpus.entry(identity.address).or_default();
            if gpu.is_replaced_by(identity) {
                *gpu = Gpu { shown: gpu.shown.clone(), ..Gpu::default() };
                let words = format!("another board sits here now: {}", identity.uuid);
                facts.push(observed(identity.address, learned::REPLACED, Weight::Info, words, []));
            }
            let rules = Rules { limits: &self.limits, expected: &self.expected, gpus: readings.len() };
            let changes = gpu.readings.take_in(at, reading, rules);
            if changes.iter().any(|(_, change)| matches!(change, Change::Began(_))) {
                gpu.fault_at = Some(at);
            }
            facts.extend(changes.into_iter().map(|(check, change)| noted(identity.address, check, change)));
            gpu.good = if reading.trouble.is_none() { gpu.good.saturating_add(1) } else { 0 };
            if gpu.good >= self.limits.worsen_after {
                gpu.readings.learn_peers();
            }
            let (links, peers) = (gpu.readings.links.learned().clone(), gpu.readings.peers.clone());
            let now = KnownGpu { index: reading.index, identity: identity.clone(), links, peers };
            if gpu.good >= self.limits.worsen_after && gpu.known.as_ref() != Some(&now) {
                facts.push(learned::learned(&now));
                gpu.known = Some(now);
            }
        }
        facts.extend(self.compare_siblings(at));
        if readings.iter().any(|reading| reading.details.is_some()) {
            facts.extend(self.judge_peers(at));
        }
        facts
    }

    /// Compares the GPUs of one model with each other.
    fn compare_siblings(&mut self, at: Mono) -> Vec<Fact> {
        let patience =
            Hysteresis { worsen_after: SIBLING_READINGS, recover_after: self.limits.recover_after };
        let here = self.gpus.values().filter(|gpu| !gpu.missing);
        let read: Vec<Sibling<'_>> = here
            .filter_map(|gpu| {
                let reading = gpu.readings.last.as_ref()?;
                Some(Sibling { reading, details: gpu.readings.details.as_ref() })
            })
            .collect();
        let compared: Vec<(PciAddress, siblings::Compared)> = read
            .iter()
            .enumerate()
            .filter_map(|(place, reading)| {
                let address = reading.reading.identity.as_ref()?.address;
                Some((address, siblings::compare(&read, place, &self.limits)))
            })
            .collect();
        let mut facts = Vec::new();
        for (address, looks) in compared {
            for (check, result) in looks {
                facts.extend(self.step(at, address, check, result, patience));
            }
        }
        facts
    }

    /// Checks whether GPUs still reach each other over NVLink.
    fn judge_peers(&mut self, at: Mono) -> Vec<Fact> {
        let reach = self.gpus.iter().map(|(address, gpu)| {
            let readings = &gpu.readings;
            let last = readings.last.as_ref();
            let excused = gpu.missing
                || last.is_none_or(|last| last.trouble.is_some() || last.mig.value() == Some(&true))
                || readings.links.holds("nvlink_down")
                || readings.holds("fabric");
            (*address, peers::Reach { learned: readings.peers.clone(), now: readings.reach(), excused })
        });
        let looks = peers::judge(&reach.collect());
        let patience = Hysteresis { worsen_after: 1, recover_after: 1 };
        let mut facts = Vec::new();
        for (address, result) in looks {
            facts.extend(self.step(at, address, peers::CHECK, result, patience));
        }
        facts
    }

    /// Applies the result of a check that compares one GPU with others.
    fn step(
        &mut self,
        at: Mono,
        address: PciAddress,
        check: &'static str,
        result: watch::CheckResult,
        patience: Hysteresis,
    ) -> Option<Fact> {
        let gpu = self.gpus.get_mut(&address)?;
        let (check, change) = gpu.readings.compared(check, result, patience)?;
        if matches!(change, Change::Began(_)) {
            gpu.fault_at = Some(at);
        }
        Some(noted(address, check, change))
    }

    /// Replaces all opinions of DCGM on the GPUs.
    pub fn second_opinions(&mut self, opinions: BTreeMap<PciAddress, Vec<Opinion>>) {
        for gpu in self.gpus.values_mut() {
            gpu.opinions = None;
        }
        for (address, last_shown) in opinions {
            self.gpus.entry(address).or_default().opinions = Some(last_shown);
        }
    }

    /// Notes GPUs that the driver no longer lists.
    fn note_missing(&mut self, at: Mono, readings: &[GpuReading]) -> Vec<Fact> {
        let present: Vec<&GpuIdentity> =
            readings.iter().filter_map(|reading| reading.identity.as_ref()).collect();
        // A GPU without an identity may be any of them. `gpu.driver` reports it.
        let nameless = readings.len() > present.len();
        // If the expected number is configured, that many GPUs suffice.
        let enough = self.expected.gpus > 0 && readings.len() >= self.expected.gpus as usize;
        let mut facts = Vec::new();
        for (address, gpu) in &mut self.gpus {
            let of_reading = gpu.readings.last.as_ref().and_then(|last| last.identity.as_ref());
            let before = of_reading.or(gpu.known.as_ref().map(|known| &known.identity));
            let is_here = present.iter().any(|now| {
                now.address == *address
                    || before.is_some_and(|before| !before.uuid.is_empty() && before.uuid == now.uuid)
            });
            let missing = before.is_some() && !is_here && !nameless && !enough;
            if missing != gpu.missing {
                gpu.missing = missing;
                let (event, weight, words) = if missing {
                    gpu.fault_at = Some(at);
                    (learned::MISSING, Weight::Error, "the driver no longer counts it")
                } else {
                    (learned::BACK, Weight::Info, "the driver counts it again")
                };
                facts.push(observed(*address, event, weight, words.to_owned(), []));
            }
        }
        facts
    }

    /// Processes a fact from the kernel log at `at`; facts of other kinds are ignored. After a restart the facts of
    /// this boot are replayed in order. Returns whether it is news: an NVML event may have reported the same XID
    /// before.
    pub fn take_in(&mut self, at: Mono, fact: &Fact) -> bool {
        self.receive(at, at, fact)
    }

    /// Like [`DeviceJudge::take_in`] for a fact of `at` that was read at `now`: a log other than /dev/kmsg may have its
    /// own timestamps.
    pub fn receive(&mut self, now: Mono, at: Mono, fact: &Fact) -> bool {
        match fact {
            Fact::Xid(xid) => return self.xid_line(now, at, xid),
            Fact::Sxid(sxid) => self.sxid(at, sxid),
            Fact::KernelReport(report) => self.kernel_report(at, report),
            Fact::Observed(seen) if seen.event == reset::DONE => {
                if let ComponentId::Gpu(address) = ComponentId::parse(&seen.component)
                    && let Some(gpu) = self.gpus.get_mut(&address)
                {
                    gpu.faults.forget_what_a_reset_heals(at);
                }
            }
            _ => {}
        }
        true
    }

    /// Restores an observation from before a restart, of any boot. Call in order.
    pub fn recall(&mut self, observation: &Observation) {
        let Some(known) = learned::known(observation) else { return };
        let address = known.identity.address;
        // A board that was moved is not missing at its old address.
        self.gpus.retain(|at, gpu| {
            let same = |other: &KnownGpu| {
                other.identity.uuid == known.identity.uuid && !known.identity.uuid.is_empty()
            };
            *at == address || !gpu.known.as_ref().is_some_and(same)
        });
        let gpu = self.gpus.entry(address).or_default();
        gpu.readings.links.recall(known.links.clone());
        gpu.readings.peers.clone_from(&known.peers);
        gpu.known = Some(known);
    }

    /// Restores a finding of `at` in this boot from before a restart. Call in order. The finding lasts until a reading
    /// ends it: a restart of the agent fixes nothing.
    pub fn recall_finding(&mut self, at: Mono, observation: &Observation) {
        use learned::{BACK, BEGAN, ENDED, MISSING, REPLACED};
        if let BEGAN | ENDED | MISSING | BACK | REPLACED = observation.event.as_str()
            && let ComponentId::Gpu(address) = ComponentId::parse(&observation.component)
        {
            self.gpus.entry(address).or_default().recall_finding(at, observation);
        }
    }

    /// Clears the log's faults of the component up to `at`: an operator has acknowledged them. What the driver still
    /// reports counts as before, and so does anything later.
    pub fn acknowledge(&mut self, component: &str, at: Mono) {
        let faults = match ComponentId::parse(component) {
            ComponentId::Gpu(address) => self.gpus.get_mut(&address).map(|gpu| &mut gpu.faults),
            ComponentId::NvSwitch(address) => {
                self.switches.get_mut(&address).map(|switch| &mut switch.faults)
            }
            _ => None,
        };
        if let Some(faults) = faults {
            faults.forget_until(at);
        }
    }

    /// Another boot starts in the replayed facts: faults are over, the attempted remedies are kept.
    pub fn next_boot(&mut self) {
        for gpu in self.gpus.values_mut() {
            gpu.programs = Programs::default();
            gpu.faults.next_boot();
        }
        for switch in self.switches.values_mut() {
            switch.faults.next_boot();
        }
    }

    /// The components at `now`.
    pub fn components(&mut self, now: Mono) -> Vec<Component> {
        self.judge(now).0
    }

    /// The components at `now`, and the GPUs with their readings.
    pub fn judge(&mut self, now: Mono) -> (Vec<Component>, Vec<GpuView>) {
        let alone = self.only_one_with_faulting_programs(now);
        let (mut components, mut views) = (Vec::new(), Vec::new());
        let unreadable = self.driver.why_unreadable(now);
        let driver_asked = self.driver.report.is_some();
        let index_of = |gpu: &Gpu| gpu.readings.last.as_ref().map(|last| last.index);
        let named: BTreeMap<u32, PciAddress> =
            self.gpus.iter().filter_map(|(address, gpu)| Some((index_of(gpu)?, *address))).collect();
        let name_of = |index: u32| match named.get(&index) {
            Some(address) => format!("GPU {address}"),
            None => format!("GPU {index} of its list"),
        };
        components.extend(self.driver.component(now, &self.limits, &self.expected, name_of));
        let braked = self.gpus.values().filter(|gpu| gpu.readings.holds(POWER_BRAKE)).count();
        let rack = braked > 1;
        components.extend(self.power(now, rack, braked));
        for (address, gpu) in &mut self.gpus {
            gpu.faults.forget_passed(now, PASSING);
            // A GPU without any information in this boot may have been removed.
            let unseen = gpu.readings.last.is_none()
                && gpu.known.is_none()
                && gpu.opinions.is_none()
                && gpu.programs.is_empty();
            if !gpu.is_of_interest(driver_asked) || (gpu.faults.are_of_another_boot() && unseen) {
                continue;
            }
            let around = Around {
                alone: alone == Some(*address),
                unreadable: unreadable.as_deref(),
                rack,
                driver_asked,
            };
            let component = gpu.component(*address, now, &self.limits, around);
            views.push(gpu.view(&component, *address, &self.limits));
            components.push(component);
            let read_at = gpu.readings.read_at;
            components.extend(gpu.readings.links.components(*address, now, read_at));
        }
        for (address, switch) in &mut self.switches {
            switch.faults.forget_passed(now, PASSING);
            components.push(switch.component(*address, now));
        }
        (components, views)
    }

    /// If several GPUs are slowed down at once, the cause is the power of the node or rack, not a GPU.
    fn power(&mut self, now: Mono, rack: bool, braked: usize) -> Option<Component> {
        if !rack && self.power.is_none() {
            return None;
        }
        let words = format!(
            "the power supply's brake slowed {braked} of {} GPUs down: look at the power of node and rack",
            self.gpus.len()
        );
        let (state, reason, action) = if rack {
            (HealthState::Degraded, words, RecommendedAction::ContactSupport)
        } else {
            (HealthState::Healthy, "the power brake is released".to_owned(), RecommendedAction::None)
        };
        Some(Component {
            name: "gpu.power".to_owned(),
            state,
            reason,
            action,
            evidence: Vec::new(),
            read_at: self.driver.read_at,
            since: self.power.get_or_insert_default().since(state, now),
            ..Component::default()
        })
    }

    /// The one GPU of several on which programs fail repeatedly, if the others have no such failures.
    fn only_one_with_faulting_programs(&mut self, now: Mono) -> Option<PciAddress> {
        let mut with = Vec::new();
        for (address, gpu) in &mut self.gpus {
            if gpu.programs.any_since(now, REPEATS_WINDOW) {
                with.push(*address);
            }
        }
        // With one GPU there is nothing to compare: every program on the host fails on it.
        match with.as_slice() {
            [one] if self.gpus.len() > 1 => Some(*one),
            _ => None,
        }
    }
}

/// The changed result of a check of a GPU, for the journal.
fn noted(gpu: PciAddress, check: String, change: Change) -> Fact {
    let mut values = vec![("check".to_owned(), check)];
    let (event, weight, words) = match change {
        Change::Began(problem) => {
            let weight =
                if problem.state == HealthState::Unhealthy { Weight::Error } else { Weight::Warning };
            // With these values the finding is restored after a restart.
            values.push(("state".to_owned(), name(problem.state)));
            values.push(("action".to_owned(), name(problem.action)));
            (learned::BEGAN, weight, problem.reason)
        }
        Change::Ended(problem) => (learned::ENDED, Weight::Info, format!("no longer: {}", problem.reason)),
        Change::None => ("finding_unchanged", Weight::Info, String::new()),
    };
    observed(gpu, event, weight, words, values)
}

fn observed(
    gpu: PciAddress,
    event: &str,
    weight: Weight,
    detail: String,
    values: impl IntoIterator<Item = (String, String)>,
) -> Fact {
    Fact::Observed(Observation {
        component: ComponentId::Gpu(gpu).to_string(),
        event: event.to_owned(),
        weight,
        detail,
        values: values.into_iter().collect(),
    })
}

/// A log line as evidence.
fn line(text: &str, code: FaultCode, meaning: &str) -> Evidence {
    let source = if text == xid_deduplicator::BY_NVML_EVENT { "NVML event" } else { "kernel log" };
    Evidence { code: Some(code), meaning: Some(meaning.to_owned()), ..Evidence::new(source, text) }
}

/// Numbers as ranges: `0-5, 8`.
fn ranges(numbers: &BTreeSet<u32>) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => parts.push((*number, *number)),
        }
    }
    let part = |(first, last): (u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    parts.into_iter().map(part).collect::<Vec<_>>().join(",")
}

//! One GPU: kernel log and driver combined into one component.

use std::collections::BTreeSet;

use super::dcgm_opinion::{Opinion, Own};
use super::faults::Faults;
use super::limits::DeviceLimits;
use super::notes;
use super::programs::Programs;
use super::reading::{GpuIdentity, GpuReading};
use super::readings::Readings;
use super::rules::POWER_BRAKE;
use super::watch::Problem;
use crate::state::ReportedState;
use mainstay_model::component_id::ComponentId;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span};

/// Confidence that a GPU is faulty if programs fail on it and on no other: with few programs it may be chance.
const ALONE: f64 = 0.6;

#[derive(Clone, Debug, Default)]
pub(super) struct Gpu {
    pub(super) faults: Faults,
    pub(super) programs: Programs,
    pub(super) readings: Readings,
    /// Its identity, as learned in this or an earlier boot.
    pub(super) known: Option<KnownGpu>,
    /// Readings in a row without trouble.
    pub(super) good: u32,
    /// The driver listed it before and no longer does.
    pub(super) missing: bool,
    /// When a reading last found a new problem.
    pub(super) fault_at: Option<Mono>,
    /// Opinions of DCGM.
    pub(super) opinions: Option<Vec<Opinion>>,
    pub(super) shown: ReportedState,
}

/// A GPU that was healthy in several readings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct KnownGpu {
    pub(super) index: u32,
    pub(super) identity: GpuIdentity,
    pub(super) links: BTreeSet<u32>,
    /// Other GPUs that it reaches over NVLink.
    pub(super) peers: BTreeSet<PciAddress>,
}

/// A GPU as shown: its last reading and its state.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuView {
    /// Its PCI address.
    pub address: PciAddress,
    /// Its state.
    pub state: HealthState,
    /// The reason for the state.
    pub reason: String,
    /// The recommended action.
    pub action: RecommendedAction,
    /// Its last reading; `None` if it was not read since the start.
    pub reading: Option<GpuReading>,
    /// The number of NVLinks that are up and that should be up; `None` for a GPU without NVLinks.
    pub links: Option<(u32, u32)>,
    /// Its power limit, in milliwatts, if reported.
    pub power_limit: Option<u32>,
    /// When it was last read successfully.
    pub read_at: Option<Mono>,
    /// Unusual readings that do not count yet, and why.
    pub notes: Vec<String>,
}

/// How long a reading shows what a GPU is doing.
const DOING_KNOWN: Span = Span::seconds(60);

impl GpuView {
    /// What it is doing, in a sentence; `None` if the last reading is too old.
    pub fn doing(&self, now: Mono) -> Option<String> {
        let (reading, read_at) = (self.reading.as_ref()?, self.read_at?);
        let age = now.since(read_at);
        if age > DOING_KNOWN {
            return None;
        }
        let mut words: Vec<String> = Vec::new();
        words.extend(reading.utilization.value().map(|percent| format!("{percent} % busy")));
        let clocks = reading.clocks.value();
        words.extend(clocks.map(|clocks| format!("clocks {} and {} MHz (memory)", clocks.sm, clocks.memory)));
        words.extend(reading.power.value().map(|milliwatts| format!("{} W", milliwatts / 1000)));
        (!words.is_empty()).then(|| format!("GPU {}: {}, {age} before", self.address, words.join(", ")))
    }
}

impl Gpu {
    /// Whether another board is at this address now.
    pub(super) fn is_replaced_by(&self, identity: &GpuIdentity) -> bool {
        let last = self.readings.last.as_ref().and_then(|last| last.identity.as_ref());
        let before = last.or(self.known.as_ref().map(|known| &known.identity));
        before.is_some_and(|before| {
            !before.uuid.is_empty() && !identity.uuid.is_empty() && before.uuid != identity.uuid
        })
    }

    /// Whether the GPU is shown. A GPU known only from another boot is hidden until the driver is asked.
    pub(super) fn is_of_interest(&self, driver_asked: bool) -> bool {
        driver_asked
            || self.known.is_none()
            || self.readings.last.is_some()
            || self.opinions.is_some()
            || !self.faults.is_empty()
    }

    pub(super) fn component(
        &mut self,
        address: PciAddress,
        now: Mono,
        limits: &DeviceLimits,
        around: Around<'_>,
    ) -> Component {
        let mut reasons = self.faults.reasons();
        let mut evidence = self.faults.evidence();
        let (mut state, mut action) = self.faults.weight();
        let mut sure: Vec<(HealthState, f64)> = Vec::new();
        sure.extend(self.faults.confidence(state).map(|confidence| (state, confidence)));
        let names = self.programs.names();
        if around.alone && names.len() >= limits.programs as usize {
            state = state.max(HealthState::Degraded);
            action = action.max(RecommendedAction::ContactSupport);
            sure.push((HealthState::Degraded, ALONE));
            reasons.push(format!(
                "{} different programs failed on this GPU and on no other of the host: {}",
                names.len(),
                names.join(", ")
            ));
        }
        let mut problems = self.problems(around);
        let (counted, last_shown) = self.opinion(state, &problems, around);
        problems.extend(counted);
        problems.sort_by_key(|problem| std::cmp::Reverse(problem.state));
        for problem in problems {
            sure.push((problem.state, problem.confidence));
            state = state.max(problem.state);
            action = action.max(problem.action);
            reasons.push(problem.reason);
            evidence.extend(problem.evidence);
        }
        evidence.extend(last_shown);
        evidence.extend(self.readings.evidence());
        evidence.extend(self.programs.evidence());
        let notes = notes::notes(&self.readings, limits);
        evidence.extend(notes.into_iter().map(|note| Evidence::new("note, does not count", note)));
        if reasons.is_empty() {
            let read = self.readings.summary();
            let words = [read, self.programs.summary()].into_iter().flatten().collect::<Vec<_>>().join("; ");
            reasons.push(if words.is_empty() { "no fault in the kernel log".to_owned() } else { words });
        }
        let weighty = sure.into_iter().filter(|(other, _)| *other == state).map(|(_, confidence)| confidence);
        Component {
            name: ComponentId::Gpu(address).to_string(),
            state,
            confidence: weighty.reduce(f64::max).unwrap_or(1.0),
            reason: reasons.join("; "),
            action,
            evidence,
            read_at: self.readings.read_at.or(Some(now).filter(|_| !around.driver_asked)),
            since: self.shown.since_it_began(state, now, self.faults.began(state)),
            fault_at: self.fault_at.max(self.faults.last()),
            ..Component::default()
        }
    }

    /// Returns DCGM's opinions that count, and all its opinions as evidence.
    fn opinion(
        &self,
        by_log: HealthState,
        problems: &[Problem],
        around: Around<'_>,
    ) -> (Vec<Problem>, Vec<Evidence>) {
        let opinions = self.opinions.as_deref().unwrap_or_default();
        // An opinion also counts if we cannot read the GPU ourselves.
        let own_state = problems.iter().map(|problem| problem.state).fold(by_log, HealthState::max);
        let read = around.unreadable.is_none() && !self.missing;
        let own = |check: &str| if read { self.readings.own(check) } else { Own::Unread };
        let counted = opinions.iter().filter_map(|opinion| opinion.counts(own_state, own)).collect();
        (counted, opinions.iter().map(|opinion| opinion.evidence.clone()).collect())
    }

    /// The problems by the readings; earlier findings last while they cannot be read.
    fn problems(&self, around: Around<'_>) -> Vec<Problem> {
        if self.missing {
            let lost = "the driver no longer counts it";
            let problem = Problem::new(HealthState::Unhealthy, lost, RecommendedAction::RebootNode);
            return vec![problem.by("NVML device list", "missing", "there").was(Some("there"))];
        }
        let unknown = |why: String| Problem::new(HealthState::Unknown, why, RecommendedAction::None);
        let own = self.readings.problems().filter(|(check, _)| !(around.rack && *check == POWER_BRAKE));
        let mut problems: Vec<Problem> = own.map(|(_, problem)| problem.clone()).collect();
        problems.extend(self.readings.links.problem());
        match around.unreadable {
            Some(why) => problems.push(unknown(why.to_owned())),
            None => problems.extend(self.readings.unread().into_iter().map(unknown)),
        }
        problems
    }

    pub(super) fn view(&self, component: &Component, address: PciAddress, limits: &DeviceLimits) -> GpuView {
        let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let details = self.readings.details.as_ref();
        GpuView {
            address,
            state: component.state,
            reason: component.reason.clone(),
            action: component.action,
            reading: self.readings.last.clone(),
            links: self.readings.links.counts().map(|(up, expected)| (narrow(up), narrow(expected))),
            power_limit: details.and_then(|details| details.power_limit.value().copied()),
            read_at: self.readings.read_at,
            notes: notes::notes(&self.readings, limits),
        }
    }
}

/// Circumstances of a GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Around<'a> {
    /// It is the only one of several GPUs on which programs fail.
    pub(super) alone: bool,
    /// Why no GPU can be read; `None` if they can.
    pub(super) unreadable: Option<&'a str>,
    /// The power supply slows several GPUs down: not a fault of any of them.
    pub(super) rack: bool,
    /// Whether GPUs are read at all.
    pub(super) driver_asked: bool,
}

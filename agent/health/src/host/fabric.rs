//! The judge of the training network: InfiniBand and RoCE ports, and network interfaces selected by name.
//!
//! - A link is expected to be up once it was up steadily, or if the operator configured it. Other links are not in use.
//! - Expected and absent, down for a while, or flapping: unhealthy. Slower than before, or too many errors: degraded.
//! - What was learned about a link belongs to its hardware: for another card in the same slot it starts again.
//! - The history of flaps is restored from the journal, so that a restart of the agent does not clear it.

mod earlier;
mod errors;
mod learned;
mod limits;
mod link;
mod sample;

use std::collections::BTreeMap;

pub use learned::{Expected, KnownLink, LearnedLinks};
pub use limits::{ErrorLimits, FabricLimits};
use limits::{MISSING_AFTER, TOGETHER};
pub use sample::{FabricSample, Identity, LinkKind, LinkState, PortReading};

use earlier::{Moment, Recalled};
use link::{Expectation, Link, LinkFindings};

use crate::state::ReportedState;
use mainstay_model::component_id::ComponentId;
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::id::BootId;
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Span, Stamp};

/// The component of the network as a whole: whether all expected links exist.
pub const WHOLE: &str = "fabric";

/// The counters that the judge uses; others need not be read.
pub fn counters() -> Vec<&'static str> {
    errors::known().chain(["link_downed", "carrier_down_count"]).collect()
}

/// Judges the network from successive samples.
#[derive(Clone, Debug)]
pub struct FabricJudge {
    limits: FabricLimits,
    boot: BootId,
    configured: Vec<Expected>,
    learned: LearnedLinks,
    links: BTreeMap<String, Link>,
    recalled: BTreeMap<String, Recalled>,
    /// Samples in a row without an expected link, by its name.
    missing: BTreeMap<String, u32>,
    went_down: BTreeMap<String, Mono>,
    shown: BTreeMap<String, ReportedState>,
}

impl FabricJudge {
    /// A judge with the learned links and the links configured by the operator. If any are configured, nothing is
    /// learned.
    pub fn new(
        limits: FabricLimits,
        boot: BootId,
        configured: Vec<Expected>,
        learned: LearnedLinks,
    ) -> FabricJudge {
        FabricJudge {
            limits,
            boot,
            configured,
            learned,
            links: BTreeMap::new(),
            recalled: BTreeMap::new(),
            missing: BTreeMap::new(),
            went_down: BTreeMap::new(),
            shown: BTreeMap::new(),
        }
    }

    /// Restores observations from before this start, oldest first.
    pub fn recall(&mut self, now: Stamp, observed: &[(Stamp, BootId, Observation)]) {
        for (stamp, boot, observation) in observed {
            let is_link = matches!(
                ComponentId::parse(&observation.component),
                ComponentId::Port(_) | ComponentId::Interface(_)
            );
            if !is_link {
                continue;
            }
            let same_boot = *boot == self.boot;
            let at = Moment::recalled(*stamp, same_boot, now);
            let recalled = self.recalled.entry(observation.component.clone()).or_default();
            recalled.take_in(at, same_boot, observation);
        }
    }

    /// The learned links, to be saved.
    pub fn learned(&self) -> &LearnedLinks {
        &self.learned
    }

    /// Forgets the learned links.
    pub fn forget(&mut self) {
        self.learned = LearnedLinks::default();
    }

    /// The PCI addresses of expected links; the sample must report what is in these slots.
    pub fn places(&self) -> Vec<String> {
        self.learned.links.values().filter_map(|known| known.place.clone()).collect()
    }

    /// Judges the sample taken at `at`.
    pub fn step(&mut self, at: Mono, sample: &FabricSample) -> SensorReport {
        let mut facts = Vec::new();
        self.hold_against(sample, &mut facts);
        let mut components = Vec::new();
        let mut out = Vec::new();
        for reading in &sample.links {
            let expectation = self.expectation(at, reading);
            let found = self.look_at(at, reading, expectation);
            self.learn(reading, &mut facts);
            if found.out {
                out.push(reading.name.clone());
                self.went_down.entry(reading.name.clone()).or_insert(at);
            } else {
                self.went_down.remove(&reading.name);
            }
            let component = reading.kind.component(&reading.name);
            components.push(self.show(at, component, found, &mut facts));
        }
        let gone = self.judge_missing(at, sample, &mut components, &mut facts);
        self.forget_absent(sample);
        if let Some(whole) = self.whole(at, sample, &out, &gone, &mut facts) {
            components.push(whole);
        }
        self.shown.retain(|name, _| components.iter().any(|component| component.name == *name));
        SensorReport { components, facts }
    }

    /// Updates the learned links with the links that exist now.
    fn hold_against(&mut self, sample: &FabricSample, facts: &mut Vec<Fact>) {
        let passed_over = |name: &str| {
            let device = name.split_once('/').map_or(name, |(device, _)| device);
            sample.passed_over.contains_key(device) || sample.passed_over.contains_key(name)
        };
        self.learned.links.retain(|name, _| !passed_over(name));
        let components: BTreeMap<String, String> =
            self.learned.links.iter().map(|(name, known)| (name.clone(), known.component.clone())).collect();
        let mended = self.learned.repair(sample.host.as_deref(), &sample.links);
        for name in mended.replaced {
            self.links.remove(&name);
            let detail = format!("{name} is different hardware now: its learned state is discarded");
            let component = components.get(&name).cloned().unwrap_or_else(|| WHOLE.to_owned());
            facts.push(event_fact(&component, "hardware_replaced", Weight::Info, detail));
        }
        for (from, to) in mended.renamed {
            self.links.remove(&from);
            let detail = format!("{from} is called {to} now");
            facts.push(event_fact(WHOLE, "renamed", Weight::Info, detail));
        }
    }

    fn expectation(&self, at: Mono, reading: &PortReading) -> Expectation {
        let booting = Span(at.0) < self.limits.boot_grace.0;
        let known = self.learned.links.get(&reading.name);
        if self.configured.is_empty() {
            return Expectation {
                expected: known.is_some(),
                rate: known.and_then(|known| known.rate),
                booting,
            };
        }
        let named = self.configured.iter().find(|expected| expected.name == reading.name);
        let rate = named.and_then(|named| named.rate).or_else(|| known.and_then(|known| known.rate));
        Expectation { expected: named.is_some(), rate, booting }
    }

    fn look_at(&mut self, at: Mono, reading: &PortReading, expectation: Expectation) -> LinkFindings {
        let component = reading.kind.component(&reading.name);
        let recalled = self.recalled.remove(&component);
        let link = self.links.entry(reading.name.clone()).or_insert_with(|| {
            let mut link = Link::default();
            // Observations of other hardware with the same name do not apply to this link.
            let same = |recalled: &Recalled| {
                recalled.serial.is_none()
                    || reading.identity.serial.is_none()
                    || recalled.serial == reading.identity.serial
            };
            if let Some(recalled) = recalled.filter(same) {
                link.recall(recalled);
            }
            link
        });
        link.step(at, reading, expectation, &self.limits)
    }

    /// A link that was active in several readings is expected to be active, at the same rate, from then on.
    fn learn(&mut self, reading: &PortReading, facts: &mut Vec<Fact>) {
        let steadily = self
            .links
            .get(&reading.name)
            .is_some_and(|link| link.active_for > 0 && link.active_for >= self.limits.learn_after);
        if !steadily || reading.virtual_function {
            return;
        }
        let rate = reading.rate.value().copied();
        let new = !self.learned.links.contains_key(&reading.name);
        let known = self.learned.links.entry(reading.name.clone()).or_default();
        known.component = reading.kind.component(&reading.name);
        known.serial = reading.identity.serial.clone().or_else(|| known.serial.take());
        known.place = reading.identity.place.clone().or_else(|| known.place.take());
        known.boot.clone_from(&self.boot.0);
        if known.rate < rate {
            known.rate = rate;
        }
        if new && self.configured.is_empty() {
            let rate = rate.map_or_else(String::new, |rate| format!(" at {rate} Gb/s"));
            let detail = format!("{} is up{rate} and expected to be from now on", reading.name);
            facts.push(event_fact(&known.component, "port_learned", Weight::Info, detail));
        }
    }

    /// Forgets links that no longer exist, unless they are expected to come back.
    fn forget_absent(&mut self, sample: &FabricSample) {
        let missing = &self.missing;
        self.links.retain(|name, link| {
            let there = sample.links.iter().any(|reading| reading.name == *name);
            if !there {
                link.absent();
            }
            there || missing.contains_key(name)
        });
        self.went_down.retain(|name, _| sample.links.iter().any(|reading| reading.name == *name));
    }

    /// Judges expected links that do not exist. Returns those that have been missing for long enough.
    fn judge_missing(
        &mut self,
        at: Mono,
        sample: &FabricSample,
        components: &mut Vec<Component>,
        facts: &mut Vec<Fact>,
    ) -> Vec<String> {
        let expected: Vec<(String, String)> = if self.configured.is_empty() {
            let learned = self.learned.links.iter();
            learned.map(|(name, known)| (name.clone(), known.component.clone())).collect()
        } else {
            self.configured.iter().map(|expected| (expected.name.clone(), expected.component())).collect()
        };
        let absent: Vec<(String, String)> = expected
            .into_iter()
            .filter(|(name, _)| sample.links.iter().all(|link| link.name != *name))
            .collect();
        self.missing.retain(|name, _| absent.iter().any(|(absent, _)| absent == name));
        let mut gone = Vec::new();
        for (name, component) in absent {
            let mut found = LinkFindings { read: sample.unreadable.is_none(), ..LinkFindings::default() };
            let count = self.missing.entry(name.clone()).or_default();
            *count = count.saturating_add(1);
            let (count, enough) = (*count, MISSING_AFTER);
            let known = self.learned.links.get(&name);
            let (why, action) = self.why_missing(known, sample);
            let passed_over = sample.passed_over.get(name.split('/').next().unwrap_or(&name));
            if let Some(why) = &sample.unreadable {
                found.problem(HealthState::Unknown, why.clone(), RecommendedAction::None);
            } else if let Some(why) = passed_over {
                let reason = format!("it is expected by the configuration and not read: {why}");
                found.problem(HealthState::Unknown, reason, RecommendedAction::None);
            } else if Span(at.0) < self.limits.boot_grace.0 {
                let reason = "it is absent; the host has just booted".to_owned();
                found.problem(HealthState::Unknown, reason, RecommendedAction::None);
            } else if count < enough {
                let reason = format!("it is absent in {count} of {enough} readings");
                found.problem(HealthState::Unknown, reason, RecommendedAction::None);
            } else {
                gone.push(name.clone());
                if count == enough {
                    facts.push(event_fact(
                        &component,
                        "device_missing",
                        Weight::Error,
                        format!("{name}: {why}"),
                    ));
                }
                found.report("/sys/class", format!("{name} is not there"), None);
                found.problem(HealthState::Unhealthy, why, action);
            }
            let shown = self.show(at, component, found, facts);
            components.push(shown);
        }
        gone
    }

    fn why_missing(&self, known: Option<&KnownLink>, sample: &FabricSample) -> (String, RecommendedAction) {
        let Some(known) = known else {
            let why = "the configuration expects it, and it is absent".to_owned();
            return (why, RecommendedAction::ContactSupport);
        };
        let seen_since_boot = known.boot == self.boot.0;
        let serial = known.serial.as_ref().map_or_else(String::new, |serial| format!(" ({serial})"));
        let mut why = match known.place.as_ref().map(|place| (place, sample.slots.get(place))) {
            Some((place, Some(Some(driver)))) => {
                format!(
                    "its device{serial} is gone though its card at {place} is there with the driver {driver}"
                )
            }
            Some((place, Some(None))) => {
                format!("its device{serial} is gone: the card at {place} is there without a driver")
            }
            Some((place, None)) => {
                format!("its device{serial} is gone: the card at {place} is gone, too")
            }
            None => format!("its device{serial} is gone"),
        };
        if seen_since_boot {
            (why, RecommendedAction::RebootNode)
        } else {
            why.push_str("; it has not been there since the host booted");
            (why, RecommendedAction::ContactSupport)
        }
    }

    /// The network as a whole.
    fn whole(
        &mut self,
        at: Mono,
        sample: &FabricSample,
        out: &[String],
        gone: &[String],
        facts: &mut Vec<Fact>,
    ) -> Option<Component> {
        let expected: Vec<&String> = if self.configured.is_empty() {
            self.learned.links.keys().collect()
        } else {
            self.configured.iter().map(|expected| &expected.name).collect()
        };
        if sample.links.is_empty() && expected.is_empty() && sample.unreadable.is_none() {
            return None;
        }
        let mut found = LinkFindings { read: sample.unreadable.is_none(), ..LinkFindings::default() };
        if let Some(why) = &sample.unreadable {
            found.problem(HealthState::Unknown, why.clone(), RecommendedAction::None);
        }
        let count = expected.len();
        let lost: Vec<&str> = out.iter().chain(gone).map(String::as_str).collect();
        if !lost.is_empty() {
            let mut reason = format!("{} of {count} expected links are out: {}", lost.len(), lost.join(", "));
            let times: Vec<Mono> = out.iter().filter_map(|name| self.went_down.get(name).copied()).collect();
            let first = times.iter().min().copied().unwrap_or(at);
            let last = times.iter().max().copied().unwrap_or(at);
            if gone.is_empty() && lost.len() > 1 && lost.len() == count && last.since(first) <= TOGETHER {
                reason = format!(
                    "all {count} expected links went down together: the switch or its power rather than this host"
                );
            }
            found.problem(HealthState::Unhealthy, reason, RecommendedAction::ContactSupport);
        }
        let active = sample.links.iter().filter(|link| is_active(link)).count();
        found.well = match count {
            0 => format!("{active} of {} links are up; none is expected yet", sample.links.len()),
            1 => "the one expected link is up".to_owned(),
            count => format!("all {count} expected links are up"),
        };
        if let Some(note) = slower_than_its_like(&sample.links) {
            found.well = format!("{}; {note}", found.well);
        }
        let how = if self.configured.is_empty() { "learned" } else { "fabric.expected_ports" };
        for name in &expected {
            let known = self.learned.links.get(*name);
            let rate = known.and_then(|known| known.rate).map(|rate| format!("{rate} Gb/s"));
            found.evidence.push(Evidence {
                source: format!("expected ({how})"),
                reading: (*name).clone(),
                limit: rate,
                ..Evidence::default()
            });
        }
        for (device, why) in &sample.passed_over {
            found.report("not read", format!("{device}: {why}"), None);
        }
        Some(self.show(at, WHOLE.to_owned(), found, facts))
    }

    fn show(&mut self, at: Mono, name: String, found: LinkFindings, facts: &mut Vec<Fact>) -> Component {
        let LinkFindings { mut problems, well, evidence, observations, read, fault_at, .. } = found;
        facts.extend(observations.into_iter().map(Fact::Observed));
        problems.sort_by_key(|(state, ..)| std::cmp::Reverse(*state));
        let state = problems.first().map_or(HealthState::Healthy, |(state, ..)| *state);
        let action = problems.iter().map(|(.., action)| *action).max().unwrap_or_default();
        let reasons: Vec<String> = problems.into_iter().map(|(_, reason, _)| reason).collect();
        let reason = if reasons.is_empty() { well } else { reasons.join("; ") };
        let shown = self.shown.entry(name.clone()).or_default();
        let (since, read_at) = (shown.since(state, at), shown.read_at(read, at));
        Component { name, state, reason, action, evidence, read_at, since, fault_at, ..Component::default() }
    }
}

fn is_active(link: &PortReading) -> bool {
    link.state.value().is_some_and(|state| state.active)
}

/// A link that was always slow is as it was learned. If its peers are faster, that is a note and not a verdict: some
/// hosts are built that way.
fn slower_than_its_like(links: &[PortReading]) -> Option<String> {
    let rated = |link: &&PortReading| is_active(link) && link.rate.value().is_some();
    let active: Vec<&PortReading> = links.iter().filter(rated).collect();
    active.iter().find_map(|slow| {
        let rate = *slow.rate.value()?;
        let like: Vec<f64> = active
            .iter()
            .filter(|link| link.kind == slow.kind)
            .filter_map(|link| link.rate.value().copied())
            .collect();
        let fast = like.iter().copied().fold(rate, f64::max);
        let as_fast = like.iter().filter(|other| **other == fast).count();
        let is_slow = rate < fast && as_fast >= 3 && as_fast * 2 > like.len();
        is_slow.then(|| format!("{} runs at {rate} Gb/s, {as_fast} others at {fast} Gb/s", slow.name))
    })
}

fn event_fact(component: &str, event: &str, weight: Weight, detail: String) -> Fact {
    Fact::Observed(Observation {
        component: component.to_owned(),
        event: event.to_owned(),
        weight,
        detail,
        ..Observation::default()
    })
}

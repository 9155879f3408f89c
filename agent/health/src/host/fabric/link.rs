//! The judge of one link: down, flapping, slow, errors.

use std::collections::VecDeque;

use super::FabricLimits;
use super::earlier::{Moment, Recalled};
use super::errors::{Errors, ErrorsFound, TOO_MANY};
use super::limits::SLOW_AFTER;
use super::sample::{LinkKind, LinkState, PortReading};
use crate::host::os::Reading;
use mainstay_model::counter::Counter;
use mainstay_model::health::{Evidence, HealthState, RecommendedAction};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};

/// Maximum number of remembered times of link losses; further losses are added to the newest.
const MAX_REMEMBERED_LOSSES: usize = 64;

/// The remembered readings of a link.
#[derive(Clone, Debug, Default)]
pub(super) struct Link {
    /// Whether it was active at the last reading; `None` before the first.
    active: Option<bool>,
    /// Whether it was ever active.
    pub(super) ever_active: bool,
    /// Readings in a row in which it was active.
    pub(super) active_for: u32,
    down_since: Option<Down>,
    up_since: Option<Mono>,
    /// It was down for long enough to count and is not up for long enough yet.
    out: bool,
    downs: Counter,
    /// Losses of the present outage that the driver has not counted yet.
    owed: u64,
    flaps: VecDeque<(Moment, u64)>,
    slow: u32,
    fast: u32,
    is_slow: bool,
    errors: Errors,
}

#[derive(Clone, Copy, Debug)]
struct Down {
    since: Moment,
    /// It was already down at the first reading, so the start is unknown.
    from_the_start: bool,
}

/// What is expected of a link.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Expectation {
    pub(super) expected: bool,
    pub(super) rate: Option<f64>,
    /// The host booted recently: links may still be coming up.
    pub(super) booting: bool,
}

/// The findings of one reading of a link.
#[derive(Debug, Default)]
pub(super) struct LinkFindings {
    pub(super) problems: Vec<(HealthState, String, RecommendedAction)>,
    pub(super) well: String,
    pub(super) evidence: Vec<Evidence>,
    pub(super) observations: Vec<Observation>,
    pub(super) read: bool,
    /// When it last went down.
    pub(super) fault_at: Option<Mono>,
    /// Expected and down.
    pub(super) out: bool,
}

impl Link {
    /// Restores a link's history from the journal.
    pub(super) fn recall(&mut self, recalled: Recalled) {
        self.flaps = recalled.flaps.into();
        self.ever_active |= !self.flaps.is_empty() || recalled.down_since.is_some();
        self.down_since = recalled.down_since.map(|since| Down { since, from_the_start: false });
        self.active = self.down_since.map(|_| false);
        self.owed = 0;
        for (at, counter, grown) in recalled.errors {
            self.errors.recall(&counter, at.mono(), grown);
        }
    }

    /// The link did not exist at this reading. When its device returns, only the history of flaps applies to it.
    pub(super) fn absent(&mut self) {
        let (flaps, ever_active) = (std::mem::take(&mut self.flaps), self.ever_active);
        *self = Link { flaps, ever_active, ..Link::default() };
    }

    /// Processes a reading.
    pub(super) fn step(
        &mut self,
        at: Mono,
        link: &PortReading,
        expectation: Expectation,
        limits: &FabricLimits,
    ) -> LinkFindings {
        let mut findings = LinkFindings::default();
        let lost = self.losses(link);
        match &link.state {
            Reading::Value(state) => {
                findings.read = true;
                findings.report(&source(link, "state"), state.to_string(), None);
                let steady = self.active == Some(true) && state.active && lost == 0;
                self.follow(at, link, state, lost, expectation.booting, &mut findings);
                self.judge_down(at, state, expectation, limits, &mut findings);
                self.judge_rate(link, state.active, expectation.rate, &mut findings);
                let errors = self.errors.step(at, link, steady, &limits.errors);
                for (counter, grown, reason) in &errors.started {
                    let component = link.kind.component(&link.name);
                    let serial = link.identity.serial.as_deref();
                    let grown = ("grown", grown.to_string());
                    findings.observe(&component, TOO_MANY, Weight::Warning, reason.clone(), serial, grown);
                    if let Some(last) = findings.observations.last_mut() {
                        last.values.insert("counter".to_owned(), (*counter).to_owned());
                    }
                }
                findings.take(errors);
            }
            Reading::NotAvailable(why) | Reading::Failed(why) => {
                findings.problem(HealthState::Unknown, format!("its state cannot be read: {why}"), NOTHING);
            }
        }
        self.judge_flaps(at, limits, &mut findings);
        let flapped = self.flaps.back().map(|(when, _)| *when);
        let latest = flapped.max(self.down_since.map(|down| down.since));
        findings.fault_at = latest.map(Moment::mono);
        if let Some(interface) = &link.interface {
            findings.report(&source(link, "interface"), interface.clone(), None);
        }
        if !link.near.is_empty() {
            findings.report("PCI topology", format!("near {}", link.near.join(", ")), None);
        }
        findings
    }

    /// Link losses since the last reading, as counted by the driver.
    fn losses(&mut self, link: &PortReading) -> u64 {
        let counted = ["link_downed", "carrier_down_count"].iter().find_map(|name| link.counters.get(*name));
        counted.map_or(0, |count| self.downs.step(*count))
    }

    /// Follows the link's changes between up and down and reports them.
    fn follow(
        &mut self,
        at: Mono,
        link: &PortReading,
        state: &LinkState,
        lost: u64,
        booting: bool,
        findings: &mut LinkFindings,
    ) {
        // Links go up and down while drivers are loaded and the fabric registers them: that is not flapping.
        let lost = if booting { 0 } else { lost };
        let component = &link.kind.component(&link.name);
        let serial = link.identity.serial.as_deref();
        match (self.active, state.active) {
            (Some(true) | None, true) => {
                if lost > 0 && self.active.is_some() {
                    self.flapped(at, lost);
                    let detail = format!(
                        "{} lost its link {} between two readings and has it again",
                        link.name,
                        times(lost)
                    );
                    let flaps = ("flaps", lost.to_string());
                    findings.observe(component, "port_flapped", Weight::Warning, detail, serial, flaps);
                }
            }
            (Some(true), false) => {
                // The driver may count this loss now or later; any further count is another loss.
                self.flapped(at, lost.saturating_sub(1));
                self.owed = 1_u64.saturating_sub(lost);
                self.down_since = Some(Down { since: Moment::at(at), from_the_start: false });
                let detail = format!("{} went down ({state}): {}", link.name, state.meaning());
                let now = ("state", state.to_string());
                findings.observe(component, "port_down", Weight::Warning, detail, serial, now);
            }
            (None, false) => {
                self.down_since = Some(Down { since: Moment::at(at), from_the_start: true });
            }
            (Some(false), false) => self.bounced(at, lost),
            (Some(false), true) => {
                self.bounced(at, lost);
                // A link that comes up for the first time did not flap.
                let flaps = u64::from(self.ever_active && !booting);
                self.flapped(at, flaps);
                let down = self.down_since.map_or(Span(0), |down| Moment::at(at).since(down.since));
                let detail = format!("{} is up after {:.0} s", link.name, down.as_seconds());
                let flaps = ("flaps", flaps.to_string());
                findings.observe(component, "port_up", Weight::Info, detail, serial, flaps);
                if let Some(last) = findings.observations.last_mut() {
                    last.values.insert("down_seconds".to_owned(), format!("{:.0}", down.as_seconds()));
                }
            }
        }
        self.active_for = if state.active { self.active_for.saturating_add(1) } else { 0 };
        self.ever_active |= state.active;
        if state.active && self.active != Some(true) {
            self.up_since = Some(at);
        }
        self.active = Some(state.active);
    }

    /// Losses while it is down: it was up briefly between two readings.
    fn bounced(&mut self, at: Mono, lost: u64) {
        let more = lost.saturating_sub(self.owed);
        self.owed = self.owed.saturating_sub(lost);
        if self.ever_active {
            self.flapped(at, more);
        }
    }

    fn flapped(&mut self, at: Mono, flaps: u64) {
        if flaps == 0 {
            return;
        }
        if self.flaps.len() >= MAX_REMEMBERED_LOSSES {
            self.flaps.pop_front();
        }
        self.flaps.push_back((Moment::at(at), flaps));
    }

    fn judge_down(
        &mut self,
        at: Mono,
        state: &LinkState,
        expectation: Expectation,
        limits: &FabricLimits,
        findings: &mut LinkFindings,
    ) {
        if !expectation.expected {
            (self.out, findings.out) = (false, false);
            findings.well = match (state.active, self.ever_active) {
                (true, _) => state.to_string(),
                (false, true) => format!("{state}: not expected to be up"),
                (false, false) => format!("not in use ({state})"),
            };
            return;
        }
        if state.active {
            let up = self.up_since.map_or(Span(0), |since| at.since(since));
            if self.out && up < limits.recover_after.0 {
                let reason = format!("active again for {:.0} s of {}", up.as_seconds(), limits.recover_after);
                findings.problem(HealthState::Unhealthy, reason, RecommendedAction::ContactSupport);
                return;
            }
            (self.out, self.down_since) = (false, None);
            findings.well = state.to_string();
            return;
        }
        let Some(down) = self.down_since else { return };
        let lasted = Moment::at(at).since(down.since);
        let reason = format!("{state} for {:.0} s: {}", lasted.as_seconds(), state.meaning());
        if lasted >= limits.down_after.0 && !expectation.booting {
            self.out = true;
        }
        findings.out = self.out;
        if self.out {
            findings.problem(HealthState::Unhealthy, reason, RecommendedAction::ContactSupport);
        } else if expectation.booting {
            findings.problem(HealthState::Unknown, format!("{reason}; the host has just booted"), NOTHING);
        } else if down.from_the_start {
            findings.problem(
                HealthState::Unknown,
                format!("{reason} (counts from {})", limits.down_after),
                NOTHING,
            );
        } else {
            findings.well = format!("{reason} (counts from {})", limits.down_after);
        }
    }

    fn judge_rate(
        &mut self,
        link: &PortReading,
        active: bool,
        expected: Option<f64>,
        findings: &mut LinkFindings,
    ) {
        // A link that is down reports a meaningless rate.
        let Some(rate) = link.rate.value().copied().filter(|_| active) else {
            (self.slow, self.fast) = (0, 0);
            return;
        };
        let limit = expected.map(|expected| format!("{expected} Gb/s"));
        findings.report(&source(link, "rate"), format!("{rate} Gb/s"), limit);
        findings.well = format!("{}, {rate} Gb/s", findings.well);
        let Some(expected) = expected else { return };
        let slow = rate < expected * 0.99;
        (self.slow, self.fast) = if slow { (self.slow + 1, 0) } else { (0, self.fast.saturating_add(1)) };
        if self.slow >= SLOW_AFTER {
            self.is_slow = true;
        } else if self.fast >= SLOW_AFTER {
            self.is_slow = false;
        }
        if self.is_slow {
            let reason = format!(
                "it runs at {rate} Gb/s instead of {expected} Gb/s: cable or transceiver, or the switch's port"
            );
            findings.problem(HealthState::Degraded, reason, RecommendedAction::ContactSupport);
        }
    }

    fn judge_flaps(&mut self, at: Mono, limits: &FabricLimits, findings: &mut LinkFindings) {
        let window = limits.flap_window.0;
        while self.flaps.front().is_some_and(|(when, _)| Moment::at(at).since(*when) > window) {
            self.flaps.pop_front();
        }
        let flaps = self.flaps.iter().fold(0_u64, |sum, (_, flaps)| sum.saturating_add(*flaps));
        let Some((last, _)) = self.flaps.back() else { return };
        let minutes = Moment::at(at).since(*last).0 / 60_000_000_000;
        let reading = format!("{} within {}, the last {minutes} min ago", times(flaps), limits.flap_window);
        findings.report("flaps", reading, Some(limits.flaps.to_string()));
        if flaps >= limits.flaps {
            let reason = format!(
                "it went down and came back {} within {}, the last time {minutes} min ago: cable or transceiver",
                times(flaps),
                limits.flap_window
            );
            findings.problem(HealthState::Unhealthy, reason, RecommendedAction::ContactSupport);
        }
    }
}

const NOTHING: RecommendedAction = RecommendedAction::None;

impl LinkFindings {
    pub(super) fn problem(&mut self, state: HealthState, reason: String, action: RecommendedAction) {
        self.problems.push((state, reason, action));
    }

    pub(super) fn report(&mut self, source: &str, reading: String, limit: Option<String>) {
        self.evidence.push(Evidence { source: source.to_owned(), reading, limit, ..Evidence::default() });
    }

    fn take(&mut self, errors: ErrorsFound) {
        self.problems.extend(errors.problems);
        self.evidence.extend(errors.evidence);
    }

    fn observe(
        &mut self,
        component: &str,
        event: &str,
        weight: Weight,
        detail: String,
        serial: Option<&str>,
        value: (&str, String),
    ) {
        let mut observation = Observation {
            component: component.to_owned(),
            event: event.to_owned(),
            weight,
            detail,
            ..Observation::default()
        };
        observation.values.insert(value.0.to_owned(), value.1);
        if let Some(serial) = serial {
            observation.values.insert("serial".to_owned(), serial.to_owned());
        }
        self.observations.push(observation);
    }
}

/// The source of a reading of a link.
fn source(link: &PortReading, what: &str) -> String {
    match (link.kind, link.name.split_once('/')) {
        (LinkKind::Ethernet, _) | (_, None) => {
            let file = match what {
                "state" => "carrier",
                "rate" => "speed",
                other => other,
            };
            format!("/sys/class/net/{}/{file}", link.name)
        }
        (_, Some((device, port))) => format!("/sys/class/infiniband/{device}/ports/{port}/{what}"),
    }
}

fn times(count: u64) -> String {
    match count {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        more => format!("{more} times"),
    }
}

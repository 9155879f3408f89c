//! The faults that are held against one device, by code.

use std::collections::{BTreeMap, BTreeSet};

use super::history::{History, Terms};
use super::limits::DeviceLimits;
use super::line;
use crate::base::time::{Mono, Span};
use crate::model::health::{Evidence, HealthState, RecommendedAction};

/// What a line of the log says of a device.
#[derive(Clone, Debug)]
pub(super) struct Came {
    pub(super) at: Mono,
    pub(super) kind: &'static str,
    pub(super) code: u32,
    pub(super) name: String,
    pub(super) state: HealthState,
    pub(super) action: RecommendedAction,
    pub(super) line: String,
    /// How sure that is: less where only a number is known, or not even what it means.
    pub(super) confidence: f64,
}

/// Codes that tell of one fault in different words share their past.
fn one_fault(code: u32) -> u32 {
    match code {
        120 => 119,
        109 | 158 => 46,
        code => code,
    }
}

#[derive(Clone, Debug)]
struct Fault {
    last: Mono,
    count: u64,
    came: Came,
    /// Codes in its wake.
    echoes: BTreeSet<u32>,
    /// What had been tried against it did not help.
    again: bool,
}

/// What the driver last said the device needs.
#[derive(Clone, Debug)]
struct DriverSays {
    at: Mono,
    number: u32,
    line: String,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Faults {
    held: BTreeMap<u32, Fault>,
    driver: Option<DriverSays>,
    history: History,
    /// Nothing came in this boot.
    of_another_boot: bool,
}

impl Faults {
    /// A fault came; what came shortly before and was only its echo is folded into it.
    pub(super) fn came(&mut self, came: Came, echoes: &BTreeSet<u32>, limits: &DeviceLimits) {
        let window = limits.echo_window.0;
        let terms = Terms { unhealed_after: limits.unhealed_after.0, remembered: limits.remembered.0 };
        let action = self.history.came(one_fault(came.code), came.at, came.action, terms);
        let again = action > came.action;
        let came = Came { action, ..came };
        self.of_another_boot = false;
        let earlier: BTreeSet<u32> = self
            .held
            .iter()
            .filter(|(code, fault)| echoes.contains(code) && came.at.since(fault.last) <= window)
            .map(|(code, _)| *code)
            .collect();
        self.held.retain(|code, _| !earlier.contains(code));
        let fault = self.held.entry(came.code).or_insert_with(|| Fault {
            last: came.at,
            count: 0,
            came: came.clone(),
            echoes: BTreeSet::new(),
            again,
        });
        fault.again |= again;
        fault.count = fault.count.saturating_add(1);
        // An event that was taken back is told better now.
        if fault.count == 1 {
            fault.came = came.clone();
        }
        fault.last = fault.last.max(came.at);
        fault.echoes.extend(earlier);
        // The heaviest of its lines is the one that counts and is shown.
        if (came.state, came.action) > (fault.came.state, fault.came.action) {
            fault.came = came;
        }
    }

    /// A code came of which nobody knows what it means. Once it is an event; what comes again and again is worth a
    /// person's look.
    pub(super) fn unknown(
        &mut self,
        at: Mono,
        kind: &'static str,
        code: u32,
        line: &str,
        limits: &DeviceLimits,
    ) {
        let mut came = Came::unknown(at, kind, code, line);
        if self.history.of_unknown(code, at, limits.link_burst.0, limits.repeats_window.0)
            >= limits.unknown_codes
        {
            (came.state, came.action) = (HealthState::Degraded, RecommendedAction::ContactSupport);
        }
        self.came(came, &BTreeSet::new(), limits);
    }

    /// Takes the last of a code back: it is told again, with more detail.
    pub(super) fn untell(&mut self, code: u32) {
        if let Some(fault) = self.held.get_mut(&code) {
            fault.count = fault.count.saturating_sub(1);
        }
    }

    /// Folds `code` into the fault `cause`, if that is held.
    pub(super) fn echo(&mut self, at: Mono, cause: u32, code: u32) -> bool {
        let Some(fault) = self.held.get_mut(&cause) else { return false };
        fault.last = fault.last.max(at);
        fault.echoes.insert(code);
        true
    }

    /// Folds `code` into the newest fault in whose wake it may come.
    pub(super) fn echo_of_any(&mut self, at: Mono, causes: &BTreeSet<u32>, code: u32, window: Span) -> bool {
        let cause = self
            .held
            .iter()
            .filter(|(held, fault)| causes.contains(held) && at.since(fault.last) <= window)
            .max_by_key(|(_, fault)| fault.last)
            .map(|(held, _)| *held);
        cause.is_some_and(|cause| self.echo(at, cause, code))
    }

    /// The driver says what the device needs; "nothing" means that it is well again.
    pub(super) fn driver_says(&mut self, at: Mono, number: u32, line: &str, window: Span) {
        if number == 0 {
            self.held.clear();
            self.driver = None;
            self.history.was_reset();
            return;
        }
        self.of_another_boot = false;
        let newest = self.held.values_mut().max_by_key(|fault| fault.last);
        if let Some(fault) = newest.filter(|fault| at.since(fault.last) <= window) {
            fault.echoes.insert(super::RECOVERY_ACTION);
        }
        self.driver = Some(DriverSays { at, number, line: line.to_owned() });
    }

    pub(super) fn cancel(&mut self, codes: &BTreeSet<u32>) {
        self.held.retain(|code, _| !codes.contains(code));
    }

    /// What new processes mend is over some time after it was last seen.
    pub(super) fn forget_passed(&mut self, now: Mono, after: Span) {
        let passing = |action| action <= RecommendedAction::RestartProcess;
        self.held.retain(|_, fault| !passing(fault.came.action) || now.since(fault.last) <= after);
    }

    /// Another boot begins: all is over but what is remembered of what was tried.
    pub(super) fn next_boot(&mut self) {
        self.held.clear();
        self.driver = None;
        self.history.was_booted();
        self.of_another_boot = true;
    }

    /// Whether all that is known is of another boot.
    pub(super) fn are_of_another_boot(&self) -> bool {
        self.of_another_boot
    }

    /// Counts an error of a link. Returns how many there were within a week.
    pub(super) fn on_link(&mut self, link: u32, at: Mono, limits: &DeviceLimits) -> u32 {
        self.history.on_link(link, at, limits.link_burst.0, limits.remembered.0)
    }

    /// An operator knows of all that came until then.
    pub(super) fn forget_until(&mut self, at: Mono) {
        self.held.retain(|_, fault| fault.last > at);
        self.driver = self.driver.take().filter(|says| says.at > at);
    }

    pub(super) fn forget_what_a_reset_heals(&mut self, at: Mono) {
        let heals = |action, seen| action <= RecommendedAction::ResetDevice && seen <= at;
        self.held.retain(|_, fault| !heals(fault.came.action, fault.last));
        self.history.was_reset();
        self.driver = self.driver.take().filter(|says| !heals(says.means().1, says.at));
    }

    /// When the newest of what is held was last seen.
    pub(super) fn last(&self) -> Option<Mono> {
        let held = self.held.values().map(|fault| fault.last);
        held.chain(self.driver.iter().map(|says| says.at)).max()
    }

    /// Whether nothing is held.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty() && self.driver.is_none()
    }

    /// State and action of all that is held. What the driver says is needed weighs more than what the table thinks.
    pub(super) fn weight(&self) -> (HealthState, RecommendedAction) {
        let held = self.held.values().map(|fault| (fault.came.state, fault.came.action));
        let said = self.driver.iter().map(DriverSays::means);
        let (mut state, mut action) = (HealthState::Healthy, RecommendedAction::None);
        for (of_one, needed) in held.chain(said) {
            (state, action) = (state.max(of_one), action.max(needed));
        }
        (state, action)
    }

    /// When the first of what makes the device so bad came.
    pub(super) fn began(&self, state: HealthState) -> Option<Mono> {
        let held = self.held.values().map(|fault| (fault.came.state, fault.came.at));
        let said = self.driver.iter().map(|says| (says.means().0, says.at));
        held.chain(said).filter(|(of_one, _)| *of_one == state).map(|(_, at)| at).min()
    }

    /// How sure it is that the device is in this state.
    pub(super) fn confidence(&self, state: HealthState) -> Option<f64> {
        let held = self.held.values().map(|fault| (fault.came.state, fault.came.confidence));
        let said = self.driver.iter().map(|says| (says.means().0, 1.0));
        held.chain(said).filter(|(of_one, _)| *of_one == state).map(|(_, sure)| sure).reduce(f64::max)
    }

    /// Heaviest first.
    pub(super) fn reasons(&self) -> Vec<String> {
        let mut faults: Vec<&Fault> = self.held.values().collect();
        faults.sort_by_key(|fault| (std::cmp::Reverse(fault.came.state), fault.came.at));
        let mut reasons: Vec<String> = faults.into_iter().map(Fault::reported).collect();
        if let Some(says) = &self.driver {
            reasons.push(format!("the driver says that it needs {}", says.words()));
        }
        reasons
    }

    pub(super) fn evidence(&self) -> Vec<Evidence> {
        let lines = self.held.values().map(|fault| line(&fault.came.line));
        lines.chain(self.driver.iter().map(|says| line(&says.line))).collect()
    }
}

impl Fault {
    fn reported(&self) -> String {
        let Came { kind, code, name, .. } = &self.came;
        let times = if self.count > 1 { format!(", {} times", self.count) } else { String::new() };
        let wake: Vec<String> = self.echoes.iter().map(u32::to_string).collect();
        let wake =
            if wake.is_empty() { String::new() } else { format!(" (in its wake {})", wake.join(", ")) };
        let again = if self.again { "; it came again after what was tried against it" } else { "" };
        match *kind {
            "" => format!("{name}{times}{wake}{again}"),
            kind => format!("{kind} {code}: {name}{times}{wake}{again}"),
        }
    }
}

impl DriverSays {
    fn means(&self) -> (HealthState, RecommendedAction) {
        let (state, action, _) = recovery(self.number);
        (state, action)
    }

    fn words(&self) -> &'static str {
        recovery(self.number).2
    }
}

/// What the driver's numbers for its recovery action mean (NVML_DEVICE_RECOVERY_ACTION), with what is needed in words.
pub(super) fn recovery(number: u32) -> (HealthState, RecommendedAction, &'static str) {
    use HealthState::{Degraded, Unhealthy};
    match number {
        1 => (Unhealthy, RecommendedAction::ResetDevice, "a reset"),
        2 => (Unhealthy, RecommendedAction::RebootNode, "a reboot of the node"),
        3 => (Degraded, RecommendedAction::RestartProcess, "its peers drained"),
        4 => (Degraded, RecommendedAction::ResetDevice, "to be drained and reset"),
        5 => (Degraded, RecommendedAction::ContactSupport, "its IMEX domain recovered"),
        6 => (Unhealthy, RecommendedAction::ResetDevice, "a reset of its bus"),
        7 => (Unhealthy, RecommendedAction::RebootNode, "a reboot of the system"),
        _ => (Degraded, RecommendedAction::ContactSupport, "what this version does not know"),
    }
}

//! The faults of one device, by code.

use std::collections::{BTreeMap, BTreeSet};

use super::history::{History, Terms};
use super::limits::{ECHO_WINDOW, FAULT_WINDOW, LINK_BURST, REPEATS_WINDOW, UNHEALED_AFTER, UNKNOWN_CODES};
use super::line;
use mainstay_model::fault_code::FaultCode;
use mainstay_model::health::{Evidence, HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};

/// What a log line reports about a device.
#[derive(Clone, Debug)]
pub(super) struct FaultReport {
    pub(super) at: Mono,
    pub(super) code: FaultCode,
    pub(super) name: String,
    pub(super) state: HealthState,
    pub(super) action: RecommendedAction,
    pub(super) line: String,
    /// Confidence: lower if only a number is known, or if its meaning is unknown.
    pub(super) confidence: f64,
}

/// Codes that report the same fault in different words share their history.
fn one_fault(code: FaultCode) -> FaultCode {
    match code {
        FaultCode::Xid(120) => FaultCode::Xid(119),
        FaultCode::Xid(109 | 158) => FaultCode::Xid(46),
        code => code,
    }
}

fn xid(code: FaultCode) -> Option<u32> {
    match code {
        FaultCode::Xid(number) => Some(number),
        FaultCode::Sxid(_) | FaultCode::KernelLine(_) => None,
    }
}

#[derive(Clone, Debug)]
struct Fault {
    last: Mono,
    count: u64,
    report: FaultReport,
    /// XIDs that followed as a consequence.
    echoes: BTreeSet<u32>,
    /// An earlier remedy did not help.
    again: bool,
}

/// The driver's last recommended recovery action.
#[derive(Clone, Debug)]
struct DriverSays {
    at: Mono,
    number: u32,
    line: String,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Faults {
    faults: BTreeMap<FaultCode, Fault>,
    driver: Option<DriverSays>,
    history: History,
    /// Nothing was logged in this boot.
    of_another_boot: bool,
}

impl Faults {
    /// Adds a fault. XIDs shortly before it that were only its echo are folded into it.
    pub(super) fn record(&mut self, report: FaultReport, echoes: &BTreeSet<u32>) {
        let terms = Terms { unhealed_after: UNHEALED_AFTER, remembered: FAULT_WINDOW };
        let action = self.history.record(one_fault(report.code), report.at, report.action, terms);
        let again = action > report.action;
        let report = FaultReport { action, ..report };
        self.of_another_boot = false;
        let earlier: BTreeSet<u32> = self
            .faults
            .iter()
            .filter(|(_, fault)| report.at.since(fault.last) <= ECHO_WINDOW)
            .filter_map(|(code, _)| xid(*code).filter(|code| echoes.contains(code)))
            .collect();
        self.cancel(&earlier);
        let fault = self.faults.entry(report.code).or_insert_with(|| Fault {
            last: report.at,
            count: 0,
            report: report.clone(),
            echoes: BTreeSet::new(),
            again,
        });
        fault.again |= again;
        fault.count = fault.count.saturating_add(1);
        // The event was withdrawn and is now reported in more detail.
        if fault.count == 1 {
            fault.report = report.clone();
        }
        fault.last = fault.last.max(report.at);
        fault.echoes.extend(earlier);
        // The most severe of its lines counts and is shown.
        if (report.state, report.action) > (fault.report.state, fault.report.action) {
            fault.report = report;
        }
    }

    /// Adds a code with unknown meaning. Once, it is an event. If it recurs, a person should look at it.
    pub(super) fn unknown(&mut self, at: Mono, code: FaultCode, line: &str) {
        let mut report = FaultReport::unknown(at, code, line);
        if self.history.of_unknown(code, at, LINK_BURST, REPEATS_WINDOW) >= UNKNOWN_CODES {
            (report.state, report.action) = (HealthState::Degraded, RecommendedAction::ContactSupport);
        }
        self.record(report, &BTreeSet::new());
    }

    /// Withdraws the last fault with this XID: it is reported again in more detail.
    pub(super) fn retract(&mut self, code: u32) {
        if let Some(fault) = self.faults.get_mut(&FaultCode::Xid(code)) {
            fault.count = fault.count.saturating_sub(1);
        }
    }

    /// Folds the XID `code` into the fault with the XID `cause`, if there is one.
    pub(super) fn echo(&mut self, at: Mono, cause: u32, code: u32) -> bool {
        let Some(fault) = self.faults.get_mut(&FaultCode::Xid(cause)) else { return false };
        fault.last = fault.last.max(at);
        fault.echoes.insert(code);
        true
    }

    /// Folds the XID `code` into the newest fault that it can follow.
    pub(super) fn echo_of_any(&mut self, at: Mono, causes: &BTreeSet<u32>, code: u32) -> bool {
        let cause = self
            .faults
            .iter()
            .filter_map(|(faults, fault)| Some((xid(*faults)?, fault.last)))
            .filter(|(faults, last)| causes.contains(faults) && at.since(*last) <= ECHO_WINDOW)
            .max_by_key(|(_, last)| *last);
        cause.is_some_and(|(cause, _)| self.echo(at, cause, code))
    }

    /// The driver reports the recovery action that the device needs; 0 means healthy again.
    pub(super) fn driver_reported(&mut self, at: Mono, number: u32, line: &str) {
        if number == 0 {
            self.faults.clear();
            self.driver = None;
            self.history.was_reset();
            return;
        }
        self.of_another_boot = false;
        let newest = self.faults.values_mut().max_by_key(|fault| fault.last);
        if let Some(fault) = newest.filter(|fault| at.since(fault.last) <= ECHO_WINDOW) {
            fault.echoes.insert(super::RECOVERY_ACTION);
        }
        self.driver = Some(DriverSays { at, number, line: line.to_owned() });
    }

    /// Ends the faults with these XIDs.
    pub(super) fn cancel(&mut self, codes: &BTreeSet<u32>) {
        self.faults.retain(|code, _| xid(*code).is_none_or(|code| !codes.contains(&code)));
    }

    /// A fault that new processes fix ends some time after it was last seen.
    pub(super) fn forget_passed(&mut self, now: Mono, after: Span) {
        let passing = |action| action <= RecommendedAction::RestartProcess;
        self.faults.retain(|_, fault| !passing(fault.report.action) || now.since(fault.last) <= after);
    }

    /// Another boot starts: all faults are over, but the attempted remedies are kept.
    pub(super) fn next_boot(&mut self) {
        self.faults.clear();
        self.driver = None;
        self.history.was_booted();
        self.of_another_boot = true;
    }

    /// Whether all information is from another boot.
    pub(super) fn are_of_another_boot(&self) -> bool {
        self.of_another_boot
    }

    /// Counts an error of a link. Returns the number of errors within a week.
    pub(super) fn on_link(&mut self, link: u32, at: Mono) -> u32 {
        self.history.on_link(link, at, LINK_BURST, FAULT_WINDOW)
    }

    /// An operator acknowledged everything until `at`.
    pub(super) fn forget_until(&mut self, at: Mono) {
        self.faults.retain(|_, fault| fault.last > at);
        self.driver = self.driver.take().filter(|says| says.at > at);
    }

    pub(super) fn forget_what_a_reset_heals(&mut self, at: Mono) {
        let heals = |action, seen| action <= RecommendedAction::ResetDevice && seen <= at;
        self.faults.retain(|_, fault| !heals(fault.report.action, fault.last));
        self.history.was_reset();
        self.driver = self.driver.take().filter(|says| !heals(says.means().1, says.at));
    }

    /// When the newest fault was last seen.
    pub(super) fn last(&self) -> Option<Mono> {
        let faults = self.faults.values().map(|fault| fault.last);
        faults.chain(self.driver.iter().map(|says| says.at)).max()
    }

    /// Whether there are no faults.
    pub(super) fn is_empty(&self) -> bool {
        self.faults.is_empty() && self.driver.is_none()
    }

    /// State and action of all faults. The driver's recovery action overrides the table.
    pub(super) fn weight(&self) -> (HealthState, RecommendedAction) {
        let faults = self.faults.values().map(|fault| (fault.report.state, fault.report.action));
        let stated = self.driver.iter().map(DriverSays::means);
        let (mut state, mut action) = (HealthState::Healthy, RecommendedAction::None);
        for (of_one, needed) in faults.chain(stated) {
            (state, action) = (state.max(of_one), action.max(needed));
        }
        (state, action)
    }

    /// When the first fault of this severity was logged.
    pub(super) fn began(&self, state: HealthState) -> Option<Mono> {
        let faults = self.faults.values().map(|fault| (fault.report.state, fault.report.at));
        let stated = self.driver.iter().map(|says| (says.means().0, says.at));
        faults.chain(stated).filter(|(of_one, _)| *of_one == state).map(|(_, at)| at).min()
    }

    /// Confidence that the device is in this state.
    pub(super) fn confidence(&self, state: HealthState) -> Option<f64> {
        let faults = self.faults.values().map(|fault| (fault.report.state, fault.report.confidence));
        let stated = self.driver.iter().map(|says| (says.means().0, 1.0));
        faults.chain(stated).filter(|(of_one, _)| *of_one == state).map(|(_, sure)| sure).reduce(f64::max)
    }

    /// Most severe first.
    pub(super) fn reasons(&self) -> Vec<String> {
        let mut faults: Vec<&Fault> = self.faults.values().collect();
        faults.sort_by_key(|fault| (std::cmp::Reverse(fault.report.state), fault.report.at));
        let mut reasons: Vec<String> = faults.into_iter().map(Fault::describe).collect();
        if let Some(says) = &self.driver {
            reasons.push(says.describe());
        }
        reasons
    }

    pub(super) fn evidence(&self) -> Vec<Evidence> {
        let faults =
            self.faults.values().map(|fault| line(&fault.report.line, fault.report.code, &fault.report.name));
        let recovery = FaultCode::Xid(super::RECOVERY_ACTION);
        faults.chain(self.driver.iter().map(|says| line(&says.line, recovery, &says.describe()))).collect()
    }
}

impl Fault {
    fn describe(&self) -> String {
        let FaultReport { code, name, .. } = &self.report;
        let times = if self.count > 1 { format!(", {} times", self.count) } else { String::new() };
        let wake: Vec<String> = self.echoes.iter().map(u32::to_string).collect();
        let wake =
            if wake.is_empty() { String::new() } else { format!(" (followed by {})", wake.join(", ")) };
        let again = if self.again { "; it recurred after the attempted repair" } else { "" };
        match code {
            FaultCode::KernelLine(_) => format!("{name}{times}{wake}{again}"),
            code => format!("{code}: {name}{times}{wake}{again}"),
        }
    }
}

impl DriverSays {
    fn means(&self) -> (HealthState, RecommendedAction) {
        let (state, action, _) = recovery(self.number);
        (state, action)
    }

    fn describe(&self) -> String {
        format!("the driver says that it needs {}", recovery(self.number).2)
    }
}

/// The driver's recovery actions (NVML_DEVICE_RECOVERY_ACTION): state, action, description.
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

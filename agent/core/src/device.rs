//! The judge of GPUs and of the switches between them, one component each: `gpu.0000:3b:00`, `nvswitch.0000:c1:00`.
//!
//! - A fault of a program condemns no GPU: that a kernel was wrong says nothing of what it ran on.
//! - What follows in the wake of a fault is folded into it; the driver's own word on what is needed goes with it.
//! - A fault stays until its condition is gone: until the driver says so or was loaded anew (what a reset heals),
//!   until the next boot, or, where new processes are all that is needed, for a while.
//! - What cannot be read is unknown, and heavier evidence still counts.

mod driver;
mod faults;
mod history;
mod limits;
mod operator;
mod programs;
mod reading;

use std::collections::BTreeMap;

pub use limits::DeviceLimits;

pub use reading::{
    DeviceReport, DriverTrouble, GpuIdentity, GpuReading, GpuTrouble, PcieLink, ProbeAnswer, Read,
    RemappedRows,
};

use driver::{Driver, Readings};
use faults::{Came, Faults};
use programs::Programs;

use crate::catalog::{Blame, Catalog, CodeMeaning, NvlinkMeaning};
use crate::entry::Fact;
use crate::health::{Component, Evidence, HealthState, RecommendedAction};
use crate::kernel::{KernelClass, KernelReport, Sxid, Xid};
use crate::pci::PciAddress;
use crate::time::Mono;

/// XID of a GPU that has fallen off the bus.
const OFF_BUS: u32 = 79;
/// Stands for a GPU that could not be initialised among the codes, of which none is so large.
const NOT_INITIALISED: u32 = u32::MAX;
/// XID by which the driver says what a GPU needs.
const RECOVERY_ACTION: u32 = 154;

/// Judges GPUs and switches from what the kernel log tells of them.
#[derive(Clone, Debug)]
pub struct DeviceJudge {
    catalog: Catalog,
    limits: DeviceLimits,
    gpus: BTreeMap<PciAddress, Gpu>,
    switches: BTreeMap<PciAddress, Switch>,
    driver: Driver,
}

#[derive(Clone, Debug, Default)]
struct Gpu {
    faults: Faults,
    programs: Programs,
    readings: Readings,
    /// The driver counted it before and does not any more.
    missing: bool,
    shown: Shown,
}

#[derive(Clone, Debug, Default)]
struct Switch {
    name: String,
    faults: Faults,
    shown: Shown,
}

/// What was last said of a component, and since when.
#[derive(Clone, Debug, Default)]
struct Shown {
    said: Option<(HealthState, Mono)>,
}

impl Shown {
    fn since(&mut self, state: HealthState, now: Mono) -> Mono {
        let since = self.said.filter(|(before, _)| *before == state).map_or(now, |(_, since)| since);
        self.said = Some((state, since));
        since
    }
}

impl DeviceJudge {
    /// A judge that knows of no device yet.
    pub fn new(catalog: Catalog, limits: DeviceLimits) -> DeviceJudge {
        let (gpus, switches) = (BTreeMap::new(), BTreeMap::new());
        DeviceJudge { catalog, limits, gpus, switches, driver: Driver::default() }
    }

    /// Takes in what came of asking the driver at `at`. Returns what is worth a place in the journal.
    pub fn report(&mut self, at: Mono, report: DeviceReport) -> Option<Fact> {
        let before = self.driver.report.as_ref().map(|(_, report)| report);
        let silent_since = match before {
            Some(DeviceReport::Silent { since }) => Some(*since),
            _ => None,
        };
        let fact = match (silent_since, &report) {
            (None, DeviceReport::Silent { since }) => Some(Fact::GpuDriverSilent { since: *since }),
            (Some(since), DeviceReport::Answered(_)) => {
                Some(Fact::GpuDriverAnswered { after: at.since(since) })
            }
            _ => None,
        };
        if let DeviceReport::Answered(answer) = &report {
            self.driver.read_at = Some(at);
            if let ProbeAnswer::Gpus { gpus, .. } = answer {
                self.readings(at, gpus);
            }
        }
        self.driver.report = Some((at, report));
        fact
    }

    fn readings(&mut self, at: Mono, readings: &[GpuReading]) {
        let named = |address: PciAddress| {
            readings
                .iter()
                .any(|reading| reading.identity.as_ref().is_some_and(|known| known.address == address))
        };
        for (address, gpu) in &mut self.gpus {
            gpu.missing = gpu.readings.last.is_some() && !named(*address);
        }
        for reading in readings {
            if let Some(identity) = &reading.identity {
                self.gpus.entry(identity.address).or_default().readings.take_in(at, reading);
            }
        }
    }

    /// Takes in what the kernel log told at `at`; facts of other kinds are passed over. After a restart the facts of
    /// this boot are taken in again, in their order.
    pub fn take_in(&mut self, at: Mono, fact: &Fact) {
        match fact {
            Fact::Xid(xid) => self.xid(at, xid),
            Fact::Sxid(sxid) => self.sxid(at, sxid),
            Fact::KernelReport(report) => self.kernel_report(at, report),
            _ => {}
        }
    }

    /// The components as they stand at `now`.
    pub fn components(&mut self, now: Mono) -> Vec<Component> {
        let alone = self.only_one_with_faulting_programs(now);
        let mut components = Vec::new();
        let unreadable = self.driver.why_unreadable();
        components.extend(self.driver.component(now, &self.limits));
        for (address, gpu) in &mut self.gpus {
            gpu.faults.forget_passed(now, self.limits.passing.0);
            // A GPU of which this boot knows nothing may be there no more.
            let unknown = gpu.readings.last.is_none() && gpu.programs.is_empty();
            if gpu.faults.are_of_another_boot() && unknown {
                continue;
            }
            let alone = alone == Some(*address);
            components.push(gpu.component(*address, now, &self.limits, alone, unreadable.as_deref()));
        }
        for (address, switch) in &mut self.switches {
            switch.faults.forget_passed(now, self.limits.passing.0);
            components.push(switch.component(*address, now));
        }
        components
    }

    fn xid(&mut self, at: Mono, xid: &Xid) {
        let gpu = self.gpus.entry(xid.gpu).or_default();
        let window = self.limits.echo_window.0;
        if let (RECOVERY_ACTION, Some(number)) = (xid.code, xid.recovery_action) {
            gpu.faults.driver_says(at, number, &xid.place.line, window);
            return;
        }
        let Some(meaning) = self.catalog.xid(xid.code) else {
            gpu.faults.came(Came::unknown(at, "XID", xid.code, &xid.place.line), &no_codes(), window);
            return;
        };
        gpu.faults.cancel(&meaning.cancels);
        let caused = xid.caused_by.is_some_and(|cause| gpu.faults.echo(at, cause, xid.code));
        if caused || gpu.faults.echo_of_any(at, &meaning.echo_of, xid.code, window) {
            return;
        }
        if meaning.blame == Blame::Application {
            gpu.programs.faulted(at, xid);
            return;
        }
        let (state, action) = self.weight_of(xid);
        if state > HealthState::Healthy {
            let gpu = self.gpus.entry(xid.gpu).or_default();
            let came = Came { state, action, ..Came::known(at, "XID", xid.code, meaning, &xid.place.line) };
            let echoes = self.catalog.echoes_of(xid.code);
            gpu.faults.came(came, &echoes, window);
        }
    }

    /// How bad an XID is: by the catalogue, or by its line where that tells.
    fn weight_of(&self, xid: &Xid) -> (HealthState, RecommendedAction) {
        let Some(meaning) = self.catalog.xid(xid.code) else {
            return (HealthState::Degraded, RecommendedAction::ContactSupport);
        };
        if let Some(error) = &xid.nvlink {
            let NvlinkMeaning { fatal, action, .. } =
                NvlinkMeaning::of(self.catalog.nvlink_rules(), xid.code, error);
            let state = match (fatal, action) {
                (_, RecommendedAction::None) => HealthState::Healthy,
                (true, _) => HealthState::Unhealthy,
                (false, _) => HealthState::Degraded,
            };
            return (state, action);
        }
        // Lines of 94 and 95 say whether the GPU has to be reset; a 95 without that word needs it by its nature.
        let reset = xid.reset_needed == Some(true) || xid.drain_and_reset_needed == Some(true);
        let action = if reset { meaning.action.max(RecommendedAction::ResetDevice) } else { meaning.action };
        (meaning.state, action)
    }

    fn sxid(&mut self, at: Mono, sxid: &Sxid) {
        let switch = self.switches.entry(sxid.address).or_default();
        switch.name.clone_from(&sxid.switch);
        let window = self.limits.echo_window.0;
        let known = self.catalog.sxid(sxid.code);
        let (state, action) = match (sxid.fatal, known) {
            // The line's own word weighs more than the table.
            (Some(true), _) => (HealthState::Unhealthy, RecommendedAction::ResetDevice),
            (Some(false), Some(meaning)) => (
                meaning.state.min(HealthState::Degraded),
                meaning.action.min(RecommendedAction::RestartProcess),
            ),
            (Some(false), None) => (HealthState::Healthy, RecommendedAction::None),
            (None, Some(meaning)) => (meaning.state, meaning.action),
            (None, None) => (HealthState::Degraded, RecommendedAction::ContactSupport),
        };
        // A port that is fatal by its code and not by its line is a note.
        let note = sxid.fatal == Some(false)
            && known.is_none_or(|meaning| meaning.action >= RecommendedAction::ResetDevice);
        if state > HealthState::Healthy && !note {
            let came = match known {
                Some(meaning) => Came::known(at, "SXID", sxid.code, meaning, &sxid.place.line),
                None => Came::unknown(at, "SXID", sxid.code, &sxid.place.line),
            };
            switch.faults.came(Came { state, action, ..came }, &no_codes(), window);
        }
    }

    fn kernel_report(&mut self, at: Mono, report: &KernelReport) {
        match report.class {
            KernelClass::GpuDriverLoaded => {
                for gpu in self.gpus.values_mut() {
                    gpu.faults.forget_what_a_reset_heals(at);
                }
            }
            // In a log of several boots: the devices of another boot are not these.
            KernelClass::KernelStarted => {
                for gpu in self.gpus.values_mut() {
                    gpu.programs = Programs::default();
                    gpu.faults.next_boot();
                }
                self.switches.clear();
            }
            KernelClass::GpuInitFailed => {
                let address = report.subject.as_deref().and_then(PciAddress::parse);
                let (Some(address), Some(meaning)) = (address, self.catalog.kernel(report.class)) else {
                    return;
                };
                let came = Came {
                    at,
                    kind: "",
                    code: NOT_INITIALISED,
                    name: meaning.name.clone(),
                    state: meaning.state,
                    action: meaning.action,
                    line: report.place.line.clone(),
                };
                let gpu = self.gpus.entry(address).or_default();
                gpu.faults.came(came, &no_codes(), self.limits.echo_window.0);
            }
            KernelClass::GpuOffBus => {
                let address = report.subject.as_deref().and_then(PciAddress::parse);
                let (Some(address), Some(meaning)) = (address, self.catalog.xid(OFF_BUS)) else { return };
                let came = Came::known(at, "XID", OFF_BUS, meaning, &report.place.line);
                let echoes = self.catalog.echoes_of(OFF_BUS);
                let gpu = self.gpus.entry(address).or_default();
                gpu.faults.came(came, &echoes, self.limits.echo_window.0);
            }
            _ => {}
        }
    }

    /// The one GPU of several on which programs fail again and again, if the others have no such failures.
    fn only_one_with_faulting_programs(&mut self, now: Mono) -> Option<PciAddress> {
        let since = self.limits.repeats_window.0;
        let mut with = Vec::new();
        for (address, gpu) in &mut self.gpus {
            if gpu.programs.any_since(now, since) {
                with.push(*address);
            }
        }
        // On a host with one GPU there is nothing to compare it with: all its programs fail on it.
        match with.as_slice() {
            [one] if self.gpus.len() > 1 => Some(*one),
            _ => None,
        }
    }
}

fn no_codes() -> std::collections::BTreeSet<u32> {
    std::collections::BTreeSet::new()
}

impl Gpu {
    fn component(
        &mut self,
        address: PciAddress,
        now: Mono,
        limits: &DeviceLimits,
        alone: bool,
        unreadable: Option<&str>,
    ) -> Component {
        let mut reasons = self.faults.reasons();
        let mut evidence = self.faults.evidence();
        let (mut state, mut action) = self.faults.weight();
        let names = self.programs.names();
        if alone && names.len() >= limits.programs as usize {
            state = state.max(HealthState::Degraded);
            action = action.max(RecommendedAction::ContactSupport);
            reasons.push(format!(
                "{} different programs failed on this GPU and on no other of the host: {}",
                names.len(),
                names.join(", ")
            ));
        }
        let mut problems = match unreadable {
            // What was read before says nothing of now.
            Some(why) => vec![(HealthState::Unknown, why.to_owned(), RecommendedAction::None)],
            None => self.readings.problems(limits),
        };
        if self.missing {
            let told = "the driver counted it before and does not any more".to_owned();
            problems = vec![(HealthState::Unhealthy, told, RecommendedAction::RebootNode)];
        }
        problems.sort_by_key(|(state, ..)| std::cmp::Reverse(*state));
        for (of_one, reason, needed) in problems {
            state = state.max(of_one);
            action = action.max(needed);
            reasons.push(reason);
        }
        evidence.extend(self.readings.evidence());
        evidence.extend(self.programs.evidence());
        if reasons.is_empty() {
            let read = self.readings.summary();
            let words = [read, self.programs.summary()].into_iter().flatten().collect::<Vec<_>>().join("; ");
            reasons.push(if words.is_empty() { "no fault in the kernel log".to_owned() } else { words });
        }
        Component {
            name: format!("gpu.{address}"),
            state,
            reason: reasons.join("; "),
            action,
            evidence,
            read_at: self.readings.read_at.or(Some(now)),
            since: self.shown.since(state, now),
            fault_at: self.faults.last(),
            ..Component::default()
        }
    }
}

impl Switch {
    fn component(&mut self, address: PciAddress, now: Mono) -> Component {
        let (state, action) = self.faults.weight();
        let mut reasons = self.faults.reasons();
        if reasons.is_empty() {
            reasons.push(format!("{}: no fault in the kernel log", self.name));
        }
        Component {
            name: format!("nvswitch.{address}"),
            state,
            reason: reasons.join("; "),
            action,
            evidence: self.faults.evidence(),
            read_at: Some(now),
            since: self.shown.since(state, now),
            fault_at: self.faults.last(),
            ..Component::default()
        }
    }
}

/// A line of the log, as evidence.
fn line(text: &str) -> Evidence {
    Evidence { source: "kernel log".to_owned(), reading: text.to_owned(), ..Evidence::default() }
}

impl Came {
    fn known(at: Mono, kind: &'static str, code: u32, meaning: &CodeMeaning, line: &str) -> Came {
        Came {
            at,
            kind,
            code,
            name: meaning.name.clone(),
            state: meaning.state,
            action: meaning.action,
            line: line.to_owned(),
        }
    }

    fn unknown(at: Mono, kind: &'static str, code: u32, line: &str) -> Came {
        Came {
            at,
            kind,
            code,
            name: "a code that the catalogue does not know".to_owned(),
            state: HealthState::Degraded,
            action: RecommendedAction::ContactSupport,
            line: line.to_owned(),
        }
    }
}

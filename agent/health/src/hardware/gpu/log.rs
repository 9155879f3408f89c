//! Applies what the kernel log reports to GPUs and switches.

use std::collections::BTreeSet;

use super::faults::FaultReport;
use super::programs::Programs;
use super::{DeviceJudge, OFF_BUS, RECOVERY_ACTION, Switch};
use crate::hardware::catalog::{Catalog, CodeMeaning, FaultOrigin, RegisterMeaning};
use mainstay_model::component_id::ComponentId;
use mainstay_model::fault_code::FaultCode;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::kernel::{KernelClass, KernelReport, Sxid, Xid};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Mono;

impl DeviceJudge {
    pub(super) fn xid(&mut self, at: Mono, xid: &Xid) {
        let gpu = self.gpus.entry(xid.gpu).or_default();
        if let (RECOVERY_ACTION, Some(number)) = (xid.code, xid.recovery_action) {
            gpu.faults.driver_reported(at, number, &xid.place.line);
            return;
        }
        let Some(meaning) = self.catalog.xid(xid.code) else {
            gpu.faults.unknown(at, FaultCode::Xid(xid.code), &xid.place.line);
            return;
        };
        gpu.faults.cancel(&meaning.cancels);
        let caused = xid.caused_by.is_some_and(|cause| gpu.faults.echo(at, cause, xid.code));
        if caused || gpu.faults.echo_of_any(at, &meaning.echo_of, xid.code) {
            return;
        }
        if meaning.blame == FaultOrigin::Application {
            gpu.programs.faulted(at, xid, &meaning.name);
            return;
        }
        let (state, action) = self.catalog.severity(xid);
        if state > HealthState::Healthy {
            let gpu = self.gpus.entry(xid.gpu).or_default();
            let mut fault_report = FaultReport {
                state,
                action,
                ..FaultReport::known(at, FaultCode::Xid(xid.code), meaning, &xid.place.line)
            };
            if Catalog::is_known_by_number_alone(xid) {
                fault_report.confidence = UNSURE;
            }
            if let Some(line) = &xid.link_registers {
                let decoded = RegisterMeaning::from_rules(self.catalog.register_rules(), line);
                let times = gpu.faults.on_link(line.link, at);
                if let Some(decoded) = decoded {
                    fault_report.name =
                        format!("{} on link {} ({})", fault_report.name, line.link, decoded.names.join("; "));
                    if decoded.support_from.is_some_and(|from| times >= from) {
                        fault_report.action = RecommendedAction::ContactSupport;
                    }
                }
            }
            let echoes = self.catalog.echoes_of(xid.code);
            gpu.faults.record(fault_report, &echoes);
        }
    }

    pub(super) fn sxid(&mut self, at: Mono, sxid: &Sxid) {
        let switch = self.switches.entry(sxid.address).or_default();
        switch.name.clone_from(&sxid.switch);
        let (known, code) = (self.catalog.sxid(sxid.code), FaultCode::Sxid(sxid.code));
        let (state, action) = match (sxid.fatal, known) {
            // The line overrides the table.
            (Some(true), _) => (HealthState::Unhealthy, RecommendedAction::ResetDevice),
            (Some(false), Some(meaning)) => (
                meaning.state.min(HealthState::Degraded),
                meaning.action.min(RecommendedAction::RestartProcess),
            ),
            (Some(false), None) => (HealthState::Healthy, RecommendedAction::None),
            (None, Some(meaning)) => (meaning.state, meaning.action),
            (None, None) => {
                switch.faults.unknown(at, code, &sxid.place.line);
                return;
            }
        };
        // A port error that is fatal by its code but not by its line is only a note.
        let note = sxid.fatal == Some(false)
            && known.is_none_or(|meaning| meaning.action >= RecommendedAction::ResetDevice);
        if state > HealthState::Healthy && !note {
            let fault_report = match known {
                Some(meaning) => FaultReport::known(at, code, meaning, &sxid.place.line),
                None => FaultReport::unknown(at, code, &sxid.place.line),
            };
            switch.faults.record(FaultReport { state, action, ..fault_report }, &no_codes());
        }
    }

    pub(super) fn kernel_report(&mut self, at: Mono, report: &KernelReport) {
        let address = report.subject.as_deref().and_then(PciAddress::parse);
        match report.class {
            KernelClass::GpuDriverLoaded => {
                for gpu in self.gpus.values_mut() {
                    gpu.faults.forget_what_a_reset_heals(at);
                }
            }
            // In a log of several boots, faults from before this line belong to an earlier boot.
            KernelClass::KernelStarted => {
                for gpu in self.gpus.values_mut() {
                    gpu.programs = Programs::default();
                    gpu.faults.next_boot();
                }
                self.switches.clear();
            }
            KernelClass::GpuReset => {
                if let Some(gpu) = address.and_then(|address| self.gpus.get_mut(&address)) {
                    gpu.faults.forget_what_a_reset_heals(at);
                }
            }
            KernelClass::GpuOffBus => {
                let (Some(address), Some(meaning)) = (address, self.catalog.xid(OFF_BUS)) else { return };
                let fault_report =
                    FaultReport::known(at, FaultCode::Xid(OFF_BUS), meaning, &report.place.line);
                let echoes = self.catalog.echoes_of(OFF_BUS);
                let gpu = self.gpus.entry(address).or_default();
                gpu.faults.record(fault_report, &echoes);
            }
            class if class.is_of_a_gpu() => {
                let (Some(address), Some(meaning)) = (address, self.catalog.kernel(class)) else { return };
                let fault_report = FaultReport {
                    at,
                    code: FaultCode::KernelLine(class),
                    name: meaning.name.clone(),
                    state: meaning.state,
                    action: meaning.action,
                    line: report.place.line.clone(),
                    confidence: 1.0,
                };
                let gpu = self.gpus.entry(address).or_default();
                gpu.faults.record(fault_report, &no_codes());
            }
            _ => {}
        }
    }
}

/// Confidence in a device fault whose severity is unknown.
const UNSURE: f64 = 0.5;

/// The last XID in NVIDIA's catalog, which lists the codes missing from ours as "unused".
const LAST_LISTED: u32 = 173;

fn no_codes() -> BTreeSet<u32> {
    BTreeSet::new()
}

impl Switch {
    pub(super) fn component(&mut self, address: PciAddress, now: Mono) -> Component {
        let (state, action) = self.faults.weight();
        let mut reasons = self.faults.reasons();
        if reasons.is_empty() {
            reasons.push(format!("{}: no fault in the kernel log", self.name));
        }
        Component {
            name: ComponentId::NvSwitch(address).to_string(),
            state,
            reason: reasons.join("; "),
            action,
            evidence: self.faults.evidence(),
            confidence: self.faults.confidence(state).unwrap_or(1.0),
            read_at: Some(now),
            since: self.shown.since_it_began(state, now, self.faults.began(state)),
            ..Component::default()
        }
    }
}

impl FaultReport {
    fn known(at: Mono, code: FaultCode, meaning: &CodeMeaning, line: &str) -> FaultReport {
        FaultReport {
            at,
            code,
            name: meaning.name.clone(),
            state: meaning.state,
            action: meaning.action,
            line: line.to_owned(),
            confidence: 1.0,
        }
    }

    /// A code with unknown meaning is an event: a newer driver also logs what the device needs (XID 154).
    pub(super) fn unknown(at: Mono, code: FaultCode, line: &str) -> FaultReport {
        let unused = matches!(code, FaultCode::Xid(..=LAST_LISTED));
        let name =
            if unused { "a code that NVIDIA calls unused" } else { "a code that the catalog does not know" };
        FaultReport {
            at,
            code,
            name: name.to_owned(),
            state: HealthState::Healthy,
            action: RecommendedAction::None,
            line: line.to_owned(),
            confidence: UNSURE,
        }
    }
}

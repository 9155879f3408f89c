//! The node's knowledge of the hardware: the judges of devices and of kernel reports, and the position in the
//! kernel log.

use std::collections::BTreeMap;

use mainstay_diagnosis::host_evidence::{AttemptScope, EvidenceLog, Records};
use mainstay_health::hardware::gpu::{DeviceJudge, DeviceReport, GpuEvent, GpuView, Opinion};
use mainstay_health::host::kernel_reports::{HostLogJudge, LogState};
use mainstay_model::entry::Fact;
use mainstay_model::health::Component;
use mainstay_model::host_context::HostEvidence;
use mainstay_model::kernel::LogCursor;
use mainstay_model::operator::ACKNOWLEDGED;
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Mono;

/// What was read from the kernel log.
#[derive(Debug)]
pub struct LogReport {
    /// Whether it can be read.
    pub state: LogState,
    /// The facts in it, with their times.
    pub facts: Vec<(Mono, Fact)>,
    /// The new position in the log.
    pub cursor: Option<LogCursor>,
}

/// The judges of the hardware.
#[derive(Debug)]
pub struct Hardware {
    devices: DeviceJudge,
    host_log: HostLogJudge,
    evidence_log: EvidenceLog,
    cursor: Option<LogCursor>,
    /// Whether the kernel log is being read.
    log_is_read: bool,
}

impl Hardware {
    /// Judges with the records of earlier boots and the facts of this boot from the journal, in order.
    pub fn new(
        devices: DeviceJudge,
        host_log: HostLogJudge,
        records: Records,
        recalled: &[(Mono, Fact)],
    ) -> Hardware {
        let evidence_log = EvidenceLog::with(records);
        let mut hardware = Hardware { devices, host_log, evidence_log, cursor: None, log_is_read: false };
        for (at, fact) in recalled {
            hardware.receive(*at, *at, fact);
        }
        hardware
    }

    /// Stores whether the log could be read, and how far.
    pub(super) fn log_is(&mut self, now: Mono, state: LogState, cursor: Option<LogCursor>) {
        self.log_is_read = state.is_read();
        self.host_log.log_is(now, state);
        if cursor.is_some() {
            self.cursor = cursor;
        }
    }

    /// Stores the result of reading the GPUs' driver.
    pub(super) fn devices_are(&mut self, now: Mono, report: DeviceReport) -> Vec<Fact> {
        let facts = self.devices.report(now, report);
        facts.iter().for_each(|fact| self.evidence_log.take_in(now, fact));
        facts
    }

    /// Stores the opinions of another GPU monitor.
    pub(super) fn second_opinions(&mut self, opinions: BTreeMap<PciAddress, Vec<Opinion>>) {
        self.devices.second_opinions(opinions);
    }

    /// Records that an operator acknowledged the component's fault.
    pub(super) fn acknowledge(&mut self, at: Mono, component: &str) {
        self.devices.acknowledge(component, at);
        self.host_log.acknowledge(component, at);
    }

    /// Stores an event of the driver.
    pub(super) fn event(&mut self, at: Mono, event: &GpuEvent) {
        self.devices.event(at, event);
    }

    /// The host's evidence about a job's fault.
    pub(super) fn report_evidence(
        &self,
        fault_at: Mono,
        scope: &AttemptScope,
        components: &[Component],
    ) -> HostEvidence {
        self.evidence_log.report_evidence(fault_at, scope, components)
    }

    /// Driver events that are due for the journal.
    pub(super) fn due(&mut self, now: Mono) -> Vec<(Mono, Fact)> {
        let due = self.devices.due(now, self.log_is_read);
        due.iter().for_each(|(at, fact)| self.evidence_log.take_in(*at, fact));
        due
    }

    /// Processes one fact of time `at`, received at `now`. Returns whether it is new.
    pub(super) fn receive(&mut self, now: Mono, at: Mono, fact: &Fact) -> bool {
        if let Fact::Observed(seen) = fact
            && seen.event == ACKNOWLEDGED
        {
            self.acknowledge(at, &seen.component);
        }
        self.host_log.take_in(at, fact);
        let news = self.devices.receive(now, at, fact);
        if news {
            self.evidence_log.take_in(at, fact);
        }
        news
    }

    /// The current components, and the GPUs with their readings.
    pub(super) fn judge(&mut self, now: Mono) -> (Vec<Component>, Vec<GpuView>) {
        let (mut components, gpus) = self.devices.judge(now);
        components.extend(self.host_log.components(now));
        (components, gpus)
    }

    /// The position in the log.
    pub(super) fn cursor(&self) -> Option<LogCursor> {
        self.cursor.clone()
    }
}

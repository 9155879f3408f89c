//! What the node knows of the hardware: the judges of devices and of the kernel's reports, and how far its log was
//! read.

use std::collections::BTreeMap;

use mainstay_core::base::pci::PciAddress;
use mainstay_core::base::time::Mono;
use mainstay_core::failure::host_evidence::{EvidenceLog, Records, Unrelated};
use mainstay_core::hardware::gpu::{DeviceJudge, DeviceReport, GpuEvent, GpuView, Opinion};
use mainstay_core::host::kernel_reports::{HostLogJudge, LogState};
use mainstay_core::model::entry::Fact;
use mainstay_core::model::health::Component;
use mainstay_core::model::host_context::HostEvidence;
use mainstay_core::model::kernel::LogCursor;
use mainstay_core::model::operator::ACKNOWLEDGED;

/// What was read of the kernel log.
#[derive(Debug)]
pub struct LogReport {
    /// Whether it can be read.
    pub state: LogState,
    /// What it told, with its times.
    pub facts: Vec<(Mono, Fact)>,
    /// How far it was read.
    pub cursor: Option<LogCursor>,
}

/// The judges of the hardware.
#[derive(Debug)]
pub struct Hardware {
    devices: DeviceJudge,
    host_log: HostLogJudge,
    witness: EvidenceLog,
    cursor: Option<LogCursor>,
    /// Whether the kernel log is read at present.
    log_is_read: bool,
}

impl Hardware {
    /// Judges over the records of earlier boots and the facts that the journal has of this one, in their order.
    pub fn new(
        devices: DeviceJudge,
        host_log: HostLogJudge,
        records: Records,
        recalled: &[(Mono, Fact)],
    ) -> Hardware {
        let witness = EvidenceLog::with(records);
        let mut hardware = Hardware { devices, host_log, witness, cursor: None, log_is_read: false };
        for (at, fact) in recalled {
            hardware.receive(*at, *at, fact);
        }
        hardware
    }

    /// Takes in whether the log could be read, and how far.
    pub(super) fn log_is(&mut self, now: Mono, state: LogState, cursor: Option<LogCursor>) {
        self.log_is_read = state.is_read();
        self.host_log.log_is(now, state);
        if cursor.is_some() {
            self.cursor = cursor;
        }
    }

    /// Takes in what came of asking the GPUs' driver.
    pub(super) fn devices_are(&mut self, now: Mono, report: DeviceReport) -> Vec<Fact> {
        let facts = self.devices.report(now, report);
        facts.iter().for_each(|fact| self.witness.take_in(now, fact));
        facts
    }

    /// Takes in what another one who watches GPUs says of them.
    pub(super) fn second_opinions(&mut self, opinions: BTreeMap<PciAddress, Vec<Opinion>>) {
        self.devices.second_opinions(opinions);
    }

    /// Takes in that an operator knows of what is held against the component.
    pub(super) fn acknowledge(&mut self, at: Mono, component: &str) {
        self.devices.acknowledge(component, at);
        self.host_log.acknowledge(component, at);
    }

    /// Takes in what the driver told unasked.
    pub(super) fn event(&mut self, at: Mono, event: &GpuEvent) {
        self.devices.event(at, event);
    }

    /// What there is to say of a job's fault.
    pub(super) fn report_evidence(
        &self,
        fault_at: Mono,
        elsewhere: &Unrelated,
        components: &[Component],
    ) -> HostEvidence {
        self.witness.report_evidence(fault_at, elsewhere, components)
    }

    /// What of the driver's events is for the journal.
    pub(super) fn due(&mut self, now: Mono) -> Vec<(Mono, Fact)> {
        let due = self.devices.due(now, self.log_is_read);
        due.iter().for_each(|(at, fact)| self.witness.take_in(*at, fact));
        due
    }

    /// Takes in one fact of `at`, heard of at `now`. Whether it is news.
    pub(super) fn receive(&mut self, now: Mono, at: Mono, fact: &Fact) -> bool {
        if let Fact::Observed(seen) = fact
            && seen.event == ACKNOWLEDGED
        {
            self.acknowledge(at, &seen.component);
        }
        self.host_log.take_in(at, fact);
        let news = self.devices.receive(now, at, fact);
        if news {
            self.witness.take_in(at, fact);
        }
        news
    }

    /// The components as they stand, and the GPUs with their readings.
    pub(super) fn judge(&mut self, now: Mono) -> (Vec<Component>, Vec<GpuView>) {
        let (mut components, gpus) = self.devices.judge(now);
        components.extend(self.host_log.components(now));
        (components, gpus)
    }

    /// How far the log was read.
    pub(super) fn cursor(&self) -> Option<LogCursor> {
        self.cursor.clone()
    }
}

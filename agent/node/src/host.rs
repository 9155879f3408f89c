//! Reports of the sensors about the host, of the GPU driver, and of the kernel log, and the actions of operators.

use mainstay_health::hardware::gpu::{DeviceReport, GpuEvent};
use mainstay_health::host::kernel_reports::{self, LogState};
use mainstay_model::component_id::ComponentId;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::health::Component;
use mainstay_model::observation::Observation;
use mainstay_model::operator::OperatorAction;
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Stamp};

use super::{DEVICES, KERNEL_LOG, LogReport, NoSuchComponent, Node};
use mainstay_sys::clock;

impl Node {
    pub(super) fn sensed(&mut self, report: SensorReport) {
        for fact in report.facts {
            self.ask_launchers_to_leave(&fact);
            self.record(None, fact);
        }
        // Each look also shows what changed on the hardware with time.
        let now = clock::now();
        self.show(now, report.components);
    }

    /// Shows the readings and the current hardware.
    pub(super) fn show(&mut self, now: Stamp, mut components: Vec<Component>) {
        let (hardware, gpus) = self.hardware.judge(now.mono);
        components.extend(hardware);
        self.snapshots.set_gpus(gpus);
        self.show_host(now, components);
    }

    fn show_host(&mut self, now: Stamp, components: Vec<Component>) {
        for change in self.snapshots.show_host(now, components) {
            self.report_to_hooks(&change);
        }
    }

    /// Sends an entry to the hooks. An operator who silenced a component wants no notice of it.
    pub(super) fn report_to_hooks(&mut self, entry: &Entry) {
        let view = self.snapshots.view();
        if let Body::Health(change) = &entry.body
            && !view.operator_state.counts(&change.component.name)
        {
            return;
        }
        let job = entry.job.as_ref().and_then(|job| view.jobs.get(job));
        let leads = job.is_none_or(|job| job.leads);
        self.hooks.report(entry, leads);
    }

    /// Their last state must not stay shown as current.
    pub(super) fn unwatched(&mut self, names: &[String]) {
        for name in names {
            self.record(
                None,
                Fact::Observed(Observation {
                    component: name.clone(),
                    event: "unwatched".to_owned(),
                    detail: "it is no longer watched".to_owned(),
                    ..Observation::default()
                }),
            );
        }
        self.snapshots.hide(names);
    }

    pub(super) fn devices(&mut self, began: Mono, report: DeviceReport) {
        let now = clock::now();
        self.gpus.read(began, &report, self.snapshots.view().jobs.values());
        self.answer_what_waits();
        for fact in self.hardware.devices_are(now.mono, report) {
            self.record(None, fact);
        }
        self.show(now, Vec::new());
        let read = self.snapshots.view().components.keys().filter(|name| is_of_gpus(name)).cloned().collect();
        self.snapshots.roster().has_looked(DEVICES, now.mono, read);
        self.reset_what_needs_it();
    }

    pub(super) fn gpu_events(&mut self, events: &[GpuEvent]) {
        let now = clock::now();
        events.iter().for_each(|event| self.hardware.event(now.mono, event));
        self.report_events();
        self.show(now, Vec::new());
    }

    /// Records events of the driver once the kernel log had time for the matching line.
    pub(super) fn report_events(&mut self) {
        for (at, fact) in self.hardware.due(clock::mono()) {
            self.snapshots.record(clock::stamp_of(at), None, None, Body::Fact(fact));
        }
    }

    pub(super) fn kernel_log(&mut self, report: LogReport) {
        for (at, fact) in report.facts {
            if self.hardware.receive(clock::mono(), at, &fact) {
                self.snapshots.note(clock::stamp_of(at), None, None, Body::Fact(fact));
            }
        }
        let now = clock::now();
        let is_absent = matches!(report.state, LogState::Absent(_));
        self.hardware.log_is(now.mono, report.state, report.cursor);
        let components = if is_absent { Vec::new() } else { vec![kernel_reports::LOG.to_owned()] };
        self.snapshots.roster().has_looked(KERNEL_LOG, now.mono, components);
        self.show(now, Vec::new());
    }

    pub(super) fn operator(
        &mut self,
        uid: u32,
        component: &str,
        word: &OperatorAction,
    ) -> Result<(), NoSuchComponent> {
        let now = clock::now();
        if self.snapshots.attend(now, uid, component, word).is_none() {
            let known = self.snapshots.view().components.keys().cloned().collect();
            return Err(NoSuchComponent { name: component.to_owned(), known });
        }
        if let OperatorAction::Acknowledge { .. } = word {
            self.hardware.acknowledge(now.mono, component);
            self.show(now, Vec::new());
        }
        self.snapshots.publish();
        Ok(())
    }

    /// Changes that only depend on time: silences expire, and outdated readings no longer count as healthy.
    pub(super) fn look_at_the_clock(&mut self) {
        let now = clock::now();
        self.snapshots.end_silences(now);
        let stale = self.snapshots.roster().stale(now.mono, &self.snapshots.view().components);
        if !stale.is_empty() {
            self.show_host(now, stale);
        }
    }
}

fn is_of_gpus(component: &str) -> bool {
    matches!(ComponentId::parse(component), ComponentId::Gpu(_) | ComponentId::Gpus(_))
}

//! What survives a restart of the agent and what must not survive a repair: faults from readings and from the log,
//! operators' statements, replaced boards, boots.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::hardware::gpu::{DeviceReport, GpuTrouble, PcieLink, RemappedRows, Sampled};
use mainstay_health::parse::kmsg::Record;
use mainstay_health::parse::log::LogReader;
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::id::BootId;
use mainstay_model::observation::Observation;
use mainstay_model::operator::{OperatorAction, OperatorState};
use mainstay_model::time::{Mono, Span, Stamp, Wall};
use support::gpus::{FIRST, Host, LINK, SECOND, gpu};

use HealthState::{Degraded, Healthy, Unhealthy};
use RecommendedAction::{ContactSupport, None as Nothing, RebootNode, ResetDevice};

/// A host whose agent may end at any time. The next agent reads the same journal.
struct Lasting {
    host: Host,
    /// All facts with their times and whether they are from this boot.
    journal: Vec<(Mono, bool, Fact)>,
}

impl Lasting {
    fn new() -> Lasting {
        let mut lasting = Lasting { host: Host::new(), journal: Vec::new() };
        lasting.poll_times(4);
        lasting
    }

    fn poll_times(&mut self, count: u32) {
        for _ in 0..count {
            self.host.poll();
            let now = self.host.now;
            self.journal.extend(self.host.facts.drain(..).map(|fact| (now, true, fact)));
        }
    }

    fn xid(&mut self, rest: &str) {
        let line = format!("NVRM: Xid (PCI:0000:01:00): {rest}");
        let (at, fact) = LogReader::default().read(self.host.now, &Record::parse(&line), 1).unwrap();
        self.host.judge.take_in(at, &fact);
        self.journal.push((at, true, fact));
    }

    /// Starts the agent again, which reads its journal as the program does.
    fn restart(&mut self) {
        let (gpus, now) = (std::mem::take(&mut self.host.gpus), self.host.now);
        self.host = Host { gpus, now: now.after(Span::seconds(2)), ..Host::new() };
        let judge = &mut self.host.judge;
        for (at, _, fact) in self.journal.iter().filter(|(_, this_boot, _)| !this_boot) {
            if let Fact::Xid(_) = fact {
                judge.take_in(*at, fact);
            }
        }
        if self.journal.iter().any(|(_, this_boot, _)| !this_boot) {
            judge.next_boot();
        }
        for (at, this_boot, fact) in &self.journal {
            let Fact::Observed(observation) = fact else { continue };
            judge.recall(observation);
            if *this_boot {
                judge.recall_finding(*at, observation);
            }
        }
        for (at, _, fact) in self.journal.iter().filter(|(_, this_boot, _)| *this_boot) {
            judge.receive(*at, *at, fact);
        }
    }

    fn reboot(&mut self) {
        self.journal.iter_mut().for_each(|(_, this_boot, _)| *this_boot = false);
        self.host.now = Mono(60_000_000_000);
        self.restart();
    }

    fn events(&self, event: &str) -> usize {
        let is = |fact: &Fact| matches!(fact, Fact::Observed(observation) if observation.event == event);
        self.journal.iter().filter(|(_, _, fact)| is(fact)).count()
    }
}

#[test]
fn a_finding_counts_at_the_first_reading_after_a_restart() {
    let mut lasting = Lasting::new();
    lasting.host.first().temperature = Sampled::Value(95);
    lasting.poll_times(3);
    lasting.host.expect(FIRST, Degraded, ContactSupport);
    let since = lasting.host.find(FIRST).unwrap().since;
    for _ in 0..5 {
        lasting.restart();
        lasting.poll_times(1);
        lasting.host.expect(FIRST, Degraded, ContactSupport);
        lasting.host.expect(SECOND, Healthy, Nothing);
        assert_eq!(lasting.host.find(FIRST).unwrap().since, since, "it started before the restart");
    }
    assert_eq!(lasting.events("finding_began"), 1, "it is reported once");
    // A restart does not shorten the recovery either.
    lasting.host.first().temperature = Sampled::Value(60);
    lasting.restart();
    lasting.poll_times(2);
    lasting.host.expect(FIRST, Degraded, ContactSupport);
    lasting.poll_times(1);
    lasting.host.expect(FIRST, Healthy, Nothing);
    assert_eq!(lasting.events("finding_ended"), 1);
    lasting.restart();
    lasting.poll_times(1);
    assert_eq!(lasting.host.not_healthy(), Vec::<String>::new(), "a cleared finding does not return");
}

#[test]
fn a_failed_link_recovery_counts_for_its_full_time_across_a_restart() {
    let mut lasting = Lasting::new();
    lasting.host.details().links[3].recovery_failed = Some(2);
    lasting.poll_times(1);
    lasting.host.expect(LINK, Unhealthy, ResetDevice);
    lasting.restart();
    lasting.poll_times(30);
    lasting.host.expect(LINK, Unhealthy, ResetDevice);
    lasting.poll_times(360);
    assert_eq!(lasting.host.not_healthy(), Vec::<String>::new(), "an hour has passed");
}

#[test]
fn a_restart_neither_loses_nor_brings_back_faults_from_the_log() {
    let mut lasting = Lasting::new();
    lasting.xid("48, pid=7, name=python, DBE");
    lasting.xid("45, pid=7, name=python, Ch 1");
    lasting.restart();
    lasting.poll_times(1);
    let reason = lasting.host.expect(FIRST, Unhealthy, ResetDevice);
    assert!(reason.contains("XID 48") && reason.contains("followed by 45"), "{reason}");
    // An echo after the restart is folded in as well.
    lasting.xid("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)");
    lasting.restart();
    lasting.host.expect(FIRST, Unhealthy, ResetDevice);
    lasting.xid("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)");
    lasting.restart();
    lasting.poll_times(1);
    lasting.host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn another_board_in_the_same_slot_has_none_of_the_faults() {
    let mut lasting = Lasting::new();
    lasting.host.first().temperature = Sampled::Value(95);
    lasting.host.first().remapped =
        Sampled::Value(RemappedRows { corrected: 1, uncorrected: 2, pending: false, failed: true });
    lasting.xid("64, Row Remapper Error");
    lasting.poll_times(3);
    assert_eq!(lasting.host.not_healthy().len(), 1);
    // A different serial number is found while the agent runs or when it starts again.
    for restarts in [false, true] {
        let mut repaired = Lasting { host: Host::new(), journal: lasting.journal.clone() };
        repaired.host.now = lasting.host.now;
        repaired.restart();
        if !restarts {
            repaired.host.gpus = lasting.host.gpus.clone();
            repaired.poll_times(1);
            assert_eq!(repaired.host.not_healthy().len(), 1);
        }
        repaired.host.gpus[0] = gpu(0);
        let identity = repaired.host.gpus[0].identity.as_mut().unwrap();
        (identity.uuid, identity.serial) = ("GPU-new".into(), Some("2".into()));
        repaired.poll_times(1);
        assert_eq!(repaired.host.not_healthy(), Vec::<String>::new(), "restarted: {restarts}");
        repaired.restart();
        repaired.poll_times(1);
        assert_eq!(repaired.host.not_healthy(), Vec::<String>::new(), "nor after the next restart");
    }
}

#[test]
fn a_reboot_clears_faults_until_new_readings_find_them_again() {
    let mut lasting = Lasting::new();
    lasting.xid("79, GPU has fallen off the bus.");
    lasting.host.first().pcie = Sampled::Value(PcieLink { generation: 1, width: 16 });
    lasting.poll_times(3);
    lasting.host.expect(FIRST, Unhealthy, ContactSupport);
    lasting.reboot();
    lasting.poll_times(1);
    lasting.host.expect(FIRST, Healthy, Nothing);
    lasting.poll_times(2);
    // The boot did not improve the link: new readings find the fault again.
    lasting.host.expect(FIRST, Degraded, ContactSupport);
    // A fault that a reboot did not fix needs support.
    lasting.xid("79, GPU has fallen off the bus.");
    lasting.host.expect(FIRST, Unhealthy, ContactSupport);
}

#[test]
fn a_missing_gpu_is_reported_once_across_restarts() {
    let mut lasting = Lasting::new();
    lasting.host.gpus.remove(0);
    lasting.poll_times(1);
    lasting.host.expect(FIRST, Unhealthy, RebootNode);
    lasting.restart();
    lasting.poll_times(1);
    lasting.host.expect(FIRST, Unhealthy, RebootNode);
    assert_eq!(lasting.events("gpu_missing"), 1);
    lasting.host.gpus.insert(0, gpu(0));
    lasting.poll_times(1);
    lasting.host.expect(FIRST, Healthy, Nothing);
    assert_eq!(lasting.events("gpu_back"), 1);
}

#[test]
fn no_gpu_becomes_healthy_if_the_driver_hangs_across_a_restart() {
    let mut lasting = Lasting::new();
    lasting.host.first().trouble = Some(GpuTrouble::Lost);
    lasting.poll_times(1);
    lasting.host.expect(FIRST, Unhealthy, RebootNode);
    lasting.restart();
    let since = lasting.host.now;
    lasting.host.judge.report(since, DeviceReport::Silent { since, reading: None });
    let all = lasting.host.judge.components(since);
    assert!(all.iter().all(|component| component.state != Healthy), "{all:?}");
}

fn stamp(host: &Host) -> Stamp {
    Stamp { mono: host.now, wall: Wall(i64::try_from(host.now.0).unwrap()) }
}

/// Applies an operator's action on a component, by way of its observation for the journal.
fn act(
    operator_state: &mut OperatorState,
    lasting: &Lasting,
    component: &Component,
    action: &OperatorAction,
) -> Observation {
    let observation = action.observation(1000, component);
    operator_state.take_in(stamp(&lasting.host), &BootId("b".into()), &observation);
    observation
}

#[test]
fn an_acknowledgement_lasts_across_restarts_until_the_fault_is_over() {
    let mut lasting = Lasting::new();
    let mut operator_state = OperatorState::default();
    lasting.host.first().temperature = Sampled::Value(95);
    lasting.poll_times(3);
    let component = lasting.host.find(FIRST).unwrap();
    act(&mut operator_state, &lasting, &component, &OperatorAction::Acknowledge { reason: "a fan".into() });
    for _ in 0..3 {
        lasting.restart();
        lasting.poll_times(4);
        let still = lasting.host.find(FIRST).unwrap();
        assert_eq!((still.state, operator_state.component_reported(&still)), (Degraded, None));
        assert!(!operator_state.counts(FIRST), "it lasts, and is acknowledged");
    }
    lasting.host.first().temperature = Sampled::Value(60);
    lasting.poll_times(3);
    let well = lasting.host.find(FIRST).unwrap();
    let over = operator_state.component_reported(&well).unwrap();
    testing::snapshot!(
        "reasons",
        "device_restarts: an acknowledgement lasts across restarts until the fault is over",
        over.detail
    );
    operator_state.take_in(stamp(&lasting.host), &BootId("b".into()), &over);
    lasting.host.first().temperature = Sampled::Value(95);
    lasting.poll_times(3);
    lasting.host.expect(FIRST, Degraded, ContactSupport);
    assert!(operator_state.counts(FIRST), "it recurred, and counts");
}

#[test]
fn an_acknowledged_fault_that_gets_worse_counts_again() {
    let mut lasting = Lasting::new();
    let mut operator_state = OperatorState::default();
    lasting.host.first().temperature = Sampled::Value(95);
    lasting.poll_times(3);
    let component = lasting.host.find(FIRST).unwrap();
    act(&mut operator_state, &lasting, &component, &OperatorAction::Acknowledge { reason: "known".into() });
    lasting.restart();
    lasting.host.first().trouble = Some(GpuTrouble::Lost);
    lasting.poll_times(1);
    let worse = lasting.host.find(FIRST).unwrap();
    assert_eq!(worse.state, Unhealthy);
    assert!(operator_state.component_reported(&worse).is_some() && operator_state.counts(FIRST));
}

#[test]
fn a_silence_expires_across_restarts_too() {
    let mut lasting = Lasting::new();
    let mut operator_state = OperatorState::default();
    let component = lasting.host.find(FIRST).unwrap();
    let now = stamp(&lasting.host).wall;
    let until = Wall(now.0 + 3600 * 1_000_000_000);
    let observation = act(
        &mut operator_state,
        &lasting,
        &component,
        &OperatorAction::Silence { reason: "maintenance".into(), until },
    );
    let mut after = OperatorState::default();
    after.take_in(stamp(&lasting.host), &BootId("another".into()), &observation);
    after.only_of(&BootId("another".into()));
    assert!(!after.counts(FIRST), "a silence follows the wall clock, not the boot");
    assert_eq!(after.run_out(Wall(until.0 - 1)), []);
    assert_eq!(after.run_out(until).len(), 1);
    assert!(after.counts(FIRST));
}

//! What outlives a restart of the agent and what must not outlive a repair: faults of readings and of the log, what
//! operators said, boards that were replaced, boots.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_core::base::id::BootId;
use mainstay_core::base::time::{Mono, Span, Stamp, Wall};
use mainstay_core::formats::parse::kmsg::Record;
use mainstay_core::formats::parse::log::LogReader;
use mainstay_core::hardware::gpu::{DeviceReport, GpuTrouble, PcieLink, Read, RemappedRows};
use mainstay_core::model::entry::Fact;
use mainstay_core::model::health::{Component, HealthState, RecommendedAction};
use mainstay_core::model::observation::Observation;
use mainstay_core::model::operator::{OperatorAction, OperatorState};
use support::gpus::{FIRST, Host, LINK, SECOND, gpu};

use HealthState::{Degraded, Healthy, Unhealthy};
use RecommendedAction::{ContactSupport, None as Nothing, RebootNode, ResetDevice};

/// A host whose agent may end at any time; what it wrote is there for the next one.
struct Lasting {
    host: Host,
    /// All facts with their times and whether they are of this boot.
    journal: Vec<(Mono, bool, Fact)>,
}

impl Lasting {
    fn new() -> Lasting {
        let mut lasting = Lasting { host: Host::new(), journal: Vec::new() };
        lasting.looks(4);
        lasting
    }

    fn looks(&mut self, count: u32) {
        for _ in 0..count {
            self.host.look();
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

    /// The agent begins anew and reads its journal, as the program does.
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
            let Fact::Observed(seen) = fact else { continue };
            judge.recall(seen);
            if *this_boot {
                judge.recall_finding(*at, seen);
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
        let is = |fact: &Fact| matches!(fact, Fact::Observed(seen) if seen.event == event);
        self.journal.iter().filter(|(_, _, fact)| is(fact)).count()
    }
}

#[test]
fn what_took_several_readings_to_find_stands_at_the_first_one_after_a_restart() {
    let mut lasting = Lasting::new();
    lasting.host.first().temperature = Read::Value(95);
    lasting.looks(3);
    lasting.host.expect(FIRST, Degraded, ContactSupport);
    let since = lasting.host.find(FIRST).unwrap().since;
    for _ in 0..5 {
        lasting.restart();
        lasting.looks(1);
        lasting.host.expect(FIRST, Degraded, ContactSupport);
        lasting.host.expect(SECOND, Healthy, Nothing);
        assert_eq!(lasting.host.find(FIRST).unwrap().since, since, "it began before the restart");
    }
    assert_eq!(lasting.events("finding_began"), 1, "it is told once");
    // Restarts do not shorten the way back either.
    lasting.host.first().temperature = Read::Value(60);
    lasting.restart();
    lasting.looks(2);
    lasting.host.expect(FIRST, Degraded, ContactSupport);
    lasting.looks(1);
    lasting.host.expect(FIRST, Healthy, Nothing);
    assert_eq!(lasting.events("finding_ended"), 1);
    lasting.restart();
    lasting.looks(1);
    assert_eq!(lasting.host.ill(), Vec::<String>::new(), "what was over is not revived");
}

#[test]
fn a_link_whose_recovery_failed_is_held_for_its_time_over_a_restart() {
    let mut lasting = Lasting::new();
    lasting.host.details().links[3].recovery_failed = Some(2);
    lasting.looks(1);
    lasting.host.expect(LINK, Unhealthy, ResetDevice);
    lasting.restart();
    lasting.looks(30);
    lasting.host.expect(LINK, Unhealthy, ResetDevice);
    lasting.looks(360);
    assert_eq!(lasting.host.ill(), Vec::<String>::new(), "an hour has passed");
}

#[test]
fn a_restart_in_the_middle_revives_nothing_and_loses_nothing_of_the_log() {
    let mut lasting = Lasting::new();
    lasting.xid("48, pid=7, name=python, DBE");
    lasting.xid("45, pid=7, name=python, Ch 1");
    lasting.restart();
    lasting.looks(1);
    let reason = lasting.host.expect(FIRST, Unhealthy, ResetDevice);
    assert!(reason.contains("XID 48") && reason.contains("in its wake 45"), "{reason}");
    // An echo that comes after the restart is folded in as well.
    lasting.xid("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)");
    lasting.restart();
    lasting.host.expect(FIRST, Unhealthy, ResetDevice);
    lasting.xid("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)");
    lasting.restart();
    lasting.looks(1);
    lasting.host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn another_board_in_the_same_place_has_none_of_its_faults() {
    let mut lasting = Lasting::new();
    lasting.host.first().temperature = Read::Value(95);
    lasting.host.first().remapped =
        Read::Value(RemappedRows { corrected: 1, uncorrected: 2, pending: false, failed: true });
    lasting.xid("64, Row Remapper Error");
    lasting.looks(3);
    assert_eq!(lasting.host.ill().len(), 1);
    // Found by another serial number, while the agent runs or when it begins anew.
    for restarts in [false, true] {
        let mut repaired = Lasting { host: Host::new(), journal: lasting.journal.clone() };
        repaired.host.now = lasting.host.now;
        repaired.restart();
        if !restarts {
            repaired.host.gpus = lasting.host.gpus.clone();
            repaired.looks(1);
            assert_eq!(repaired.host.ill().len(), 1);
        }
        repaired.host.gpus[0] = gpu(0);
        let identity = repaired.host.gpus[0].identity.as_mut().unwrap();
        (identity.uuid, identity.serial) = ("GPU-new".into(), Some("2".into()));
        repaired.looks(1);
        assert_eq!(repaired.host.ill(), Vec::<String>::new(), "restarted: {restarts}");
        repaired.restart();
        repaired.looks(1);
        assert_eq!(repaired.host.ill(), Vec::<String>::new(), "nor after the next restart");
    }
}

#[test]
fn a_reboot_heals_what_it_heals_and_what_is_still_read_stays() {
    let mut lasting = Lasting::new();
    lasting.xid("79, GPU has fallen off the bus.");
    lasting.host.first().pcie = Read::Value(PcieLink { generation: 1, width: 16 });
    lasting.looks(3);
    lasting.host.expect(FIRST, Unhealthy, ContactSupport);
    lasting.reboot();
    lasting.looks(1);
    lasting.host.expect(FIRST, Healthy, Nothing);
    lasting.looks(2);
    // The link was not trained better by the boot: it is found anew, by its own readings.
    lasting.host.expect(FIRST, Degraded, ContactSupport);
    // What a reboot did not mend is for support.
    lasting.xid("79, GPU has fallen off the bus.");
    lasting.host.expect(FIRST, Unhealthy, ContactSupport);
}

#[test]
fn a_gpu_that_is_missing_is_missed_once_over_restarts() {
    let mut lasting = Lasting::new();
    lasting.host.gpus.remove(0);
    lasting.looks(1);
    lasting.host.expect(FIRST, Unhealthy, RebootNode);
    lasting.restart();
    lasting.looks(1);
    lasting.host.expect(FIRST, Unhealthy, RebootNode);
    assert_eq!(lasting.events("gpu_missing"), 1);
    lasting.host.gpus.insert(0, gpu(0));
    lasting.looks(1);
    lasting.host.expect(FIRST, Healthy, Nothing);
    assert_eq!(lasting.events("gpu_back"), 1);
}

#[test]
fn a_driver_that_hangs_over_a_restart_does_not_make_healthy() {
    let mut lasting = Lasting::new();
    lasting.host.first().trouble = Some(GpuTrouble::Lost);
    lasting.looks(1);
    lasting.host.expect(FIRST, Unhealthy, RebootNode);
    lasting.restart();
    let since = lasting.host.now;
    lasting.host.judge.report(since, DeviceReport::Silent { since, reading: None });
    let all = lasting.host.judge.components(since);
    assert!(all.iter().all(|of| of.state != Healthy), "{all:?}");
}

fn stamp(host: &Host) -> Stamp {
    Stamp { mono: host.now, wall: Wall(i64::try_from(host.now.0).unwrap()) }
}

/// An operator's word over a component, through the journal as the board has it.
fn says(
    attention: &mut OperatorState,
    lasting: &Lasting,
    component: &Component,
    word: &OperatorAction,
) -> Observation {
    let seen = word.observation(1000, component);
    attention.take_in(stamp(&lasting.host), &BootId("b".into()), &seen);
    seen
}

#[test]
fn an_acknowledged_condition_that_lasts_stays_acknowledged_over_restarts_and_is_told_when_it_comes_back() {
    let mut lasting = Lasting::new();
    let mut attention = OperatorState::default();
    lasting.host.first().temperature = Read::Value(95);
    lasting.looks(3);
    let component = lasting.host.find(FIRST).unwrap();
    says(
        &mut attention,
        &lasting,
        &component,
        &OperatorAction::Acknowledge { reason: "a fan is ordered".into() },
    );
    for _ in 0..3 {
        lasting.restart();
        lasting.looks(4);
        let still = lasting.host.find(FIRST).unwrap();
        assert_eq!((still.state, attention.component_reported(&still)), (Degraded, None));
        assert!(!attention.counts(FIRST), "it lasts, and is known");
    }
    lasting.host.first().temperature = Read::Value(60);
    lasting.looks(3);
    let well = lasting.host.find(FIRST).unwrap();
    let over = attention.component_reported(&well).unwrap();
    assert_eq!(over.detail, "the fault is gone");
    attention.take_in(stamp(&lasting.host), &BootId("b".into()), &over);
    lasting.host.first().temperature = Read::Value(95);
    lasting.looks(3);
    lasting.host.expect(FIRST, Degraded, ContactSupport);
    assert!(attention.counts(FIRST), "it came back, and counts");
}

#[test]
fn an_acknowledged_condition_that_gets_worse_is_told() {
    let mut lasting = Lasting::new();
    let mut attention = OperatorState::default();
    lasting.host.first().temperature = Read::Value(95);
    lasting.looks(3);
    let component = lasting.host.find(FIRST).unwrap();
    says(&mut attention, &lasting, &component, &OperatorAction::Acknowledge { reason: "known".into() });
    lasting.restart();
    lasting.host.first().trouble = Some(GpuTrouble::Lost);
    lasting.looks(1);
    let worse = lasting.host.find(FIRST).unwrap();
    assert_eq!(worse.state, Unhealthy);
    assert!(attention.component_reported(&worse).is_some() && attention.counts(FIRST));
}

#[test]
fn a_silence_runs_out_over_restarts_too() {
    let mut lasting = Lasting::new();
    let mut attention = OperatorState::default();
    let component = lasting.host.find(FIRST).unwrap();
    let now = stamp(&lasting.host).wall;
    let until = Wall(now.0 + 3600 * 1_000_000_000);
    let seen = says(
        &mut attention,
        &lasting,
        &component,
        &OperatorAction::Silence { reason: "maintenance".into(), until },
    );
    let mut after = OperatorState::default();
    after.take_in(stamp(&lasting.host), &BootId("another".into()), &seen);
    after.only_of(&BootId("another".into()));
    assert!(!after.counts(FIRST), "a silence is of the clock on the wall, not of a boot");
    assert_eq!(after.run_out(Wall(until.0 - 1)), []);
    assert_eq!(after.run_out(until).len(), 1);
    assert!(after.counts(FIRST));
}

//! What a host says of a failure: while it is waited for, and after it was decided on. And that a replay judges the same.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

mod support;

use mainstay_core::entry::{Body, Fact};
use mainstay_core::id::Incident;
use mainstay_core::job::Input;
use mainstay_core::replay::replay;
use mainstay_core::testimony::Testimony;
use mainstay_core::time::Span;
use mainstay_core::verdict::FaultDomain;
use support::job::Run;

const LOST: &str = "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.";

fn lost() -> Testimony {
    Testimony { kernel_lines: vec![LOST.to_owned()], ..Testimony::default() }
}

/// A rank was killed, nobody knew why, and the job was restarted.
fn restarted() -> Run {
    let mut run = Run::begin(3);
    run.start(0);
    run.kill(0);
    run.testify(1, Testimony::default());
    assert_eq!(run.last_verdict().domain, FaultDomain::Unknown);
    run.start(1);
    run
}

fn hear_late(run: &mut Run, incident: u64, testimony: Testimony) {
    run.tell(Input::HeardLate { incident: Incident(incident), testimony });
}

#[test]
fn a_line_of_the_kernel_that_comes_after_the_decision_changes_the_verdict_and_nothing_else() {
    let mut run = restarted();
    let (decisions, orders) = (run.decisions(), run.orders().len());
    hear_late(&mut run, 1, lost());
    let verdict = run.last_verdict();
    assert_eq!((verdict.incident, verdict.domain), (Incident(1), FaultDomain::Hardware));
    assert!(
        verdict.evidence.iter().any(|line| line.contains("fallen off the bus")),
        "{:?}",
        verdict.evidence
    );
    assert_eq!((run.decisions(), run.orders().len()), (decisions, orders));
    let testified = |body: &&&Body| matches!(body, Body::Fact(Fact::HostTestified { .. }));
    assert_eq!(run.bodies().iter().filter(testified).count(), 1);
}

#[test]
fn what_was_heard_before_and_what_is_of_another_failure_is_not_recorded() {
    let mut run = restarted();
    hear_late(&mut run, 1, lost());
    let recorded = run.bodies().len();
    hear_late(&mut run, 1, lost());
    hear_late(&mut run, 2, lost());
    run.kill(1);
    let with_the_next = run.bodies().len();
    // The next failure is judged already: the one before is not the last any more.
    hear_late(&mut run, 1, Testimony { notices: vec!["a notice".into()], ..lost() });
    assert_eq!(run.bodies().len(), with_the_next);
    assert!(with_the_next > recorded);
}

#[test]
fn a_replay_hears_the_same_at_the_same_time() {
    let mut run = restarted();
    hear_late(&mut run, 1, lost());
    let [replayed] = &replay(&run.entries())[..] else { panic!("one failure") };
    assert_eq!(replayed.differences(), Vec::<String>::new());
    assert_eq!(replayed.now.verdict.domain, FaultDomain::Hardware);
}

#[test]
fn a_replay_of_a_host_that_was_waited_for_decides_as_it_was_decided_in_the_end() {
    let mut run = Run::begin(3);
    run.start(0);
    run.kill(0);
    run.testify(
        1,
        Testimony { held: vec!["gpu.0000:3b:00: in use by process 7".into()], ..Testimony::default() },
    );
    run.wait(Span::millis(20));
    run.testify(1, Testimony::default());
    assert_eq!(run.decisions().len(), 2, "waits, then restarts");
    let [replayed] = &replay(&run.entries())[..] else { panic!("one failure") };
    assert_eq!(replayed.differences(), Vec::<String>::new());
}

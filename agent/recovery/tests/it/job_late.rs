//! Host evidence that arrives while a job waits for the host, or after the decision. A replay judges it the same way.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::finding::FindingKind;
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::Incident;
use mainstay_model::time::Span;
use mainstay_model::verdict::FaultDomain;
use mainstay_recovery::policy::{Budget, Settings};
use mainstay_recovery::protocol::Event;
use mainstay_view::replay::{Replayed, replay};
use support::job::Run;

const LOST: &str = "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.";

fn lost() -> HostEvidence {
    HostEvidence { kernel_lines: vec![LOST.to_owned()], ..HostEvidence::default() }
}

/// A job that was restarted after a rank was killed for an unknown reason.
fn restarted() -> Run {
    let mut run = Run::begin(3);
    run.start(0);
    run.kill(0);
    run.report_evidence(1, HostEvidence::default());
    assert_eq!(run.last_verdict().domain, FaultDomain::Unknown);
    run.start(1);
    run
}

fn receive_late(run: &mut Run, incident: u64, host_evidence: HostEvidence) {
    run.report(Event::LateEvidence { incident: Incident(incident), host_evidence });
}

#[test]
fn a_kernel_line_after_the_decision_changes_only_the_verdict() {
    let mut run = restarted();
    let (decisions, orders) = (run.decisions(), run.orders().len());
    receive_late(&mut run, 1, lost());
    let verdict = run.last_verdict();
    assert_eq!((verdict.incident, verdict.domain), (Incident(1), FaultDomain::Hardware));
    assert!(verdict.evidence.iter().any(|line| line.contains("0000:3b:00")), "{:?}", verdict.evidence);
    assert_eq!((run.decisions(), run.orders().len()), (decisions, orders));
    let evidence_reported = |body: &&&Body| matches!(body, Body::Fact(Fact::HostEvidenceReported { .. }));
    assert_eq!(run.bodies().iter().filter(evidence_reported).count(), 1);
}

#[test]
fn findings_are_evidence_of_the_failure_and_in_its_replay() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=20);
    run.step_with_loss(0, 21, f64::NAN);
    let raised = "builtins.ValueError: the gradients are useless";
    run.raise(0, 1, raised);
    run.kill(0);
    run.report(Event::AgentEvidence(None));
    let host_evidence = run.bodies().into_iter().rev().find_map(|body| match body {
        Body::Fact(Fact::HostEvidenceReported { host_evidence, .. }) => Some(host_evidence.clone()),
        _ => None,
    });
    let [finding] = &host_evidence.unwrap().findings[..] else { panic!("one finding: {:?}", run.bodies()) };
    assert_eq!((finding.what, finding.since_step), (FindingKind::NotANumber, 21));
    let printed = |line: &String| line.starts_with("since step 21 ");
    let verdict = run.last_verdict();
    assert!(verdict.evidence.iter().any(printed), "{:?}", verdict.evidence);
    assert_eq!(verdict.domain, FaultDomain::User);
    let [replayed] = &replay(&run.entries())[..] else { panic!("one failure") };
    assert_eq!(replayed.differences(), Vec::<String>::new());
    assert_eq!(replayed.now.verdict.evidence, replayed.then.verdict.evidence);
}

#[test]
fn a_replay_uses_the_settings_of_the_job() {
    let usual = Settings::from(Budget { max_restarts: 3, window: None });
    let mut run = Run::begin_with(Settings { dry_run: true, ..usual });
    run.start(0);
    run.kill_and_decide(0);
    let mut entries = run.entries();
    let differences =
        |entries: &[Entry]| replay(entries).iter().map(Replayed::differences).collect::<Vec<_>>();
    assert_eq!(differences(&entries), [Vec::<String>::new()]);
    // An earlier version's journal does not have them.
    for entry in &mut entries {
        if let Body::Fact(Fact::JobStarted(spec)) = &mut entry.body {
            spec.policy = None;
        }
    }
    assert!(differences(&entries)[0][0].starts_with("decision: "), "{:?}", differences(&entries));
}

#[test]
fn findings_of_an_earlier_attempt_are_no_evidence() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=20);
    run.step_with_loss(0, 21, f64::NAN);
    run.kill_and_decide(0);
    run.start(1);
    let before = run.bodies().len();
    run.kill_and_decide(1);
    let evidence_reported = |body: &&Body| matches!(body, Body::Fact(Fact::HostEvidenceReported { .. }));
    assert_eq!(run.bodies()[before..].iter().filter(|body| evidence_reported(body)).count(), 0);
}

#[test]
fn known_evidence_and_evidence_of_another_failure_are_not_recorded() {
    let mut run = restarted();
    receive_late(&mut run, 1, lost());
    let recorded = run.bodies().len();
    receive_late(&mut run, 1, lost());
    receive_late(&mut run, 2, lost());
    run.kill(1);
    let with_the_next = run.bodies().len();
    // The next failure is already judged, so the previous one is no longer the last.
    receive_late(&mut run, 1, HostEvidence { notices: vec!["a notice".into()], ..lost() });
    assert_eq!(run.bodies().len(), with_the_next);
    assert!(with_the_next > recorded);
}

#[test]
fn a_replay_includes_late_evidence() {
    let mut run = restarted();
    receive_late(&mut run, 1, lost());
    let [replayed] = &replay(&run.entries())[..] else { panic!("one failure") };
    assert_eq!(replayed.differences(), Vec::<String>::new());
    assert_eq!(replayed.now.verdict.domain, FaultDomain::Hardware);
}

#[test]
fn a_replay_of_a_wait_for_the_host_yields_the_final_decision() {
    let mut run = Run::begin(3);
    run.start(0);
    run.kill(0);
    run.report_evidence(
        1,
        HostEvidence { held: vec!["gpu.0000:3b:00: held".into()], ..HostEvidence::default() },
    );
    run.wait(Span::millis(20));
    run.report_evidence(1, HostEvidence::default());
    assert_eq!(run.decisions().len(), 2, "waits, then restarts");
    let [replayed] = &replay(&run.entries())[..] else { panic!("one failure") };
    assert_eq!(replayed.differences(), Vec::<String>::new());
}

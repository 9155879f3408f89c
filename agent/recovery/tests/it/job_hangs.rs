//! The job's state machine when ranks hang: the evidence taken before they are stopped, and the verdict.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use crate::support;

use mainstay_hang::{Hang, HangKind, PlaceGroup, Waits};
use mainstay_model::entry::{Body, ExitStatus, Fact};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::job::Output;
use mainstay_recovery::protocol::{Command, Event};
use support::job::Run;

impl Run {
    /// Rank 1 hangs after step 5, its evidence is taken, all ranks are stopped, the agent is absent.
    fn hang_and_decide(&mut self, attempt: u32, kind: HangKind) {
        self.hang_with(attempt, kind, 0.9, Vec::new());
        self.report(Event::AgentEvidence(None));
    }

    fn hang_with(&mut self, attempt: u32, kind: HangKind, confidence: f64, waits: Vec<Waits>) {
        let hang = Hang {
            kind,
            culprits: vec![Rank(1)],
            hosts: Vec::new(),
            victims: vec![Rank(0)],
            since: Mono(self.now),
            confirmed: Mono(self.now + 5),
            phase: "forward".into(),
            limit: Span(1),
            step: Some(5),
            confidence,
            evidence: Vec::new(),
        };
        let attempt_of = Attempt(attempt);
        self.fact(Fact::RanksHung { attempt: attempt_of, hang: Box::new(hang), acts: true });
        assert_eq!(self.orders().last(), Some(&&Command::TakeEvidence { attempt: attempt_of }));
        self.fact(Fact::EvidenceTaken {
            attempt: attempt_of,
            file: Some("hang.json".into()),
            groups: vec![PlaceGroup { ranks: vec![Rank(1)], place: "read".into() }],
            waits,
            summary: Vec::new(),
            took: Span(1),
        });
        for rank in [0, 1] {
            self.exit(attempt, rank, ExitStatus::Signal(15), true);
        }
        self.ended(attempt);
    }
}

#[test]
fn flight_recorders_name_the_culprit_of_a_hang_with_low_confidence() {
    let waits = Waits { kind: Some(HangKind::UserCode), culprits: vec![Rank(0)], reported: "waits".into() };
    for (confidence, culprit) in [(0.3, Rank(0)), (0.97, Rank(1))] {
        let mut run = Run::begin(9);
        run.start(0);
        run.steps(0, 1..=5);
        run.hang_with(0, HangKind::AllStill, confidence, vec![waits.clone()]);
        let verdict = run.last_verdict();
        assert_eq!(verdict.culprit, Some(culprit));
        assert_eq!(verdict.victims, [Rank(1 - culprit.0)]);
        assert!(verdict.evidence.contains(&waits.reported), "{:?}", verdict.evidence);
    }
}

#[test]
fn gpu_activity_is_once_in_the_verdict_of_a_hang() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=5);
    run.hang_with(0, HangKind::Stopped, 0.97, Vec::new());
    let gpus = vec!["GPU 0000:3b:00: 0 % busy, 2.00 s before".to_owned()];
    run.report_evidence(1, HostEvidence { gpus: gpus.clone(), ..HostEvidence::default() });
    let reported = run.last_verdict().evidence.iter().filter(|line| gpus.contains(line)).count();
    assert_eq!(reported, 1);
    assert_eq!(run.last_order(), &Command::start(Attempt(1)));
}

#[test]
fn a_hang_is_restarted_and_a_repeated_hang_in_user_code_is_not() {
    for (kind, restarts) in [(HangKind::UserCode, false), (HangKind::Stopped, true)] {
        let mut run = Run::begin(9);
        run.start(0);
        run.steps(0, 1..=5);
        run.hang_and_decide(0, kind);
        assert_eq!(run.orders().last(), Some(&&Command::start(Attempt(1))));
        run.start(1);
        run.steps(1, 1..=5);
        run.hang_and_decide(1, kind);
        // The first restart brought no new step, so the second is delayed.
        run.wait(Span::seconds(2));
        assert_eq!(run.orders().last() == Some(&&Command::start(Attempt(2))), restarts, "{kind:?}");
        let verdict = run.out.iter().find_map(|output| match output {
            Output::Record(Body::Verdict(verdict)) => Some(verdict),
            _ => None,
        });
        let verdict = verdict.expect("a verdict");
        assert_eq!((verdict.culprit, verdict.step), (Some(Rank(1)), Some(5)));
        let place = |line: &String| line.contains("rank 1") && line.ends_with(" read");
        assert!(verdict.evidence.iter().any(place), "{:?}", verdict.evidence);
    }
}

#[test]
fn a_hang_that_passes_during_evidence_collection_stops_no_rank() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=5);
    let hang = Hang {
        kind: HangKind::AllStill,
        culprits: Vec::new(),
        hosts: Vec::new(),
        victims: Vec::new(),
        since: Mono(1),
        confirmed: Mono(2),
        phase: "step".into(),
        limit: Span(1),
        step: None,
        confidence: 0.3,
        evidence: Vec::new(),
    };
    run.fact(Fact::RanksHung { attempt: Attempt(0), hang: Box::new(hang), acts: true });
    run.fact(Fact::HangPassed { attempt: Attempt(0), after: Span(1) });
    run.fact(Fact::EvidenceTaken {
        attempt: Attempt(0),
        file: None,
        groups: Vec::new(),
        waits: Vec::new(),
        summary: Vec::new(),
        took: Span(1),
    });
    assert!(!run.orders().iter().any(|order| matches!(order, Command::Stop { .. })));
}

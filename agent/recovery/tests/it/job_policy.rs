//! A user's own policy is asked between the evidence and the decision.

use mainstay_model::entry::{Body, Fact};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::Incident;
use mainstay_model::time::Span;
use mainstay_model::verdict::Action;
use mainstay_recovery::job::POLICY;
use mainstay_recovery::policy::{Advice, Rung};
use mainstay_recovery::protocol::{Command, Event};
use serde_json::json;

use crate::support::job::Run;

/// A job with a policy, whose rank 1 was killed.
fn asked() -> Run {
    let mut run = Run::begin(3);
    run.job.advised_by("mine.py");
    run.start(0);
    run.steps(0, 1..=3);
    run.kill(0);
    run.report(Event::AgentEvidence(None));
    run
}

fn advice(rung: Option<Rung>) -> Result<Option<Advice>, String> {
    Ok(Some(Advice { rung, after: Span::default(), why: "so".into() }))
}

fn answer(run: &mut Run, incident: u64, advice: Result<Option<Advice>, String>) {
    run.report(Event::PolicyAnswer { incident: Incident(incident), advice });
}

fn troubles(run: &Run) -> Vec<&str> {
    let events = run.bodies().into_iter().filter_map(|body| match body {
        Body::Fact(Fact::Observed(seen)) if seen.component == POLICY => Some(seen.event.as_str()),
        _ => None,
    });
    events.collect()
}

#[test]
fn it_gets_the_case_and_its_advice_is_carried_out() {
    let mut run = asked();
    assert!(run.decisions().is_empty());
    let Command::AskPolicy { incident, case } = run.last_order() else { panic!("{:?}", run.last_order()) };
    assert_eq!(*incident, Incident(1));
    assert_eq!(case["verdict"]["cause"]["signal"], json!(9));
    assert_eq!((&case["reached"], &case["job"]["max_restarts"]), (&json!(3), &json!(3)));
    answer(&mut run, 1, advice(Some(Rung::HandBack)));
    assert_eq!(run.decisions(), [Action::HandBack { exit: 75 }]);
    assert!(troubles(&run).is_empty());
}

#[test]
fn the_built_in_policy_decides_what_it_leaves_fails_at_or_may_not_do() {
    for (advice, trouble) in [
        (Ok(None), None),
        (Err("mine.py:3: no".to_owned()), Some("policy_failed")),
        (advice(Some(Rung::InProcess)), Some("policy_overruled")),
    ] {
        let mut run = asked();
        answer(&mut run, 1, advice);
        assert!(matches!(run.decisions()[..], [Action::RestartInJob { .. }]));
        assert_eq!(troubles(&run), trouble.as_slice());
    }
}

#[test]
fn an_answer_that_nothing_waits_for_is_ignored() {
    let mut run = asked();
    answer(&mut run, 7, advice(Some(Rung::Stop)));
    assert!(run.decisions().is_empty());
    answer(&mut run, 1, Ok(None));
    answer(&mut run, 1, advice(Some(Rung::Stop)));
    assert_eq!(run.decisions().len(), 1);
}

#[test]
fn evidence_that_comes_while_it_is_asked_bounds_its_answer() {
    let mut run = asked();
    busy(&mut run);
    let asked = |order: &&&Command| matches!(order, Command::AskPolicy { .. });
    assert_eq!(run.orders().iter().filter(asked).count(), 1);
    answer(&mut run, 1, advice(Some(Rung::All)));
    assert_eq!((run.decisions(), troubles(&run)), (vec![Action::Wait], vec!["policy_overruled"]));
}

#[test]
fn it_is_asked_again_after_a_wait_unless_it_failed() {
    for (first, asked) in [(advice(None), 2), (Err("late".to_owned()), 1)] {
        let mut run = asked_of_a_busy_host();
        answer(&mut run, 1, first);
        assert_eq!(run.decisions(), [Action::Wait]);
        run.wait(Span::seconds(5));
        busy(&mut run);
        let questions =
            run.orders().iter().filter(|order| matches!(order, Command::AskPolicy { .. })).count();
        assert_eq!(questions, asked);
    }
}

fn asked_of_a_busy_host() -> Run {
    let mut run = Run::begin(3);
    run.job.advised_by("mine.py");
    run.start(0);
    run.kill(0);
    busy(&mut run);
    run
}

fn busy(run: &mut Run) {
    let held = vec!["port 29500 is taken".to_owned()];
    run.report_evidence(1, HostEvidence { held, ..HostEvidence::default() });
}

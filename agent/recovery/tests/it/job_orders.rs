//! Restarts that a person orders: they are no failures, and start only on a host that is ready.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use crate::support;

use mainstay_model::entry::{Body, ExitStatus, Fact, JobSpec};
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Attempt, Incident};
use mainstay_model::observation::Observation;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::Action;
use mainstay_recovery::job::{ORDERS, RANK_EXCLUDED, RESTART_ORDERED, RESTART_WAITS, SAVE_ORDERED};
use mainstay_recovery::policy::HAND_BACK_EXIT;
use mainstay_recovery::protocol::{Command, Event, StopWhy};
use mainstay_view::replay::replay;
use support::job::Run;

fn order(event: &str) -> Fact {
    let (component, event) = (ORDERS.to_owned(), event.to_owned());
    Fact::Observed(Observation { component, event, ..Observation::default() })
}

/// A job whose ranks were stopped for an ordered restart.
fn ordered() -> Run {
    let mut run = Run::begin(1);
    run.start(0);
    run.steps(0, 1..=5);
    run.fact(order(RESTART_ORDERED));
    assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Ordered));
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.exit(0, 1, ExitStatus::Signal(15), true);
    run.ended(0);
    let asked =
        matches!(run.last_order(), Command::Consult(verdict) if verdict.incident == Incident::ORDERED);
    assert!(asked, "{:?}", run.last_order());
    run
}

fn held(what: &str) -> HostEvidence {
    HostEvidence { held: vec![what.to_owned()], ..HostEvidence::default() }
}

/// The reported reasons for which the restart waits.
fn waits(run: &Run) -> Vec<String> {
    let reported = |body: &&Body| match body {
        Body::Fact(Fact::Observed(seen)) if seen.event == RESTART_WAITS => Some(seen.detail.clone()),
        _ => None,
    };
    run.bodies().iter().filter_map(reported).collect()
}

#[test]
fn an_ordered_restart_is_no_failure_and_costs_no_budget() {
    let mut run = ordered();
    run.report_evidence(0, HostEvidence::default());
    assert_eq!(run.last_order(), &Command::start(Attempt(1)));
    assert!(!run.bodies().iter().any(|body| matches!(body, Body::Verdict(_) | Body::Decision(_))));
    run.start(1);
    run.kill_and_decide(1);
    assert_eq!(run.last_order(), &Command::start(Attempt(2)));
}

#[test]
fn an_order_to_exclude_a_rank_restarts_all_ranks_and_other_orders_do_not() {
    for (event, stopped) in [(RANK_EXCLUDED, true), ("stop_ordered", false), ("fault_injected", false)] {
        let mut run = Run::begin(1);
        run.start(0);
        run.fact(order(event));
        let stops = |order: &&Command| matches!(order, Command::Stop { why: StopWhy::Ordered, .. });
        assert_eq!(run.orders().iter().any(stops), stopped, "{event}");
    }
}

#[test]
fn an_ordered_restart_waits_until_the_gpus_are_free_and_reports_it_once() {
    let mut run = ordered();
    for _ in 0..3 {
        run.report_evidence(0, held("gpu.0000:3b:00: held"));
        assert!(matches!(run.last_order(), Command::Wake { .. }), "{:?}", run.last_order());
        run.wait(Span::seconds(1));
        assert!(matches!(run.last_order(), Command::Consult(_)));
    }
    let [reported] = &waits(&run)[..] else { panic!("{:?}", waits(&run)) };
    testing::snapshot!("reasons", "job_orders: an ordered restart waits", reported);
    run.report_evidence(0, held("port 29500"));
    assert_eq!(waits(&run).len(), 2, "the reason is new");
    run.wait(Span::seconds(1));
    run.report_evidence(0, HostEvidence::default());
    assert_eq!(run.last_order(), &Command::start(Attempt(1)));
    assert_eq!(run.decisions(), []);
}

#[test]
fn a_host_that_does_not_become_ready_for_an_ordered_restart_is_handed_back() {
    let mut run = ordered();
    // Without an agent, the launcher reports the resources in use.
    run.report(Event::Held(vec!["process 7 does not exit".into()]));
    run.report(Event::AgentEvidence(None));
    assert_eq!(waits(&run).len(), 1);
    run.wait(Span::seconds(61));
    run.report(Event::AgentEvidence(None));
    assert_eq!(run.last_order(), &Command::finish(HAND_BACK_EXIT));
    assert_eq!(run.decisions(), [Action::HandBack { exit: HAND_BACK_EXIT }]);
    let reason = run.job.summary(Mono(run.now)).reason;
    testing::snapshot!(
        "reasons",
        "job_orders: a host that does not become ready for an ordered restart is handed back",
        reason
    );
}

#[test]
fn an_unhealthy_host_is_handed_back_at_once_and_a_degraded_one_is_not() {
    let lost = Component {
        name: "gpu.0000:3b:00".into(),
        state: HealthState::Unhealthy,
        action: RecommendedAction::RebootNode,
        since: Mono(1),
        ..Component::default()
    };
    let slow = Component { state: HealthState::Degraded, ..lost.clone() };
    for (unhealthy, last) in [(lost, Command::finish(HAND_BACK_EXIT)), (slow, Command::start(Attempt(1)))] {
        let mut run = ordered();
        run.report_evidence(0, HostEvidence { unhealthy: vec![unhealthy], ..HostEvidence::default() });
        assert_eq!(run.last_order(), &last);
    }
}

#[test]
fn a_waiting_ordered_restart_obeys_a_stop_and_ignores_rulings_on_failures() {
    let mut run = ordered();
    run.report_evidence(1, HostEvidence::default());
    assert!(matches!(run.last_order(), Command::Consult(_)), "the late ruling on a failure is ignored");
    run.report_evidence(0, held("gpu.0000:3b:00: held"));
    run.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
    assert_eq!(run.last_order(), &Command::finish(143));
}

#[test]
fn a_replay_continues_after_an_ordered_restart() {
    let mut run = ordered();
    run.report_evidence(0, HostEvidence::default());
    run.start(1);
    run.kill_and_decide(1);
    let entries = run.entries();
    assert!(matches!(&entries[0].body, Body::Fact(Fact::JobStarted(JobSpec { .. }))));
    let replayed = replay(&entries);
    assert_eq!(replayed.len(), 1, "the failure of the second attempt");
    assert_eq!(replayed[0].now.verdict.attempt, Attempt(1));
}

fn order_to_save(exit: i32) -> Fact {
    let values = [("exit".to_owned(), exit.to_string())].into();
    let (component, event) = (ORDERS.to_owned(), SAVE_ORDERED.to_owned());
    Fact::Observed(Observation { component, event, values, ..Observation::default() })
}

#[test]
fn ranks_are_asked_to_save_once_and_their_end_is_no_success_of_the_job() {
    let mut run = Run::begin(1);
    run.start(0);
    run.steps(0, 1..=5);
    run.fact(order_to_save(138));
    run.fact(order_to_save(140));
    let asked = run
        .orders()
        .into_iter()
        .filter(|order| matches!(order, Command::AskToSave { attempt: Attempt(0), .. }))
        .count();
    assert_eq!(asked, 1, "each host may have got the signal");
    run.exit(0, 0, ExitStatus::Code(0), false);
    run.exit(0, 1, ExitStatus::Code(0), false);
    assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Done));
    run.ended(0);
    assert_eq!(run.last_order(), &Command::finish(138));
}

#[test]
fn ranks_that_fail_after_a_request_to_save_are_restarted_and_asked_again() {
    let mut run = Run::begin(1);
    run.start(0);
    run.steps(0, 1..=5);
    run.fact(order_to_save(138));
    run.kill_and_decide(0);
    run.start(1);
    run.fact(order_to_save(138));
    assert_eq!(run.last_order(), &Command::ask_to_save(Attempt(1)));
}

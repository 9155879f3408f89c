//! The job's state machine, driven as the launcher drives it.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use crate::support;

use mainstay_checkpoint::advice::Advised;
use mainstay_model::entry::{Body, Entry, ExitStatus, Fact, JobSpec, Note, StartedRank, StepDone};
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Attempt, BootId, Incident, JobId, Pid, Rank};
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_model::verdict::{Action, Cause, DecidedBy};
use mainstay_recovery::policy::HAND_BACK_EXIT;
use mainstay_recovery::protocol::{AgentEvidence, Command, Event, StopWhy};
use mainstay_view::node::NodeView;
use proptest::prelude::*;
use support::job::Run;

#[test]
fn a_killed_rank_is_the_culprit_and_all_ranks_are_restarted() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Fault));
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.ended(0);
    run.report(Event::AgentEvidence(None));
    assert_eq!(run.last_order(), &Command::start(Attempt(1)));
    run.start(1);
    run.steps(1, 6..=8);
    let verdicts: Vec<_> = run
        .bodies()
        .into_iter()
        .filter_map(|body| match body {
            Body::Verdict(verdict) => Some(verdict),
            _ => None,
        })
        .collect();
    assert_eq!(verdicts.len(), 1);
    assert_eq!((verdicts[0].culprit, &verdicts[0].cause), (Some(Rank(1)), &Cause::Signal { signal: 9 }));
    let outcome = run.bodies().into_iter().find_map(|body| match body {
        Body::Outcome(outcome) => Some(outcome.clone()),
        _ => None,
    });
    let outcome = outcome.expect("an outcome");
    assert_eq!((outcome.step, outcome.reached_before, outcome.steps_lost), (6, 7, 2));
}

const LOST: &str = "[../gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:4711";

fn verdict_of(run: &Run) -> mainstay_model::verdict::Verdict {
    let verdict = run.bodies().into_iter().find_map(|body| match body {
        Body::Verdict(verdict) => Some(verdict.clone()),
        _ => None,
    });
    verdict.expect("a verdict")
}

#[test]
fn a_rank_that_lost_a_peer_stops_no_rank_until_the_peer_exits() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.raise(0, 0, LOST);
    assert!(matches!(run.last_order(), Command::Wake { .. }), "{:?}", run.last_order());
    run.exit(0, 1, ExitStatus::Code(3), false);
    assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Fault));
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.ended(0);
    let verdict = verdict_of(&run);
    assert_eq!((verdict.culprit, verdict.cause), (Some(Rank(1)), Cause::ExitCode { code: 3 }));
}

#[test]
fn the_wait_for_a_lost_peer_that_does_not_exit_is_limited() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.raise(0, 0, LOST);
    let Command::Wake { at } = *run.last_order() else { panic!("{:?}", run.last_order()) };
    run.report(Event::Wake);
    assert_eq!(run.last_order(), &Command::Wake { at });
    run.now = at.0;
    run.report(Event::Wake);
    assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Fault));
}

#[test]
fn no_wait_if_all_ranks_lost_a_peer_or_one_succeeded() {
    for ends_well in [false, true] {
        let mut run = Run::begin(3);
        run.start(0);
        run.raise(0, 0, LOST);
        if ends_well {
            run.exit(0, 1, ExitStatus::Code(0), false)
        } else {
            run.raise(0, 1, LOST)
        }
        assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Fault));
    }
}

#[test]
fn a_step_counts_once_if_the_ranks_connect_one_after_the_other() {
    let mut run = Run::begin(3);
    let ranks = [0, 1].map(|n| StartedRank {
        rank: Rank(n),
        local_rank: n,
        pid: Pid(1),
        page: None,
        start_ticks: None,
    });
    run.fact(Fact::AttemptStarted {
        attempt: Attempt(0),
        master_port: 1,
        ranks: ranks.into(),
        hosts: Vec::new(),
    });
    for rank in [Rank(1), Rank(0)] {
        run.fact(Fact::RankConnected { attempt: Attempt(0), rank, client: "test".into() });
        for step in 0..7 {
            let (start, end) = (Mono(run.now), Mono(run.now + 10));
            let done = StepDone { step, start, end, first: step == 0, ..StepDone::default() };
            run.report(Event::Steps { attempt: Attempt(0), ranks: vec![(rank, vec![done])] });
        }
    }
    assert_eq!(run.job.summary(Mono(run.now)).accounting.steps, 7);
}

#[test]
fn the_launcher_exits_with_the_status_of_the_culprit_if_the_budget_is_used_up() {
    let mut run = Run::begin(1);
    run.start(0);
    run.kill_and_decide(0);
    run.start(1);
    run.kill_and_decide(1);
    assert_eq!(run.last_order(), &Command::finish(137));
    assert_eq!(run.job.summary(Mono(run.now)).attempts, 2);
}

#[test]
fn the_same_exception_at_the_same_step_is_not_restarted_twice() {
    let mut run = Run::begin(3);
    for attempt in 0..2 {
        run.start(attempt);
        run.steps(attempt, 1..=3);
        run.raise(attempt, 0, "bad value 17");
        run.exit(attempt, 0, ExitStatus::Signal(15), true);
        run.exit(attempt, 1, ExitStatus::Signal(15), true);
        run.ended(attempt);
        run.report(Event::AgentEvidence(None));
    }
    assert_eq!(run.last_order(), &Command::finish(1));
}

#[test]
fn ranks_that_are_all_done_end_the_job_with_success() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=2);
    run.exit(0, 0, ExitStatus::Code(0), false);
    run.exit(0, 1, ExitStatus::Code(0), false);
    assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Done));
    run.ended(0);
    assert_eq!(run.last_order(), &Command::finish(0));
}

#[test]
fn a_request_to_stop_is_not_a_failure() {
    let mut run = Run::begin(3);
    run.start(0);
    run.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.exit(0, 1, ExitStatus::Signal(15), true);
    run.ended(0);
    assert_eq!(run.last_order(), &Command::finish(143));
    assert!(!run.bodies().iter().any(|body| matches!(body, Body::Verdict(_))));
}

#[test]
fn the_agent_can_overrule_the_decision_on_the_open_incident_only() {
    let mut run = Run::begin(3);
    run.start(0);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.ended(0);
    let stop = (Action::Stop { exit: 9 }, "the disk is read-only".to_owned());
    run.report(Event::AgentEvidence(Some(AgentEvidence {
        incident: Incident(7),
        instead: Some(stop.clone()),
        host_evidence: HostEvidence::default(),
    })));
    assert!(matches!(run.last_order(), Command::Consult(_)));
    run.report(Event::AgentEvidence(Some(AgentEvidence {
        incident: Incident(1),
        instead: Some(stop),
        host_evidence: HostEvidence::default(),
    })));
    assert_eq!(run.last_order(), &Command::finish(9));
    let decisions = run.bodies().into_iter();
    let decided = decisions.filter_map(|body| match body {
        Body::Decision(decision) => Some((decision.by, decision.agent_evidence)),
        _ => None,
    });
    assert_eq!(decided.collect::<Vec<_>>(), [(DecidedBy::Launcher, true)]);
}

/// An unhealthy component that makes another host necessary.
fn lost_gpu() -> Component {
    Component {
        name: "gpu.0000:3b:00".into(),
        state: HealthState::Unhealthy,
        reason: "it fell off the bus".into(),
        action: RecommendedAction::RebootNode,
        since: Mono(1),
        ..Component::default()
    }
}

#[test]
fn a_restart_waits_for_resources_in_use_and_reports_it_once() {
    let mut run = Run::begin(3);
    run.start(0);
    run.kill(0);
    let held = HostEvidence { held: vec!["gpu.0000:3b:00: held".into()], ..HostEvidence::default() };
    run.report_evidence(1, held.clone());
    for _ in 0..5 {
        assert!(matches!(run.last_order(), Command::Wake { .. }), "{:?}", run.last_order());
        run.wait(Span::seconds(1));
        assert!(matches!(run.last_order(), Command::Consult(_)));
        run.report_evidence(1, held.clone());
    }
    assert_eq!(run.decisions(), [Action::Wait]);
    run.wait(Span::seconds(1));
    run.report_evidence(1, HostEvidence::default());
    assert_eq!(run.last_order(), &Command::start(Attempt(1)));
    assert_eq!(run.decisions(), [Action::Wait, Action::RestartInJob { attempt: Attempt(1) }]);
}

#[test]
fn resources_that_the_launcher_finds_in_use_delay_a_restart_for_a_limited_time() {
    let mut run = Run::begin(3);
    run.start(0);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.ended(0);
    run.report(Event::Held(vec!["port 29500: somebody listens on it".into()]));
    run.report(Event::AgentEvidence(None));
    assert_eq!(run.decisions(), [Action::Wait]);
    run.wait(Span::seconds(61));
    run.report(Event::AgentEvidence(None));
    assert_eq!(run.last_order(), &Command::finish(HAND_BACK_EXIT));
}

#[test]
fn a_host_that_lost_a_gpu_is_handed_back_and_a_healthy_host_restarts_at_once() {
    for (unhealthy, last) in
        [(vec![lost_gpu()], Command::finish(HAND_BACK_EXIT)), (vec![], Command::start(Attempt(1)))]
    {
        let mut run = Run::begin(3);
        run.start(0);
        run.kill(0);
        run.report_evidence(1, HostEvidence { unhealthy, ..HostEvidence::default() });
        assert_eq!(run.last_order(), &last);
    }
}

#[test]
fn a_second_restart_without_a_new_step_is_delayed_and_a_stop_ends_the_delay() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=5);
    run.kill_and_decide(0);
    assert_eq!(run.last_order(), &Command::start(Attempt(1)));
    run.start(1);
    run.steps(1, 1..=5);
    run.kill_and_decide(1);
    let Command::Wake { at } = *run.last_order() else { panic!("{:?}", run.last_order()) };
    run.report(Event::Wake);
    assert_eq!(run.last_order(), &Command::Wake { at }, "too early");
    let mut asked = Run { job: run.job.clone(), out: Vec::new(), now: run.now, step: run.step };
    asked.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
    assert_eq!(asked.last_order(), &Command::finish(143));
    run.wait(Span::seconds(2));
    assert_eq!(run.last_order(), &Command::start(Attempt(2)));
}

#[test]
fn a_failed_start_is_not_retried() {
    let mut run = Run::begin(3);
    run.fact(Fact::start_failed(Attempt(0), "no such file: pythn3".into()));
    run.report(Event::AgentEvidence(None));
    assert_eq!(run.last_order(), &Command::finish(70));
}

#[test]
fn a_failed_rank_that_starts_to_exit_stops_the_others_and_is_the_culprit() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.ending(0, 1, ExitStatus::Signal(9));
    let began_to_end = Mono(run.now);
    assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Fault));
    let orders = run.orders().len();
    // The survivor exits long before the kernel has torn down the larger process.
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    assert_eq!(run.orders().len(), orders, "stopped once");
    run.ended(0);
    run.report(Event::AgentEvidence(None));
    let verdict = run.bodies().into_iter().find_map(|body| match body {
        Body::Verdict(verdict) => Some(verdict.clone()),
        _ => None,
    });
    let verdict = verdict.expect("a verdict");
    assert_eq!((verdict.culprit, &verdict.victims[..]), (Some(Rank(1)), &[Rank(0)][..]));
    assert_eq!((verdict.fault_at, verdict.detected_at), (began_to_end, began_to_end));
}

#[test]
fn an_exit_without_failure_or_of_another_attempt_stops_no_rank() {
    let mut run = Run::begin(3);
    run.start(0);
    let before = run.orders().len();
    run.ending(0, 1, ExitStatus::Code(0));
    run.ending(7, 1, ExitStatus::Signal(9));
    assert_eq!(run.orders().len(), before);
}

/// Any input of the launcher, in any order.
fn any_input() -> impl Strategy<Value = Event> {
    let attempt = (0u32..3).prop_map(Attempt);
    let status = prop::sample::select(vec![
        ExitStatus::Code(0),
        ExitStatus::Code(1),
        ExitStatus::Signal(9),
        ExitStatus::Signal(15),
    ]);
    (attempt, 0u32..3, status, any::<bool>(), 0u8..12).prop_map(|(attempt, n, status, flag, kind)| {
        let rank = Rank(n);
        let started =
            |n: u32| StartedRank { rank: Rank(n), local_rank: n, pid: Pid(1), page: None, start_ticks: None };
        let note = Note { exception: "E".into(), ..Note::default() };
        match kind {
            0 => Event::Fact(Fact::AttemptStarted {
                attempt,
                master_port: 1,
                ranks: vec![started(0), started(1)],
                hosts: Vec::new(),
            }),
            1 => Event::Fact(Fact::RankConnected { attempt, rank, client: String::new() }),
            2 => Event::Fact(Fact::RankRaised { attempt, rank, pid: Pid(1), note, data: None }),
            3 => Event::Fact(Fact::RankExited {
                attempt,
                rank,
                pid: Pid(1),
                status,
                step: None,
                data: None,
                after_stop: flag,
                stderr_tail: vec![],
                stdout_tail: vec![],
                stderr_times: Vec::new(),
                stdout_times: Vec::new(),
            }),
            4 => Event::Fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: vec![] }),
            5 => Event::Fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: vec![rank] }),
            6 => Event::Fact(Fact::start_failed(attempt, "e".into())),
            7 => Event::AgentEvidence(None),
            8 => Event::Wake,
            10 => Event::Fact(Fact::RankEnding { attempt, rank, pid: Pid(1), status }),
            9 => Event::Held(if flag { vec!["a port".into()] } else { Vec::new() }),
            _ => Event::Steps {
                attempt,
                ranks: vec![(
                    rank,
                    vec![StepDone {
                        step: u64::from(n),
                        start: Mono(5),
                        end: Mono(9),
                        ..StepDone::default()
                    }],
                )],
            },
        }
    })
}

proptest! {
    /// For all inputs: the starts stay within the budget, no order follows the end, and the time accounting adds up.
    #[test]
    fn the_budget_limits_the_starts_and_no_order_follows_the_end(inputs in prop::collection::vec(any_input(), 0..120)) {
        let mut run = Run::begin(2);
        for input in inputs {
            run.report(input);
        }
        let orders = run.orders();
        let starts: Vec<Attempt> = orders
            .iter()
            .filter_map(|order| match order {
                Command::Start { attempt, .. } => Some(*attempt),
                _ => None,
            })
            .collect();
        prop_assert!(starts.len() <= 3);
        // Never two attempts at once: each start is of the next attempt, after the end of the previous one.
        for (number, attempt) in starts.iter().enumerate() {
            prop_assert_eq!(*attempt, Attempt(number as u32));
        }
        if let Some(end) = orders.iter().position(|order| matches!(order, Command::Finish { .. })) {
            prop_assert_eq!(end, orders.len() - 1);
        }
        let accounting = run.job.summary(Mono(run.now)).accounting;
        prop_assert_eq!(accounting.parts.values().map(|span| span.0).sum::<u64>(), accounting.wall.0);
    }
}

/// A job whose steps take 10 s each. A step for which `saving` holds spends 1 s of them on a save.
fn saving_job(saving: impl Fn(u64) -> bool) -> Run {
    const SECOND: u64 = 1_000_000_000;
    let mut run = Run::begin(3);
    run.start(0);
    for step in 1..=9 {
        run.now += 10 * SECOND;
        for rank in [Rank(0), Rank(1)] {
            let checkpoint_ns = u64::from(saving(step)) * SECOND;
            let (start, end) = (Mono(run.now - 10 * SECOND), Mono(run.now));
            let done = StepDone { step, start, end, checkpoint_ns, ..StepDone::default() };
            run.job.step(
                Mono(run.now),
                Event::Steps { attempt: Attempt(0), ranks: vec![(rank, vec![done])] },
                &mut run.out,
            );
        }
    }
    run
}

fn advised(run: &Run) -> Vec<Advised> {
    let seen = run.bodies().into_iter().filter_map(|body| match body {
        Body::Fact(Fact::Observed(seen)) => Advised::read(seen),
        _ => None,
    });
    seen.collect()
}

#[test]
fn a_job_that_saves_gets_one_advised_interval_and_others_get_none() {
    let run = saving_job(|_| true);
    let reported = advised(&run);
    // Reported once it is known. A step that changes it only a little does not report it again.
    assert_eq!(reported.len(), 1, "{reported:?}");
    assert!(
        (reported[0].stall - 1.0).abs() < 1e-9 && reported[0].every > 100.0 && reported[0].was < 20.0,
        "{reported:?}"
    );
    let mut view = NodeView::default();
    let id = JobId("job".into());
    let bodies = [Body::Fact(Fact::JobStarted(JobSpec::default()))];
    for body in bodies.iter().chain(run.bodies()) {
        let (boot, at) = (BootId::default(), Stamp::default());
        let body = body.clone();
        view.apply(&Entry { seq: 1, at, boot, job: Some(id.clone()), origin_seq: None, body });
    }
    assert_eq!(view.jobs[&id].saving, Some(reported[0]));
    assert!(advised(&saving_job(|_| false)).is_empty());
}

#[test]
fn a_save_is_due_during_training_and_not_after_a_stop_request() {
    let mut run = saving_job(|step| step == 1);
    let mut at = |seconds: u64| run.job.save_is_due(Mono(run.now + seconds * 1_000_000_000));
    // The first step ended 80 s ago.
    assert!(at(0) && !at(59) && at(60));
    run.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
    assert!(!run.job.save_is_due(Mono(run.now + 1_000_000_000_000)));
    let mut fresh = Run::begin(3);
    fresh.start(0);
    assert!(!fresh.job.save_is_due(Mono(1_000_000_000_000)), "nothing is trained yet");
}

//! The job's state machine when ranks keep their processes.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use crate::support;

use mainstay_model::entry::{Body, ExitStatus, Fact};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::Action;
use mainstay_recovery::protocol::{Command, Event, StopWhy};
use support::job::Run;

/// Ranks that keep their processes.
impl Run {
    fn ended_with(&mut self, attempt: u32, waiting: &[u32]) {
        let waiting = waiting.iter().map(|rank| Rank(*rank)).collect();
        self.fact(Fact::AttemptEnded { attempt: Attempt(attempt), orphans_killed: 0, waiting });
    }

    /// Rank 1 raises, both ranks wait in their processes, the agent is absent.
    fn raise_and_decide(&mut self, attempt: u32, message: &str) {
        self.raise(attempt, 1, message);
        self.ended_with(attempt, &[0, 1]);
        self.report(Event::AgentEvidence(None));
    }

    fn last_action(&self) -> Action {
        let decision = |body: &&Body| if let Body::Decision(of) = body { Some(of.action) } else { None };
        self.bodies().iter().rev().find_map(decision).expect("a decision")
    }
}

#[test]
fn ranks_that_all_wait_continue_in_their_processes() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.raise_and_decide(0, "lost");
    assert_eq!(run.last_order(), &Command::start_round(Attempt(1)));
    assert_eq!(run.last_action(), Action::RestartInProcess { attempt: Attempt(1) });
    run.start(1);
    run.steps(1, 6..=8);
    assert!(run.bodies().iter().any(|body| matches!(body, Body::Outcome(of) if of.step == 6)));
}

#[test]
fn a_killed_rank_is_respawned_and_the_others_continue() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    run.ended_with(0, &[0]);
    run.report(Event::AgentEvidence(None));
    assert_eq!(run.last_order(), &Command::start_round(Attempt(1)));
    assert_eq!(run.last_action(), Action::RespawnRanks { attempt: Attempt(1) });
}

#[test]
fn the_same_exception_at_the_same_step_also_ends_an_in_process_job() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=7);
    run.raise_and_decide(0, "bug");
    run.start(1);
    run.steps(1, 1..=7);
    run.raise_and_decide(1, "bug");
    let dismissed = Command::stop(Attempt(1), StopWhy::Dismissed);
    assert_eq!(run.last_order(), &dismissed, "no rank is left waiting");
    for rank in [0, 1] {
        run.exit(1, rank, ExitStatus::Signal(15), true);
    }
    run.ended(1);
    assert_eq!(run.last_order(), &Command::finish(1));
    assert!(run.job.summary(Mono(run.now)).reason.contains("recurred"));
}

#[test]
fn processes_that_fail_again_before_a_step_are_replaced_by_new_ones() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=7);
    let kill_and_keep_the_other = |run: &mut Run, attempt| {
        run.exit(attempt, 1, ExitStatus::Signal(9), false);
        run.ended_with(attempt, &[0]);
        run.report(Event::AgentEvidence(None));
    };
    kill_and_keep_the_other(&mut run, 0);
    assert_eq!(run.last_action(), Action::RespawnRanks { attempt: Attempt(1) });
    run.start(1);
    kill_and_keep_the_other(&mut run, 1);
    assert_eq!(run.last_order(), &Command::stop(Attempt(1), StopWhy::Dismissed));
    run.ended(1);
    run.report(Event::AgentEvidence(None));
    assert_eq!(run.last_action(), Action::RestartInJob { attempt: Attempt(2) });
    // Delayed, because the previous restart brought no new step.
    run.now += 10_000_000_000;
    run.report(Event::Wake);
    assert_eq!(run.last_order(), &Command::start(Attempt(2)));
}

#[test]
fn an_in_process_restart_waits_for_resources_of_a_lost_rank() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    run.ended_with(0, &[0]);
    let held = HostEvidence { held: vec!["gpu.0000:3b:00: held".into()], ..HostEvidence::default() };
    run.report_evidence(1, held);
    assert_eq!(run.last_action(), Action::Wait);
    run.wait(Span::seconds(1));
    run.report_evidence(1, HostEvidence::default());
    assert_eq!(run.last_order(), &Command::start_round(Attempt(1)));
}

#[test]
fn a_waiting_rank_that_is_replaced_frees_its_gpu_before_the_others_continue() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=7);
    run.raise_and_decide(0, "lost");
    run.start(1);
    run.raise_and_decide(1, "lost again, and otherwise");
    assert_eq!(run.last_order(), &Command::EndRank { attempt: Attempt(1), rank: Rank(1) });
    run.exit(1, 1, ExitStatus::Signal(9), true);
    run.ended_with(1, &[0]);
    assert!(matches!(run.last_order(), Command::Consult(_)), "{:?}", run.last_order());
    let held = HostEvidence { held: vec!["gpu.0000:3b:00: held".into()], ..HostEvidence::default() };
    run.report_evidence(2, held);
    assert_eq!(run.last_action(), Action::Wait);
    run.wait(Span::seconds(10));
    run.report_evidence(2, HostEvidence::default());
    assert_eq!(run.last_order(), &Command::start_round(Attempt(2)));
    assert_eq!(run.last_action(), Action::RespawnRanks { attempt: Attempt(2) });
}

#[test]
fn dismissed_ranks_free_their_gpus_before_all_ranks_are_restarted() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=7);
    for attempt in 0..2 {
        run.exit(attempt, 1, ExitStatus::Signal(9), false);
        run.ended_with(attempt, &[0]);
        run.report_evidence(u64::from(attempt) + 1, HostEvidence::default());
        if attempt == 0 {
            run.start(1);
        }
    }
    assert_eq!(run.last_order(), &Command::stop(Attempt(1), StopWhy::Dismissed));
    let decided = run.decisions().len();
    run.ended(1);
    assert!(matches!(run.last_order(), Command::Consult(_)), "{:?}", run.last_order());
    let held = HostEvidence { held: vec!["gpu.0000:3b:00: held".into()], ..HostEvidence::default() };
    run.report_evidence(2, held);
    assert_eq!(run.last_action(), Action::Wait);
    run.wait(Span::seconds(10));
    run.report_evidence(2, HostEvidence::default());
    assert_eq!(run.last_order(), &Command::start(Attempt(2)));
    assert_eq!(run.decisions().len(), decided + 2, "one to wait and one to restart");
}

#[test]
fn a_job_that_is_asked_to_stop_leaves_no_rank_waiting() {
    let mut run = Run::begin(3);
    run.start(0);
    run.raise(0, 1, "lost");
    run.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
    run.ended_with(0, &[0, 1]);
    assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Dismissed));
    run.ended(0);
    assert_eq!(run.last_order(), &Command::finish(143));

    let mut run = Run::begin(3);
    run.start(0);
    run.raise(0, 1, "lost");
    run.ended_with(0, &[0, 1]);
    run.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
    assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Dismissed));
    run.report(Event::AgentEvidence(None));
    run.ended(0);
    assert_eq!(run.last_order(), &Command::finish(143));
}

#[test]
fn an_in_process_restart_without_a_new_step_is_followed_by_new_processes() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.raise_and_decide(0, "lost");
    run.start(1);
    assert!(matches!(run.last_order(), Command::Wake { .. }), "the restart still has time");
    run.wait(Span::seconds(299));
    assert!(matches!(run.last_order(), Command::Wake { .. }));
    run.wait(Span::seconds(2));
    assert_eq!(run.last_order(), &Command::stop(Attempt(1), StopWhy::Fault));
    run.ended_with(1, &[0, 1]);
    run.report(Event::AgentEvidence(None));
    testing::snapshot!(
        "reasons",
        "job_in_process: an in process restart without a new step is followed by new processes",
        run.last_verdict().headline
    );
    assert_eq!(run.last_order(), &Command::stop(Attempt(1), StopWhy::Dismissed));
    run.ended(1);
    run.report(Event::AgentEvidence(None));
    assert_eq!(run.last_action(), Action::RestartInJob { attempt: Attempt(2) });
    // The second restart without a new step is delayed.
    run.wait(Span::seconds(2));
    assert_eq!(run.last_order(), &Command::start(Attempt(2)));
}

#[test]
fn an_in_process_restart_with_a_new_step_and_new_processes_have_no_time_limit() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.raise_and_decide(0, "lost");
    run.start(1);
    run.steps(1, 7..=8);
    run.wait(Span::seconds(4000));
    run.kill_and_decide(1);
    run.start(2);
    let orders = run.orders().len();
    run.wait(Span::seconds(4000));
    assert_eq!(run.orders().len(), orders, "the host has no higher rung");
}

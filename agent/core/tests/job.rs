//! The job's state machine, driven as the launcher drives it.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use mainstay_core::entry::{Body, ExitStatus, Fact, JobSpec, Note, StartedRank, StepDone};
use mainstay_core::hang::{Hang, HangKind, PlaceGroup, Waits};
use mainstay_core::health::{Component, HealthState, RecommendedAction};
use mainstay_core::id::{Attempt, Incident, Pid, Rank};
use mainstay_core::job::{Input, Job, Order, Output, Ruling, StopWhy};
use mainstay_core::policy::{Budget, HAND_BACK_EXIT};
use mainstay_core::testimony::Testimony;
use mainstay_core::time::{Mono, Span};
use mainstay_core::verdict::{Action, Cause, DecidedBy, Verdict};
use proptest::prelude::*;

/// A job of two ranks with its outputs.
struct Run {
    job: Job,
    out: Vec<Output>,
    now: u64,
}

impl Run {
    fn begin(max_restarts: u32) -> Run {
        let mut out = Vec::new();
        let spec = JobSpec { world_size: 2, local_world_size: 2, ..JobSpec::default() };
        let job = Job::begin(Mono(0), spec, Budget { max_restarts, window: None }, &mut out);
        Run { job, out, now: 0 }
    }

    fn tell(&mut self, input: Input) {
        self.now += 10;
        self.job.step(Mono(self.now), input, &mut self.out);
    }

    fn fact(&mut self, fact: Fact) {
        self.tell(Input::Fact(fact));
    }

    fn start(&mut self, attempt: u32) {
        let ranks = [0, 1].map(|n| StartedRank {
            rank: Rank(n),
            local_rank: n,
            pid: Pid(100 + n as i32),
            page: None,
        });
        self.fact(Fact::AttemptStarted { attempt: Attempt(attempt), master_port: 1, ranks: ranks.into() });
        for rank in [Rank(0), Rank(1)] {
            self.fact(Fact::RankConnected { attempt: Attempt(attempt), rank, client: "test".into() });
        }
    }

    fn steps(&mut self, attempt: u32, steps: std::ops::RangeInclusive<u64>) {
        for step in steps {
            self.now += 10;
            for rank in [Rank(0), Rank(1)] {
                let done =
                    StepDone { step, start: Mono(self.now - 10), end: Mono(self.now), ..StepDone::default() };
                let input = Input::Steps { attempt: Attempt(attempt), rank, done: vec![done] };
                self.job.step(Mono(self.now), input, &mut self.out);
            }
        }
    }

    fn exit(&mut self, attempt: u32, rank: u32, status: ExitStatus, after_stop: bool) {
        self.fact(Fact::RankExited {
            attempt: Attempt(attempt),
            rank: Rank(rank),
            pid: Pid(1),
            status,
            step: None,
            after_stop,
            stderr_tail: vec![],
        });
    }

    fn ending(&mut self, attempt: u32, rank: u32, status: ExitStatus) {
        let (attempt, rank) = (Attempt(attempt), Rank(rank));
        self.fact(Fact::RankEnding { attempt, rank, pid: Pid(1), status });
    }

    fn raise(&mut self, attempt: u32, rank: u32, message: &str) {
        let note = Note {
            exception: "builtins.ValueError".into(),
            message: message.into(),
            at: Mono(self.now),
            ..Note::default()
        };
        self.fact(Fact::RankRaised { attempt: Attempt(attempt), rank: Rank(rank), pid: Pid(1), note });
    }

    fn ended(&mut self, attempt: u32) {
        self.fact(Fact::AttemptEnded { attempt: Attempt(attempt), orphans_killed: 0, waiting: vec![] });
    }

    /// A rank is killed, the other one stopped, the agent absent.
    fn kill_and_decide(&mut self, attempt: u32) {
        self.exit(attempt, 1, ExitStatus::Signal(9), false);
        self.exit(attempt, 0, ExitStatus::Signal(15), true);
        self.ended(attempt);
        self.tell(Input::Ruling(None));
    }

    fn orders(&self) -> Vec<&Order> {
        self.out
            .iter()
            .filter_map(|output| match output {
                Output::Order(order) => Some(order),
                Output::Record(_) => None,
            })
            .collect()
    }

    fn last_order(&self) -> &Order {
        self.orders().pop().expect("an order")
    }

    fn bodies(&self) -> Vec<&Body> {
        self.out
            .iter()
            .filter_map(|output| match output {
                Output::Record(body) => Some(body),
                Output::Order(_) => None,
            })
            .collect()
    }
}

#[test]
fn a_killed_rank_is_named_and_all_ranks_are_started_again() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    assert_eq!(run.last_order(), &Order::StopRanks { attempt: Attempt(0), why: StopWhy::Fault });
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.ended(0);
    run.tell(Input::Ruling(None));
    assert_eq!(run.last_order(), &Order::StartRanks(Attempt(1)));
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

#[test]
fn a_step_counts_once_though_the_ranks_connect_one_after_the_other() {
    let mut run = Run::begin(3);
    let ranks = [0, 1].map(|n| StartedRank { rank: Rank(n), local_rank: n, pid: Pid(1), page: None });
    run.fact(Fact::AttemptStarted { attempt: Attempt(0), master_port: 1, ranks: ranks.into() });
    for rank in [Rank(1), Rank(0)] {
        run.fact(Fact::RankConnected { attempt: Attempt(0), rank, client: "test".into() });
        for step in 0..7 {
            let (start, end) = (Mono(run.now), Mono(run.now + 10));
            let done = StepDone { step, start, end, first: step == 0, ..StepDone::default() };
            run.tell(Input::Steps { attempt: Attempt(0), rank, done: vec![done] });
        }
    }
    assert_eq!(run.job.summary(Mono(run.now)).books.steps, 7);
}

#[test]
fn the_launcher_exits_as_the_culprit_did_when_the_budget_is_used_up() {
    let mut run = Run::begin(1);
    run.start(0);
    run.kill_and_decide(0);
    run.start(1);
    run.kill_and_decide(1);
    assert_eq!(run.last_order(), &Order::Finish { exit: 137 });
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
        run.tell(Input::Ruling(None));
    }
    assert_eq!(run.last_order(), &Order::Finish { exit: 1 });
}

#[test]
fn ranks_that_are_all_done_end_the_job_with_success() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=2);
    run.exit(0, 0, ExitStatus::Code(0), false);
    run.exit(0, 1, ExitStatus::Code(0), false);
    assert_eq!(run.last_order(), &Order::StopRanks { attempt: Attempt(0), why: StopWhy::Done });
    run.ended(0);
    assert_eq!(run.last_order(), &Order::Finish { exit: 0 });
}

#[test]
fn a_request_to_stop_is_not_a_failure() {
    let mut run = Run::begin(3);
    run.start(0);
    run.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.exit(0, 1, ExitStatus::Signal(15), true);
    run.ended(0);
    assert_eq!(run.last_order(), &Order::Finish { exit: 143 });
    assert!(!run.bodies().iter().any(|body| matches!(body, Body::Verdict(_))));
}

#[test]
fn the_agent_may_rule_otherwise_and_only_on_the_open_incident() {
    let mut run = Run::begin(3);
    run.start(0);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.ended(0);
    let stop = (Action::Stop { exit: 9 }, "the disk is read-only".to_owned());
    run.tell(Input::Ruling(Some(Ruling {
        incident: Incident(7),
        instead: Some(stop.clone()),
        testimony: Testimony::default(),
    })));
    assert!(matches!(run.last_order(), Order::Consult { .. }));
    run.tell(Input::Ruling(Some(Ruling {
        incident: Incident(1),
        instead: Some(stop),
        testimony: Testimony::default(),
    })));
    assert_eq!(run.last_order(), &Order::Finish { exit: 9 });
    assert!(run.bodies().iter().any(|body| matches!(body, Body::Decision(d) if d.by == DecidedBy::Agent)));
}

/// A sick component of the kind that nothing but another host helps against.
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

impl Run {
    /// Rank 1 is killed and no process is left; the host is to be asked next.
    fn kill(&mut self, attempt: u32) {
        self.exit(attempt, 1, ExitStatus::Signal(9), false);
        self.exit(attempt, 0, ExitStatus::Signal(15), true);
        self.ended(attempt);
    }

    fn testify(&mut self, incident: u64, testimony: Testimony) {
        let ruling = Ruling { incident: Incident(incident), instead: None, testimony };
        self.tell(Input::Ruling(Some(ruling)));
    }

    fn wait(&mut self, span: Span) {
        self.now += span.0;
        self.tell(Input::LookAgain);
    }

    fn decisions(&self) -> Vec<Action> {
        let decided = |body: &&Body| match body {
            Body::Decision(decision) => Some(decision.action),
            _ => None,
        };
        self.bodies().iter().filter_map(decided).collect()
    }
}

#[test]
fn a_restart_waits_until_what_the_ranks_need_is_free_and_says_so_once() {
    let mut run = Run::begin(3);
    run.start(0);
    run.kill(0);
    let held = Testimony { held: vec!["gpu.0000:3b:00: in use by process 7".into()], ..Testimony::default() };
    run.testify(1, held.clone());
    for _ in 0..5 {
        assert!(matches!(run.last_order(), Order::LookAgain { .. }), "{:?}", run.last_order());
        run.wait(Span::seconds(1));
        assert!(matches!(run.last_order(), Order::Consult { .. }));
        run.testify(1, held.clone());
    }
    assert_eq!(run.decisions(), [Action::Wait]);
    run.wait(Span::seconds(1));
    run.testify(1, Testimony::default());
    assert_eq!(run.last_order(), &Order::StartRanks(Attempt(1)));
    assert_eq!(run.decisions(), [Action::Wait, Action::RestartInJob { attempt: Attempt(1) }]);
}

#[test]
fn what_the_launcher_sees_held_counts_without_an_agent_and_not_for_ever() {
    let mut run = Run::begin(3);
    run.start(0);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.ended(0);
    run.tell(Input::Held(vec!["port 29500: somebody listens on it".into()]));
    run.tell(Input::Ruling(None));
    assert_eq!(run.decisions(), [Action::Wait]);
    run.wait(Span::seconds(61));
    run.tell(Input::Ruling(None));
    assert_eq!(run.last_order(), &Order::Finish { exit: HAND_BACK_EXIT });
}

#[test]
fn a_host_that_lost_a_gpu_is_handed_back_at_once_and_a_healthy_one_restarts_at_once() {
    for (sick, last) in
        [(vec![lost_gpu()], Order::Finish { exit: HAND_BACK_EXIT }), (vec![], Order::StartRanks(Attempt(1)))]
    {
        let mut run = Run::begin(3);
        run.start(0);
        run.kill(0);
        run.testify(1, Testimony { sick, ..Testimony::default() });
        assert_eq!(run.last_order(), &last);
    }
}

#[test]
fn a_second_restart_without_a_new_step_is_held_back_and_a_stop_meanwhile_is_heard() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=5);
    run.kill_and_decide(0);
    assert_eq!(run.last_order(), &Order::StartRanks(Attempt(1)));
    run.start(1);
    run.steps(1, 1..=5);
    run.kill_and_decide(1);
    let Order::LookAgain { at } = *run.last_order() else { panic!("{:?}", run.last_order()) };
    run.tell(Input::LookAgain);
    assert_eq!(run.last_order(), &Order::LookAgain { at }, "too early");
    let mut asked = Run { job: run.job.clone(), out: Vec::new(), now: run.now };
    asked.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
    assert_eq!(asked.last_order(), &Order::Finish { exit: 143 });
    run.wait(Span::seconds(2));
    assert_eq!(run.last_order(), &Order::StartRanks(Attempt(2)));
}

#[test]
fn an_ordered_restart_is_no_failure_and_costs_no_budget() {
    let mut run = Run::begin(1);
    run.start(0);
    run.steps(0, 1..=5);
    run.tell(Input::Restart);
    assert_eq!(run.last_order(), &Order::StopRanks { attempt: Attempt(0), why: StopWhy::Ordered });
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.exit(0, 1, ExitStatus::Signal(15), true);
    run.ended(0);
    assert_eq!(run.last_order(), &Order::StartRanks(Attempt(1)));
    assert!(!run.bodies().iter().any(|body| matches!(body, Body::Verdict(_))));
    run.start(1);
    run.kill_and_decide(1);
    assert_eq!(run.last_order(), &Order::StartRanks(Attempt(2)));
}

#[test]
fn a_start_that_fails_is_not_tried_again() {
    let mut run = Run::begin(3);
    run.fact(Fact::StartFailed { attempt: Attempt(0), error: "no such file: pythn3".into() });
    run.tell(Input::Ruling(None));
    assert_eq!(run.last_order(), &Order::Finish { exit: 1 });
}

#[test]
fn the_others_are_stopped_as_soon_as_a_failed_rank_begins_to_end_and_it_is_the_one_that_is_named() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.ending(0, 1, ExitStatus::Signal(9));
    let began_to_end = Mono(run.now);
    assert_eq!(run.last_order(), &Order::StopRanks { attempt: Attempt(0), why: StopWhy::Fault });
    let orders = run.orders().len();
    // The survivor is gone long before the kernel is done with the large one.
    run.exit(0, 0, ExitStatus::Signal(15), true);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    assert_eq!(run.orders().len(), orders, "stopped once");
    run.ended(0);
    run.tell(Input::Ruling(None));
    let verdict = run.bodies().into_iter().find_map(|body| match body {
        Body::Verdict(verdict) => Some(verdict.clone()),
        _ => None,
    });
    let verdict = verdict.expect("a verdict");
    assert_eq!((verdict.culprit, &verdict.victims[..]), (Some(Rank(1)), &[Rank(0)][..]));
    assert_eq!((verdict.fault_at, verdict.detected_at), (began_to_end, began_to_end));
}

#[test]
fn an_end_of_another_attempt_or_one_without_failure_stops_nobody() {
    let mut run = Run::begin(3);
    run.start(0);
    let before = run.orders().len();
    run.ending(0, 1, ExitStatus::Code(0));
    run.ending(7, 1, ExitStatus::Signal(9));
    assert_eq!(run.orders().len(), before);
}

/// Anything the launcher might say, in any order.
fn any_input() -> impl Strategy<Value = Input> {
    let attempt = (0u32..3).prop_map(Attempt);
    let status = prop::sample::select(vec![
        ExitStatus::Code(0),
        ExitStatus::Code(1),
        ExitStatus::Signal(9),
        ExitStatus::Signal(15),
    ]);
    (attempt, 0u32..3, status, any::<bool>(), 0u8..12).prop_map(|(attempt, n, status, flag, kind)| {
        let rank = Rank(n);
        let started = |n: u32| StartedRank { rank: Rank(n), local_rank: n, pid: Pid(1), page: None };
        let note = Note { exception: "E".into(), ..Note::default() };
        match kind {
            0 => Input::Fact(Fact::AttemptStarted {
                attempt,
                master_port: 1,
                ranks: vec![started(0), started(1)],
            }),
            1 => Input::Fact(Fact::RankConnected { attempt, rank, client: String::new() }),
            2 => Input::Fact(Fact::RankRaised { attempt, rank, pid: Pid(1), note }),
            3 => Input::Fact(Fact::RankExited {
                attempt,
                rank,
                pid: Pid(1),
                status,
                step: None,
                after_stop: flag,
                stderr_tail: vec![],
            }),
            4 => Input::Fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: vec![] }),
            5 => Input::Fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: vec![rank] }),
            6 => Input::Fact(Fact::StartFailed { attempt, error: "e".into() }),
            7 => Input::Ruling(None),
            8 => Input::LookAgain,
            10 => Input::Fact(Fact::RankEnding { attempt, rank, pid: Pid(1), status }),
            9 => Input::Held(if flag { vec!["a port".into()] } else { Vec::new() }),
            _ => Input::Steps {
                attempt,
                rank,
                done: vec![StepDone {
                    step: u64::from(n),
                    start: Mono(5),
                    end: Mono(9),
                    ..StepDone::default()
                }],
            },
        }
    })
}

proptest! {
    /// Whatever comes in: never more starts than the budget allows, nothing after the end, and balanced books.
    #[test]
    fn budgets_hold_and_the_end_is_the_end(inputs in prop::collection::vec(any_input(), 0..120)) {
        let mut run = Run::begin(2);
        for input in inputs {
            run.tell(input);
        }
        let orders = run.orders();
        let starts: Vec<Attempt> = orders
            .iter()
            .filter_map(|order| match order {
                Order::StartRanks(attempt) | Order::StartRound { attempt, .. } => Some(*attempt),
                _ => None,
            })
            .collect();
        prop_assert!(starts.len() <= 3);
        // Never two at once: each start is of the next attempt, and after the end of the one before.
        for (number, attempt) in starts.iter().enumerate() {
            prop_assert_eq!(*attempt, Attempt(number as u32));
        }
        if let Some(end) = orders.iter().position(|order| matches!(order, Order::Finish { .. })) {
            prop_assert_eq!(end, orders.len() - 1);
        }
        let books = run.job.summary(Mono(run.now)).books;
        prop_assert_eq!(books.parts.values().map(|span| span.0).sum::<u64>(), books.wall.0);
    }
}

impl Run {
    /// Rank 1 hangs after step 5, its evidence is taken, all are stopped, the agent is absent.
    fn hang_and_decide(&mut self, attempt: u32, kind: HangKind) {
        self.hang_with(attempt, kind, 0.9, Vec::new());
        self.tell(Input::Ruling(None));
    }

    fn hang_with(&mut self, attempt: u32, kind: HangKind, confidence: f64, waits: Vec<Waits>) {
        let hang = Hang {
            kind,
            culprits: vec![Rank(1)],
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
        assert_eq!(self.orders().last(), Some(&&Order::TakeEvidence(attempt_of)));
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

    fn last_verdict(&self) -> &Verdict {
        let mut verdicts = self.out.iter().filter_map(|output| match output {
            Output::Record(Body::Verdict(verdict)) => Some(verdict),
            _ => None,
        });
        verdicts.next_back().expect("a verdict")
    }
}

#[test]
fn who_never_entered_is_named_by_the_recorders_where_the_verdict_is_not_sure() {
    let waits =
        Waits { kind: Some(HangKind::UserCode), culprits: vec![Rank(0)], told: "all wait for rank 0".into() };
    for (confidence, culprit) in [(0.3, Rank(0)), (0.97, Rank(1))] {
        let mut run = Run::begin(9);
        run.start(0);
        run.steps(0, 1..=5);
        run.hang_with(0, HangKind::AllStill, confidence, vec![waits.clone()]);
        let verdict = run.last_verdict();
        assert_eq!(verdict.culprit, Some(culprit));
        assert_eq!(verdict.victims, [Rank(1 - culprit.0)]);
        assert!(verdict.evidence.contains(&"all wait for rank 0".to_owned()), "{:?}", verdict.evidence);
    }
}

#[test]
fn what_the_gpus_did_in_a_hang_stands_in_its_verdict_once() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=5);
    run.hang_with(0, HangKind::Stopped, 0.97, Vec::new());
    let gpus = vec!["GPU 0000:3b:00: 0 % busy, 2.00 s before".to_owned()];
    run.testify(1, Testimony { gpus: gpus.clone(), ..Testimony::default() });
    let told = run.last_verdict().evidence.iter().filter(|line| gpus.contains(line)).count();
    assert_eq!(told, 1);
    assert_eq!(run.last_order(), &Order::StartRanks(Attempt(1)));
}

#[test]
fn a_hang_is_restarted_and_the_same_of_the_programs_own_is_not_restarted_twice() {
    for (kind, restarts) in [(HangKind::UserCode, false), (HangKind::Stopped, true)] {
        let mut run = Run::begin(9);
        run.start(0);
        run.steps(0, 1..=5);
        run.hang_and_decide(0, kind);
        assert_eq!(run.orders().last(), Some(&&Order::StartRanks(Attempt(1))));
        run.start(1);
        run.steps(1, 1..=5);
        run.hang_and_decide(1, kind);
        // The first restart brought no new step, so the second is held back.
        run.wait(Span::seconds(2));
        assert_eq!(run.orders().last() == Some(&&Order::StartRanks(Attempt(2))), restarts, "{kind:?}");
        let verdict = run.out.iter().find_map(|output| match output {
            Output::Record(Body::Verdict(verdict)) => Some(verdict),
            _ => None,
        });
        let verdict = verdict.expect("a verdict");
        assert_eq!((verdict.culprit, verdict.step), (Some(Rank(1)), Some(5)));
        assert!(verdict.evidence.contains(&"rank 1 in read".to_owned()), "{:?}", verdict.evidence);
    }
}

#[test]
fn a_hang_that_passes_while_its_evidence_is_taken_stops_nobody() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=5);
    let hang = Hang {
        kind: HangKind::AllStill,
        culprits: Vec::new(),
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
    assert!(!run.orders().iter().any(|order| matches!(order, Order::StopRanks { .. })));
}

/// Ranks that stay in their processes.
impl Run {
    fn ended_with(&mut self, attempt: u32, waiting: &[u32]) {
        let waiting = waiting.iter().map(|rank| Rank(*rank)).collect();
        self.fact(Fact::AttemptEnded { attempt: Attempt(attempt), orphans_killed: 0, waiting });
    }

    /// Rank 1 raises, both ranks wait in their processes, the agent is absent.
    fn raise_and_decide(&mut self, attempt: u32, message: &str) {
        self.raise(attempt, 1, message);
        self.ended_with(attempt, &[0, 1]);
        self.tell(Input::Ruling(None));
    }

    fn last_action(&self) -> Action {
        let decision = |body: &&Body| if let Body::Decision(of) = body { Some(of.action) } else { None };
        self.bodies().iter().rev().find_map(decision).expect("a decision")
    }
}

#[test]
fn ranks_that_all_wait_go_on_in_their_processes() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.raise_and_decide(0, "lost");
    assert_eq!(run.last_order(), &Order::StartRound { attempt: Attempt(1), without: None });
    assert_eq!(run.last_action(), Action::RestartInProcess { attempt: Attempt(1) });
    run.start(1);
    run.steps(1, 6..=8);
    assert!(run.bodies().iter().any(|body| matches!(body, Body::Outcome(of) if of.step == 6)));
}

#[test]
fn a_killed_rank_is_started_again_and_the_others_go_on() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.exit(0, 1, ExitStatus::Signal(9), false);
    run.ended_with(0, &[0]);
    run.tell(Input::Ruling(None));
    assert_eq!(run.last_order(), &Order::StartRound { attempt: Attempt(1), without: None });
    assert_eq!(run.last_action(), Action::RespawnRanks { attempt: Attempt(1) });
}

#[test]
fn the_same_exception_at_the_same_step_ends_the_job_in_process_too() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=7);
    run.raise_and_decide(0, "bug");
    run.start(1);
    run.steps(1, 1..=7);
    run.raise_and_decide(1, "bug");
    let dismissed = Order::StopRanks { attempt: Attempt(1), why: StopWhy::Dismissed };
    assert_eq!(run.last_order(), &dismissed, "no rank is left waiting");
    for rank in [0, 1] {
        run.exit(1, rank, ExitStatus::Signal(15), true);
    }
    run.ended(1);
    assert_eq!(run.last_order(), &Order::Finish { exit: 1 });
    assert!(run.job.summary(Mono(run.now)).reason.contains("came again"));
}

#[test]
fn processes_that_fail_again_before_a_step_are_replaced() {
    let mut run = Run::begin(9);
    run.start(0);
    run.steps(0, 1..=7);
    let kill_and_keep_the_other = |run: &mut Run, attempt| {
        run.exit(attempt, 1, ExitStatus::Signal(9), false);
        run.ended_with(attempt, &[0]);
        run.tell(Input::Ruling(None));
    };
    kill_and_keep_the_other(&mut run, 0);
    assert_eq!(run.last_action(), Action::RespawnRanks { attempt: Attempt(1) });
    run.start(1);
    kill_and_keep_the_other(&mut run, 1);
    assert_eq!(run.last_action(), Action::RestartInJob { attempt: Attempt(2) });
    // Held back, because the one before brought nothing.
    run.now += 10_000_000_000;
    run.tell(Input::LookAgain);
    assert_eq!(run.last_order(), &Order::StopRanks { attempt: Attempt(1), why: StopWhy::Dismissed });
    run.ended(1);
    assert_eq!(run.last_order(), &Order::StartRanks(Attempt(2)));
}

#[test]
fn a_job_that_is_asked_to_stop_leaves_no_rank_waiting() {
    let mut run = Run::begin(3);
    run.start(0);
    run.raise(0, 1, "lost");
    run.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
    run.ended_with(0, &[0, 1]);
    assert_eq!(run.last_order(), &Order::StopRanks { attempt: Attempt(0), why: StopWhy::Dismissed });
    run.ended(0);
    assert_eq!(run.last_order(), &Order::Finish { exit: 143 });

    let mut run = Run::begin(3);
    run.start(0);
    run.raise(0, 1, "lost");
    run.ended_with(0, &[0, 1]);
    run.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
    assert_eq!(run.last_order(), &Order::StopRanks { attempt: Attempt(0), why: StopWhy::Dismissed });
    run.tell(Input::Ruling(None));
    run.ended(0);
    assert_eq!(run.last_order(), &Order::Finish { exit: 143 });
}

#[test]
fn a_restart_in_process_that_brings_no_step_is_followed_by_new_processes() {
    let mut run = Run::begin(3);
    run.start(0);
    run.steps(0, 1..=7);
    run.raise_and_decide(0, "lost");
    run.start(1);
    assert!(matches!(run.last_order(), Order::LookAgain { .. }), "it has its time");
    run.wait(Span::seconds(299));
    assert!(matches!(run.last_order(), Order::LookAgain { .. }));
    run.wait(Span::seconds(2));
    assert_eq!(run.last_order(), &Order::StopRanks { attempt: Attempt(1), why: StopWhy::Fault });
    run.ended_with(1, &[0, 1]);
    run.tell(Input::Ruling(None));
    assert_eq!(
        run.last_verdict().headline,
        "restarting in process has brought no step of all ranks within 300.00 s"
    );
    assert_eq!(run.last_action(), Action::RestartInJob { attempt: Attempt(2) });
    // The second restart without a new step is held back a little.
    run.wait(Span::seconds(2));
    assert_eq!(run.last_order(), &Order::StopRanks { attempt: Attempt(1), why: StopWhy::Dismissed });
    run.ended(1);
    assert_eq!(run.last_order(), &Order::StartRanks(Attempt(2)));
}

#[test]
fn a_restart_that_brought_its_step_is_left_alone_and_so_are_new_processes_of_all_ranks() {
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
    assert_eq!(run.orders().len(), orders, "there is no rung on the host that does more");
}

//! The built-in policy, case by case.

use super::*;
use mainstay_diagnosis::repeats::OnHost;
use mainstay_diagnosis::root_rank::start_failed;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::id::Incident;
use mainstay_model::verdict::Doubts;

fn verdict(cause: Cause, step: Option<u64>) -> Verdict {
    Verdict { cause, step, ..start_failed(Incident(1), Attempt(0), "", Mono(0)) }
}

fn exception(fingerprint: &str) -> Cause {
    Cause::Exception { exception: "E".into(), fingerprint: fingerprint.into() }
}

fn case<'a>(verdict: &'a Verdict, past: &'a [PastFailure]) -> Case<'a> {
    Case {
        verdict,
        past,
        earlier: &[],
        job: JobState {
            exit: 1,
            lived: Span::seconds(60),
            reached: verdict.step,
            committed: None,
            ranks: 2,
            waiting: 0,
        },
        host: Host::default(),
        seen: None,
        spares: 0,
        now: Mono(100_000_000_000),
    }
}

fn action(budget: Budget, verdict: &Verdict, past: &[PastFailure]) -> Action {
    decide(&budget.into(), case(verdict, past)).action
}

fn failed(cause: Cause, step: Option<u64>, lived: Span) -> PastFailure {
    PastFailure {
        decided_at: Mono(1),
        cause,
        step,
        data: None,
        lived,
        rung: Rung::All,
        reached: step,
        committed: None,
        heartbeats: false,
        back_after: None,
    }
}

const THREE: Budget = Budget { max_restarts: 3, window: None };
const RESTART: Action = Action::RestartInJob { attempt: Attempt(1) };

#[test]
fn the_same_exception_at_the_same_step_stops_the_job_and_at_another_step_does_not() {
    let past = [failed(exception("a"), Some(5), Span::seconds(60))];
    assert_eq!(action(THREE, &verdict(exception("a"), Some(5)), &past), Action::Stop { exit: 1 });
    assert_eq!(action(THREE, &verdict(exception("a"), Some(6)), &past), RESTART);
    assert_eq!(action(THREE, &verdict(exception("b"), Some(5)), &past), RESTART);
}

#[test]
fn the_same_exception_at_the_same_data_is_a_repetition_at_any_step() {
    let at = |data, step| PastFailure { data, ..failed(exception("a"), Some(step), Span::seconds(60)) };
    let now = Verdict { data: Some(640), ..verdict(exception("a"), Some(6)) };
    assert_eq!(action(THREE, &now, &[at(Some(640), 5)]), Action::Stop { exit: 1 });
    assert_eq!(action(THREE, &now, &[at(Some(641), 5)]), RESTART);
    assert_eq!(action(THREE, &now, &[at(None, 5)]), RESTART);
    let elsewhere = Verdict { cause: exception("b"), ..now };
    assert_eq!(action(THREE, &elsewhere, &[at(Some(640), 5)]), RESTART);
}

#[test]
fn in_doubt_another_host_is_tried_once_and_a_confirmed_failure_is_not_restarted() {
    let now = Verdict { domain: FaultDomain::User, confidence: 0.7, ..verdict(exception("a"), Some(6)) };
    let once = [failed(exception("a"), Some(6), Span::seconds(60))];
    let on_b = |at_this_place| vec![OnHost { host: "b".to_owned(), at_this_place }];
    let decided = |now: &Verdict, past: &[PastFailure], seen: &SeenBefore| {
        decide(&THREE.into(), Case { seen: Some(seen), ..case(now, past) })
    };
    let received = SeenBefore { answered_by: 2, ..SeenBefore::default() };
    let elsewhere = Action::HandBack { exit: HAND_BACK_EXIT };
    assert_eq!(decided(&now, &[], &received).action, RESTART);
    let choice = decided(&now, &once, &received);
    assert_eq!(choice.action, elsewhere);
    testing::snapshot!(
        "reasons",
        "policy: in doubt another host is tried once and a confirmed failure is not restarted",
        choice.why
    );
    // The job ends if the records are not shared, the verdict is sure, or it was tried before.
    let sure = Verdict { confidence: 0.95, ..now.clone() };
    let alone = SeenBefore::default();
    let before = SeenBefore { in_earlier_runs: 1, ..received.clone() };
    let other_place = SeenBefore { elsewhere: on_b(false), ..received.clone() };
    for (now, seen) in [(&sure, &received), (&now, &alone), (&now, &before), (&now, &other_place)] {
        assert_eq!(decided(now, &once, seen).action, Action::Stop { exit: 1 }, "{seen:?}");
    }
    // A failure at the same place on another host is final here, at once.
    let confirmed = SeenBefore { elsewhere: on_b(true), ..received.clone() };
    let choice = decided(&now, &[], &confirmed);
    assert_eq!(choice.action, Action::Stop { exit: 1 });
    testing::snapshot!("reasons", "policy: the same failure on another host", choice.why);
    assert_eq!(decided(&now, &[], &other_place).action, RESTART);
    for domain in [FaultDomain::Hardware, FaultDomain::Infrastructure, FaultDomain::Unknown] {
        assert_eq!(decided(&Verdict { domain, ..now.clone() }, &[], &confirmed).action, RESTART);
    }
}

#[test]
fn a_failure_of_an_earlier_run_at_the_same_step_is_not_restarted() {
    let now = Verdict { domain: FaultDomain::User, confidence: 0.7, ..verdict(exception("a"), Some(6)) };
    let seen = SeenBefore { in_this_job: 1, in_earlier_runs: 1, ..SeenBefore::default() };
    let decided =
        |now: &Verdict, seen: &SeenBefore| decide(&THREE.into(), Case { seen: Some(seen), ..case(now, &[]) });
    let choice = decided(&now, &seen);
    assert_eq!(choice.action, Action::Stop { exit: 1 });
    testing::snapshot!("reasons", "policy: the same failure in an earlier run", choice.why);
    assert_eq!(decided(&now, &SeenBefore { in_earlier_runs: 0, ..seen.clone() }).action, RESTART);
    for domain in [FaultDomain::Hardware, FaultDomain::Infrastructure, FaultDomain::Unknown] {
        assert_eq!(decided(&Verdict { domain, ..now.clone() }, &seen).action, RESTART, "{domain:?}");
    }
    let before_any_step = Verdict { step: None, heartbeats: true, ..now };
    assert_eq!(decided(&before_any_step, &seen).action, RESTART);
}

#[test]
fn a_program_that_fails_by_itself_at_once_is_stopped_and_one_that_has_trained_is_not() {
    let plain = Verdict {
        domain: FaultDomain::User,
        deterministic: true,
        doubts: Doubts::default(),
        confidence: 0.99,
        heartbeats: true,
        ..verdict(exception("a"), None)
    };
    assert_eq!(action(THREE, &plain, &[]), Action::Stop { exit: 1 });
    let trained = Verdict { step: Some(3), ..plain.clone() };
    let silent = Verdict { heartbeats: false, ..plain.clone() };
    let doubtful = Verdict { confidence: 0.85, ..plain.clone() };
    let transient = Verdict { deterministic: false, ..plain.clone() };
    let hardware = Verdict { domain: FaultDomain::Hardware, ..plain };
    for verdict in [trained, silent, doubtful, transient, hardware] {
        assert_eq!(action(THREE, &verdict, &[]), RESTART);
    }
}

#[test]
fn without_heartbeats_only_attempts_that_lived_about_as_long_count_as_repetition() {
    let past = |lived| [failed(exception("a"), None, Span::seconds(lived))];
    let silent = Verdict { heartbeats: false, ..verdict(exception("a"), None) };
    assert_eq!(action(THREE, &silent, &past(50)), Action::Stop { exit: 1 });
    assert_eq!(action(THREE, &silent, &past(86_400)), RESTART);
    let beating = Verdict { heartbeats: true, ..silent };
    assert_eq!(action(THREE, &beating, &past(86_400)), Action::Stop { exit: 1 });
}

#[test]
fn a_kill_at_the_same_step_is_no_repetition() {
    let kill = Cause::Signal { signal: 9 };
    let past = [failed(kill.clone(), Some(5), Span::seconds(60))];
    assert_eq!(action(THREE, &verdict(kill, Some(5)), &past), RESTART);
}

#[test]
fn the_budget_counts_only_restarts_in_the_window() {
    let kill = Cause::Signal { signal: 9 };
    let past = [1, 99].map(|second| PastFailure {
        decided_at: Mono(second * 1_000_000_000),
        ..failed(kill.clone(), None, Span::seconds(60))
    });
    let budget = |window| Budget { max_restarts: 2, window };
    assert_eq!(action(budget(None), &verdict(kill.clone(), None), &past), Action::Stop { exit: 1 });
    assert_eq!(action(budget(Some(Span::seconds(10))), &verdict(kill, None), &past), RESTART);
}

/// A failure of a rank with heartbeats, after which the job had reached step `reached`.
fn beating(cause: Cause, reached: u64) -> PastFailure {
    PastFailure {
        heartbeats: true,
        back_after: Some(Span::seconds(1)),
        ..failed(cause, Some(reached), Span::seconds(60))
    }
}

#[test]
fn three_restarts_in_a_row_may_bring_nothing_and_progress_resets_the_count() {
    let many = Settings::from(Budget { max_restarts: 100, window: None });
    let kill = Cause::Signal { signal: 11 };
    let now = Verdict { heartbeats: true, ..verdict(kill.clone(), Some(7)) };
    let past = |reached: &[u64]| -> Vec<PastFailure> {
        reached.iter().map(|step| beating(kill.clone(), *step)).collect()
    };
    let decided_after = |reached: &[u64]| decide(&many, case(&now, &past(reached)));
    assert_eq!(decided_after(&[5, 6]).after, Span::default());
    let waits: Vec<Span> = [&[7][..], &[7, 7]].iter().map(|reached| decided_after(reached).after).collect();
    assert!(waits[0] > Span::default() && waits[1] > waits[0], "{waits:?}");
    assert_eq!(decided_after(&[7, 7, 7]).action, Action::Stop { exit: 1 });
    testing::snapshot!(
        "reasons",
        "policy: three restarts in a row may bring nothing and progress resets the count",
        decided_after(&[7, 7, 7]).why
    );
    assert!(decided_after(&[7, 7, 7, 3, 6]).action.attempt().is_some());
    // Failures without reported steps are not counted.
    let silent = Verdict { heartbeats: false, step: None, ..now.clone() };
    assert_eq!(decide(&many, case(&silent, &past(&[7, 7, 7]))).after, Span::default());
}

#[test]
fn steps_in_no_checkpoint_are_no_progress_if_the_restart_point_is_known() {
    let many = Settings::from(Budget { max_restarts: 100, window: None });
    let kill = Cause::Signal { signal: 11 };
    let now = Verdict { heartbeats: true, ..verdict(kill.clone(), Some(13)) };
    let decided_with = |committed: [Option<u64>; 4]| {
        // Each attempt got one step further than the one before.
        let past: Vec<PastFailure> = (10..13)
            .zip(committed)
            .map(|(step, committed)| PastFailure { committed, ..beating(kill.clone(), step) })
            .collect();
        let case = case(&now, &past);
        decide(&many, Case { job: JobState { committed: committed[3], ..case.job }, ..case })
    };
    testing::snapshot!(
        "reasons",
        "policy: three restarts without a checkpoint",
        decided_with([Some(8); 4]).why
    );
    assert!(decided_with([Some(5), Some(8), Some(8), Some(8)]).action.attempt().is_some());
    assert_eq!(decided_with([Some(5), Some(6), Some(7), Some(8)]).after, Span::default());
    // If nothing is saved through Mainstay, or restarts return to something else, each step counts.
    assert_eq!(decided_with([None; 4]).after, Span::default());
    assert_eq!(decided_with([Some(8), Some(8), Some(8), None]).after, Span::default());
}

#[test]
fn a_likely_user_fault_is_confirmed_by_one_restart() {
    let many = Settings::from(Budget { max_restarts: 100, window: None });
    let likely = Verdict {
        heartbeats: true,
        domain: FaultDomain::User,
        confidence: 0.8,
        ..verdict(exception("a"), Some(7))
    };
    assert!(decide(&many, case(&likely, &[])).action.attempt().is_some());
    // The culprit was at another step: the same exception at the same step would stop the job anyway.
    let past = [PastFailure { step: Some(6), ..beating(exception("a"), 7) }];
    assert_eq!(decide(&many, case(&likely, &past)).action, Action::Stop { exit: 1 });
    let another = [beating(exception("b"), 7)];
    assert!(decide(&many, case(&likely, &another)).action.attempt().is_some());
    let advanced = [PastFailure { step: Some(5), ..beating(exception("a"), 6) }];
    assert!(decide(&many, case(&likely, &advanced)).action.attempt().is_some());
}

#[test]
fn a_signal_is_confirmed_at_the_same_step_only() {
    let many = Settings::from(Budget { max_restarts: 100, window: None });
    let crash = || Cause::Signal { signal: 11 };
    let crashed =
        Verdict { heartbeats: true, domain: FaultDomain::User, confidence: 0.8, ..verdict(crash(), Some(7)) };
    let past = |step| [PastFailure { step, ..beating(crash(), 7) }];
    assert!(decide(&many, case(&crashed, &past(Some(6)))).action.attempt().is_some());
    assert_eq!(decide(&many, case(&crashed, &past(Some(7)))).action, Action::Stop { exit: 1 });
}

#[test]
fn a_signal_from_outside_ends_no_job_with_restarts_left() {
    let few = Settings::from(Budget { max_restarts: 5, window: None });
    for signal in [1, 2, 9, 10, 15] {
        let kill = Cause::Signal { signal };
        let killed = Verdict {
            heartbeats: true,
            domain: FaultDomain::User,
            deterministic: true,
            confidence: 0.95,
            ..verdict(kill.clone(), Some(7))
        };
        for restarts in 0..5 {
            let past: Vec<PastFailure> = (0..restarts).map(|_| beating(kill.clone(), 7)).collect();
            assert!(decide(&few, case(&killed, &past)).action.attempt().is_some(), "{signal}, {restarts}");
        }
        let past: Vec<PastFailure> = (0..5).map(|_| beating(kill.clone(), 7)).collect();
        assert_eq!(decide(&few, case(&killed, &past)).action, Action::Stop { exit: 1 });
    }
}

#[test]
fn a_budget_for_a_cause_ends_that_cause_alone() {
    let mut settings = Settings::from(Budget { max_restarts: 100, window: None });
    settings.by_cause.insert(CauseKind::Hang, Budget { max_restarts: 1, window: None });
    let hang = Cause::Hang { hang: HangKind::Network, place: "x".into() };
    let past = [failed(hang.clone(), None, Span::seconds(9))];
    assert_eq!(decide(&settings, case(&verdict(hang, None), &past)).action, Action::Stop { exit: 1 });
    let kill = verdict(Cause::Signal { signal: 9 }, None);
    assert_eq!(decide(&settings, case(&kill, &past)).action, RESTART);
}

#[test]
fn an_unfit_host_is_left_by_the_best_available_way() {
    let unhealthy = [Component {
        name: "gpu.0000:3b:00".into(),
        state: HealthState::Unhealthy,
        reason: "it fell off the bus".into(),
        action: RecommendedAction::RebootNode,
        ..Component::default()
    }];
    let kill = verdict(Cause::Signal { signal: 9 }, None);
    let host = Host { unhealthy: &unhealthy, ..Host::default() };
    let left_by = |rungs, spares| {
        let settings = Settings { rungs, ..Settings::from(THREE) };
        decide(&settings, Case { host, spares, ..case(&kill, &[]) }).action
    };
    let attempt = Attempt(1);
    assert_eq!(left_by(Rungs::ONE_HOST, 1), Action::HandBack { exit: HAND_BACK_EXIT });
    let more = Rungs::ONE_HOST.with(Rung::Replace).with(Rung::Shrink);
    assert_eq!(left_by(more, 1), Action::ReplaceHost { attempt });
    assert_eq!(left_by(more, 0), Action::Shrink { attempt });
    let unwatched = Settings { ready_within: None, ..Settings::from(THREE) };
    assert_eq!(decide(&unwatched, Case { host, ..case(&kill, &[]) }).action, RESTART);
}

#[test]
fn a_resource_in_use_is_waited_for_with_a_deadline() {
    let kill = verdict(Cause::Signal { signal: 9 }, None);
    let held = ["gpu.0000:3b:00: held".to_owned()];
    let waited_for = |waited| {
        let host = Host { held: &held, waited, ..Host::default() };
        decide(&THREE.into(), Case { host, ..case(&kill, &[]) })
    };
    assert_eq!(waited_for(Span::seconds(59)).action, Action::Wait);
    testing::snapshot!(
        "reasons",
        "policy: a resource in use is waited for with a deadline",
        waited_for(Span::seconds(59)).why
    );
    assert_eq!(waited_for(Span::seconds(60)).action, Action::HandBack { exit: HAND_BACK_EXIT });
}

#[test]
fn a_host_that_is_surely_at_fault_is_handed_back_when_the_budget_is_used_up() {
    let past = [failed(Cause::Signal { signal: 9 }, None, Span::seconds(9))];
    let one = Settings::from(Budget { max_restarts: 1, window: None });
    let ended = |domain, confidence| {
        let now = Verdict { domain, confidence, ..verdict(Cause::Signal { signal: 9 }, None) };
        decide(&one, case(&now, &past)).action
    };
    assert_eq!(ended(FaultDomain::Hardware, 0.95), Action::HandBack { exit: HAND_BACK_EXIT });
    assert_eq!(ended(FaultDomain::Hardware, 0.5), Action::Stop { exit: 1 });
    assert_eq!(ended(FaultDomain::Unknown, 0.95), Action::Stop { exit: 1 });
}

#[test]
fn a_dry_run_only_reports_what_would_be_done() {
    let dry = Settings { dry_run: true, ..Settings::from(THREE) };
    let kill = verdict(Cause::Signal { signal: 9 }, None);
    let choice = decide(&dry, case(&kill, &[]));
    assert_eq!(choice.action, Action::Stop { exit: 1 });
    testing::snapshot!("reasons", "policy: a dry run only reports what would be done", choice.why);
}

#[test]
fn a_start_for_which_a_resource_ran_out_is_delayed_and_longer_each_time() {
    let mut now = verdict(Cause::StartFailed, None);
    mainstay_diagnosis::diagnose::blame_the_limit(&mut now, "no descriptor is left");
    let after = |past: &[PastFailure], now: &Verdict| {
        let choice = decide(&THREE.into(), case(now, past));
        assert!(matches!(choice.action, Action::RestartInJob { .. }), "{choice:?}");
        choice.after
    };
    let unstarted = || failed(Cause::StartFailed, None, Span::default());
    let (first, second) = (after(&[], &now), after(&[unstarted()], &now));
    assert!(first > Span::default() && second > first, "{first:?} {second:?}");
    // Another failure of ranks that ran has no delay.
    assert_eq!(after(&[], &verdict(exception("a"), Some(5))), Span::default());
}

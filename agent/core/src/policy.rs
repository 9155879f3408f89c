//! From verdict to decision. The built-in policy restarts what a restart can help, within a budget, and stops
//! what can only fail again.

use crate::hang::HangKind;
use crate::id::Attempt;
use crate::time::{Mono, Span};
use crate::verdict::{Action, Cause, FaultDomain, Verdict};

/// How often restarts are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Restarts allowed per window.
    pub max_restarts: u32,
    /// The window; none means the whole life of the job.
    pub window: Option<Span>,
}

/// A failure of this job that was decided before.
#[derive(Clone, Debug, PartialEq)]
pub struct PastFailure {
    /// When it was decided.
    pub decided_at: Mono,
    /// What it was.
    pub cause: Cause,
    /// The step at which the culprit stood.
    pub step: Option<u64>,
    /// How long the attempt had lived.
    pub lived: Span,
}

/// What the policy goes by.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The verdict to decide on.
    pub verdict: &'a Verdict,
    /// All earlier failures of the job, oldest first; each was followed by a restart.
    pub past: &'a [PastFailure],
    /// The exit status of the culprit as a shell reports it.
    pub exit: i32,
    /// How long the attempt had lived when it failed.
    pub lived: Span,
    /// The time of the decision.
    pub now: Mono,
}

/// Decides; and says why in plain words.
pub fn decide(budget: Budget, case: Case<'_>) -> (Action, String) {
    let stop = Action::Stop { exit: case.exit };
    if case.verdict.cause == Cause::StartFailed {
        return (
            stop,
            "ranks that cannot be started would fail again; mend the error and start anew".to_owned(),
        );
    }
    if is_plainly_the_programs_own(case.verdict) {
        let class = case.verdict.class.as_deref().unwrap_or("user");
        return (
            stop,
            format!("the program fails by itself before its first step ({class}): mend it and start anew"),
        );
    }
    if let Some(step) = repeats_at_same_step(case) {
        let at = match step {
            Some(step) => format!(" after step {step}"),
            None if case.verdict.heartbeats => " before the first step".to_owned(),
            None => String::new(),
        };
        let what = if matches!(case.verdict.cause, Cause::Hang { .. }) { "hang" } else { "exception" };
        return (stop, format!("the same {what} came again{at}: a restart would only fail again"));
    }
    let used = restarts_in_window(budget, case);
    if used >= budget.max_restarts {
        let span = budget.window.map_or_else(String::new, |window| format!(" within {window}"));
        return (stop, format!("the budget of {} restart(s){span} is used up", budget.max_restarts));
    }
    let attempt: Attempt = case.verdict.attempt.next();
    (Action::RestartInJob { attempt }, format!("restart {} of {} in the job", used + 1, budget.max_restarts))
}

/// How sure a verdict must be of the user's fault to stop a job at its first failure.
const PLAIN: f64 = 0.97;

/// Whether the program failed by its own fault, in a way that comes again, before it made a single step: what a
/// restart of it would do too.
fn is_plainly_the_programs_own(verdict: &Verdict) -> bool {
    verdict.domain == FaultDomain::User
        && verdict.deterministic
        && verdict.confidence >= PLAIN
        && verdict.heartbeats
        && verdict.step.is_none()
        && verdict.attempt == Attempt(0)
}

/// Whether the culprit raised the same exception, or hung in the same way, at the same step as in an earlier attempt.
fn repeats_at_same_step(case: Case<'_>) -> Option<Option<u64>> {
    let comes_again = |past: &Cause| match (&case.verdict.cause, past) {
        (Cause::Exception { fingerprint, .. }, Cause::Exception { fingerprint: before, .. }) => {
            fingerprint == before
        }
        (Cause::Hang { hang, place }, Cause::Hang { hang: before, place: there }) => {
            is_the_programs_own(*hang) && hang == before && place == there
        }
        _ => false,
    };
    let mut past = case.past.iter();
    past.any(|past| stood_at_the_same_place(past, case) && comes_again(&past.cause))
        .then_some(case.verdict.step)
}

/// Whether a hang of this kind is of the program's making: others pass with what caused them.
fn is_the_programs_own(hang: HangKind) -> bool {
    matches!(
        hang,
        HangKind::UserCode
            | HangKind::DataInput
            | HangKind::Mismatch
            | HangKind::FinishedEarly
            | HangKind::Livelock
    )
}

/// Whether the culprit was as far as in an earlier attempt. Without heartbeats nobody knows how far it was; then
/// the attempts must at least have lived about as long: an error that passes does not come back so punctually.
fn stood_at_the_same_place(past: &PastFailure, case: Case<'_>) -> bool {
    if case.verdict.heartbeats || case.verdict.step.is_some() {
        return past.step == case.verdict.step;
    }
    let (shorter, longer) = (past.lived.min(case.lived), past.lived.max(case.lived));
    past.step.is_none() && longer <= shorter.plus(shorter).plus(Span::seconds(5))
}

fn restarts_in_window(budget: Budget, case: Case<'_>) -> u32 {
    let recent = |past: &&PastFailure| match budget.window {
        Some(window) => case.now.since(past.decided_at) < window,
        None => true,
    };
    u32::try_from(case.past.iter().filter(recent).count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Incident;
    use crate::judge::start_failed;

    fn verdict(cause: Cause, step: Option<u64>) -> Verdict {
        Verdict { cause, step, ..start_failed(Incident(1), Attempt(0), "", Mono(0)) }
    }

    fn exception(fingerprint: &str) -> Cause {
        Cause::Exception { exception: "E".into(), fingerprint: fingerprint.into() }
    }

    fn action(budget: Budget, verdict: &Verdict, past: &[PastFailure]) -> Action {
        decide(budget, Case { verdict, past, exit: 1, lived: Span::seconds(60), now: Mono(100_000_000_000) })
            .0
    }

    const THREE: Budget = Budget { max_restarts: 3, window: None };
    const RESTART: Action = Action::RestartInJob { attempt: Attempt(1) };

    #[test]
    fn the_same_exception_at_the_same_step_stops_the_job_and_at_another_step_does_not() {
        let past = [PastFailure {
            decided_at: Mono(1),
            cause: exception("a"),
            step: Some(5),
            lived: Span::seconds(60),
        }];
        assert_eq!(action(THREE, &verdict(exception("a"), Some(5)), &past), Action::Stop { exit: 1 });
        assert_eq!(action(THREE, &verdict(exception("a"), Some(6)), &past), RESTART);
        assert_eq!(action(THREE, &verdict(exception("b"), Some(5)), &past), RESTART);
    }

    #[test]
    fn a_program_that_fails_by_itself_at_once_is_stopped_and_one_that_has_trained_is_not() {
        let plain = Verdict {
            domain: FaultDomain::User,
            deterministic: true,
            confidence: 0.99,
            heartbeats: true,
            ..verdict(exception("a"), None)
        };
        assert_eq!(action(THREE, &plain, &[]), Action::Stop { exit: 1 });
        let trained = Verdict { step: Some(3), ..plain.clone() };
        let silent = Verdict { heartbeats: false, ..plain.clone() };
        let doubtful = Verdict { confidence: 0.9, ..plain.clone() };
        let transient = Verdict { deterministic: false, ..plain.clone() };
        let hardware = Verdict { domain: FaultDomain::Hardware, ..plain };
        for verdict in [trained, silent, doubtful, transient, hardware] {
            assert_eq!(action(THREE, &verdict, &[]), RESTART);
        }
    }

    #[test]
    fn without_heartbeats_only_attempts_that_lived_about_as_long_count_as_repetition() {
        let past = |lived| {
            [PastFailure {
                decided_at: Mono(1),
                cause: exception("a"),
                step: None,
                lived: Span::seconds(lived),
            }]
        };
        let silent = Verdict { heartbeats: false, ..verdict(exception("a"), None) };
        assert_eq!(action(THREE, &silent, &past(50)), Action::Stop { exit: 1 });
        assert_eq!(action(THREE, &silent, &past(86_400)), RESTART);
        let beating = Verdict { heartbeats: true, ..silent };
        assert_eq!(action(THREE, &beating, &past(86_400)), Action::Stop { exit: 1 });
    }

    #[test]
    fn a_kill_at_the_same_step_is_no_repetition() {
        let kill = Cause::Signal { signal: 9 };
        let past = [PastFailure {
            decided_at: Mono(1),
            cause: kill.clone(),
            step: Some(5),
            lived: Span::seconds(60),
        }];
        assert_eq!(action(THREE, &verdict(kill, Some(5)), &past), RESTART);
    }

    #[test]
    fn the_budget_counts_only_what_lies_in_the_window() {
        let kill = Cause::Signal { signal: 9 };
        let past = [1, 99].map(|second| PastFailure {
            decided_at: Mono(second * 1_000_000_000),
            cause: kill.clone(),
            step: None,
            lived: Span::seconds(60),
        });
        let budget = |window| Budget { max_restarts: 2, window };
        assert_eq!(action(budget(None), &verdict(kill.clone(), None), &past), Action::Stop { exit: 1 });
        assert_eq!(action(budget(Some(Span::seconds(10))), &verdict(kill, None), &past), RESTART);
    }
}

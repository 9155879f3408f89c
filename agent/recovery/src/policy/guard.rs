//! What no policy may do, regardless of its author: the limits of a policy file. The built-in policy never reaches
//! them.

use crate::policy::ladder::mildest;
use crate::policy::{
    Advice, Case, CauseKind, Readiness, Rung, Settings, available_rungs, idle, in_window, readiness,
    repeats_at_same_place,
};
use mainstay_model::time::Span;

/// The most restarts in a row without a new step, for any causes. The built-in policy stops after 3.
pub const PATIENCE_AT_MOST: u32 = 10;

/// How often the same error of the program may recur at the same step or data. The built-in policy stops at the
/// first.
pub const REPEATS_AT_MOST: usize = 3;

/// The longest delay.
pub const LONGEST_DELAY: Span = Span::seconds(3600);

/// Why this advice is forbidden. `None` if it is allowed.
pub fn forbidden(settings: &Settings, case: Case<'_>, advice: &Advice) -> Option<String> {
    if advice.after > LONGEST_DELAY {
        return Some(format!("a decision is delayed by at most {LONGEST_DELAY}, not by {}", advice.after));
    }
    match advice.rung {
        None => wait(settings, case),
        Some(rung) if rung.goes_on() => restart(settings, case, rung),
        // A job may be ended at any time.
        Some(_) => None,
    }
}

fn wait(settings: &Settings, case: Case<'_>) -> Option<String> {
    match settings.ready_within {
        None => Some("the job does not wait for its host (--ready-within off)".to_owned()),
        Some(limit) if case.host.waited >= limit => {
            Some(format!("the job has already waited for its host for {limit} (--ready-within)"))
        }
        Some(_) => None,
    }
}

fn restart(settings: &Settings, case: Case<'_>, rung: Rung) -> Option<String> {
    let kind = CauseKind::from_cause(&case.verdict.cause);
    if !available_rungs(settings, case).has(rung) {
        return Some("this job does not support it now".to_owned());
    }
    if rung == Rung::Replace && case.spares == 0 {
        return Some("there is no spare host".to_owned());
    }
    if rung < mildest(kind) {
        return Some(format!("it cannot help after a failure of kind {}", kind.as_str()));
    }
    if in_window(settings.budget, case, |_| true) >= settings.budget.max_restarts {
        return Some(format!("the budget of {} restart(s) is used up", settings.budget.max_restarts));
    }
    if let Some(budget) = settings.by_cause.get(&kind)
        && in_window(*budget, case, |past| CauseKind::from_cause(&past.cause) == kind) >= budget.max_restarts
    {
        return Some(format!(
            "the budget of {} restart(s) for {} is used up",
            budget.max_restarts,
            kind.as_str()
        ));
    }
    if idle(case) >= PATIENCE_AT_MOST {
        return Some(format!("{PATIENCE_AT_MOST} restarts in a row brought no new step"));
    }
    if repeats_at_same_place(case).count() >= REPEATS_AT_MOST {
        return Some(format!(
            "the same error came {REPEATS_AT_MOST} times at the same step or the same data"
        ));
    }
    match (readiness(case.host), settings.ready_within) {
        (Readiness::Unfit(why) | Readiness::NotYet(why), Some(_)) if rung.stays() => {
            Some(format!("this host is not ready: {why}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Budget, Host, JobState, PastFailure};
    use mainstay_diagnosis::root_rank::start_failed;
    use mainstay_model::id::{Attempt, Incident};
    use mainstay_model::time::Mono;
    use mainstay_model::verdict::{Cause, Verdict};

    fn error() -> Cause {
        Cause::Exception { exception: "E".into(), fingerprint: "f".into() }
    }

    fn failed(step: u64) -> PastFailure {
        PastFailure {
            decided_at: Mono(1),
            cause: error(),
            step: Some(step),
            data: None,
            lived: Span::seconds(60),
            rung: Rung::All,
            reached: Some(step),
            committed: None,
            heartbeats: true,
            back_after: Some(Span::seconds(1)),
        }
    }

    fn forbids(past: &[PastFailure], host: Host<'_>, advice: &Advice) -> Option<String> {
        let start = start_failed(Incident(1), Attempt(0), "", Mono(0));
        let verdict = Verdict { cause: error(), step: Some(5), heartbeats: true, ..start };
        let settings = Settings::from(Budget { max_restarts: 100, window: None });
        let job = JobState {
            exit: 1,
            lived: Span::seconds(60),
            reached: Some(5),
            committed: None,
            ranks: 1,
            waiting: 0,
        };
        let case = Case {
            verdict: &verdict,
            past,
            earlier: &[],
            job,
            host,
            seen: None,
            spares: 0,
            now: Mono(100_000_000_000),
        };
        forbidden(&settings, case, advice)
    }

    fn take(rung: Option<Rung>, seconds: u64) -> Advice {
        Advice { rung, after: Span::seconds(seconds), why: "so".into() }
    }

    #[test]
    fn an_error_in_a_loop_ends_under_any_policy() {
        let forbids_after = |past: &[PastFailure]| forbids(past, Host::default(), &take(Some(Rung::All), 0));
        assert_eq!(forbids_after(&[failed(5), failed(5)]), None);
        let again = forbids_after(&[failed(5), failed(5), failed(5)]);
        testing::snapshot!("reasons", "guard: the same error three times", again.unwrap_or_default());
        let elsewhere: Vec<PastFailure> =
            (0..10).map(|_| PastFailure { reached: Some(5), ..failed(4) }).collect();
        testing::snapshot!(
            "reasons",
            "guard: ten restarts without a step",
            forbids_after(&elsewhere).unwrap_or_default()
        );
        assert_eq!(forbids_after(&elsewhere[..9]), None);
        // Ending the job is always allowed.
        assert_eq!(forbids(&elsewhere, Host::default(), &take(Some(Rung::Stop), 0)), None);
    }

    #[test]
    fn impossible_actions_and_too_long_delays_are_forbidden() {
        let refusal = |host, advice: &Advice| forbids(&[], host, advice).unwrap_or_default();
        testing::snapshot!(
            "reasons",
            "guard: impossible actions and too long delays are forbidden",
            refusal(Host::default(), &take(Some(Rung::InProcess), 0))
        );
        testing::snapshot!(
            "reasons",
            "guard: impossible actions and too long delays are forbidden 2",
            refusal(Host::default(), &take(Some(Rung::All), 3601))
        );
        let held = ["port 29500".to_owned()];
        let host = Host { held: &held, ..Host::default() };
        assert!(refusal(host, &take(Some(Rung::All), 0)).contains(&held[0]));
        assert_eq!(refusal(host, &take(None, 0)), "");
        let waited = Host { waited: Span::seconds(60), ..host };
        assert!(refusal(waited, &take(None, 0)).contains("waited for"));
    }
}

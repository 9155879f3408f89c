//! From verdict to decision: a pure function of the verdict, the history, and the state of the job, its host and the
//! spares. `docs/reference/policy.md` describes it. Any replacement has the same inputs and outputs.
//!
//! The first rule that applies decides:
//!
//! 1. Ranks that cannot be started, a program that fails by itself, the same error at the same step, here or on
//!    another host: a person has to act. If this host may be at fault, another one is tried first.
//! 2. The budgets: of all restarts, of restarts for this kind of cause, of restarts in a row without progress.
//! 3. The job waits for a host that is not ready. It leaves a host that is not fit, or not ready in time.
//! 4. The rung that is expected to restore the job soonest, after a delay if the ones before did not help.

mod advice;
mod backoff;
mod experience;
mod guard;
mod history;
mod ladder;
mod learned;
mod question;
mod readiness;
mod user;

pub use advice::{Advice, rung_named};
pub use backoff::seed;
pub use experience::experiences;
pub use guard::{LONGEST_DELAY, PATIENCE_AT_MOST, REPEATS_AT_MOST, forbidden};
pub use history::{PastFailure, Reached, without_progress};
pub use ladder::{available_rungs, patience};
pub use mainstay_model::policy::{Budget, CauseKind, Experience, HAND_BACK_EXIT, Rung, Rungs, Settings};
pub use question::question;
pub use readiness::{Host, Readiness, passes_with_the_ranks, readiness};
pub use user::{PolicyAnswer, PolicyProblem, decide_with};

use mainstay_diagnosis::diagnose::is_exhaustion;
use mainstay_diagnosis::repeats::SeenBefore;
use mainstay_hang::HangKind;
use mainstay_model::id::Attempt;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Action, Cause, FaultDomain, Rule, Verdict};

/// The complete input of the policy, as plain data.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The verdict to decide on.
    pub verdict: &'a Verdict,
    /// All earlier failures of the job, oldest first. A restart followed each.
    pub past: &'a [PastFailure],
    /// What earlier runs of the job learned about rungs.
    pub earlier: &'a [Experience],
    /// The job.
    pub job: JobState,
    /// The host.
    pub host: Host<'a>,
    /// Earlier failures of the same kind, here and on other hosts. `None` if there is no record of any.
    pub seen: Option<&'a SeenBefore>,
    /// The number of hosts that could replace this one.
    pub spares: u32,
    /// The time of the decision.
    pub now: Mono,
}

/// The state of the job at its failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobState {
    /// The exit status of the culprit as a shell reports it.
    pub exit: i32,
    /// How long the attempt had lived when it failed.
    pub lived: Span,
    /// The newest step that the job has reached in any attempt.
    pub reached: Option<u64>,
    /// The newest step that a restart is known to return to or exceed. `None` if unknown.
    pub committed: Option<u64>,
    /// The number of its ranks on this host.
    pub ranks: u32,
    /// How many of them have left the attempt and wait in their processes.
    pub waiting: u32,
}

/// A decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The rung, or waiting.
    pub action: Action,
    /// How long the action is delayed.
    pub after: Span,
    /// The rule that applied.
    pub rule: Rule,
    /// The reason, as a sentence.
    pub why: String,
}

/// Decides, with a reason.
pub fn decide(settings: &Settings, case: Case<'_>) -> Choice {
    unless_dry(settings, case, usual(settings, case))
}

/// The decision of the built-in policy, without regard to a dry run.
fn usual(settings: &Settings, case: Case<'_>) -> Choice {
    stop(settings, case).or_else(|| end_of_budget(settings, case)).unwrap_or_else(|| restart(settings, case))
}

/// In a dry run the job ends instead, and the reason states what would be done.
fn unless_dry(settings: &Settings, case: Case<'_>, choice: Choice) -> Choice {
    if !settings.dry_run || matches!(choice.action, Action::Stop { .. }) {
        return choice;
    }
    let would = choice.action.rung().map_or("waiting", Rung::describe);
    let why = format!("dry run; it would be {would}: {}", choice.why);
    at_once(Action::Stop { exit: case.job.exit }, choice.rule, why)
}

/// Failures that only a person can fix.
fn stop(settings: &Settings, case: Case<'_>) -> Option<Choice> {
    let stop = |rule, why: String| Some(at_once(Action::Stop { exit: case.job.exit }, rule, why));
    if case.verdict.cause == Cause::StartFailed && !is_exhaustion(case.verdict) {
        return stop(
            Rule::CannotStart,
            "another start would fail in the same way; fix the error and start the job again".to_owned(),
        );
    }
    if let Some(host) = case.verdict.missing_host() {
        let why = format!("no host took the place of {host}: the job can start again with another host");
        return Some(at_once(Action::HandBack { exit: settings.hand_back_exit }, Rule::HostMissing, why));
    }
    if case.verdict.cannot_run && case.verdict.attempt == Attempt(0) {
        let class = case.verdict.class.as_deref().unwrap_or("user");
        return stop(
            Rule::CannotRun,
            format!(
                "the program cannot run ({class}): a restart would only fail again; fix it and start the job again"
            ),
        );
    }
    if is_plainly_the_programs_own(case.verdict) {
        let class = case.verdict.class.as_deref().unwrap_or("user");
        return stop(
            Rule::FailsByItself,
            match class {
                _ if case.verdict.resource_ran_out() => {
                    format!(
                        "a resource ran out before the first step ({class}): free some and start the job again"
                    )
                }
                "user_config" => format!(
                    "a setting makes it fail before its first step ({class}): correct it and start the job again"
                ),
                _ => format!(
                    "the program fails by itself before its first step ({class}): fix it and start the job again"
                ),
            },
        );
    }
    let mut again = repeats_at_same_place(case).peekable();
    let here = again.peek().is_some();
    let hosts = confirmed_on(case);
    let earlier = in_an_earlier_run(case);
    if !here && hosts.is_empty() && !earlier {
        return None;
    }
    let at_the_step = again.any(|past| past.step == case.verdict.step);
    let at = match case.verdict.step {
        _ if let (false, Some(position)) = (at_the_step, case.verdict.data) => {
            format!(" at position {position} of the data")
        }
        Some(step) => format!(" after step {step}"),
        None if case.verdict.heartbeats => " before the first step".to_owned(),
        None => String::new(),
    };
    let what = if matches!(case.verdict.cause, Cause::Hang { .. }) { "hang" } else { "exception" };
    if !hosts.is_empty() {
        return stop(
            Rule::FailedElsewhere,
            format!("the same {what} occurred{at} on {hosts} before: a restart would only fail again"),
        );
    }
    if !here {
        return stop(
            Rule::Recurred,
            format!(
                "the same {what} occurred{at} in an earlier run of this job: a restart would only fail again"
            ),
        );
    }
    if another_host_decides(case) {
        let why = format!(
            "the same {what} recurred{at}: another host shows whether this host or the program is at fault"
        );
        return Some(at_once(Action::HandBack { exit: settings.hand_back_exit }, Rule::AnotherHost, why));
    }
    stop(Rule::Recurred, format!("the same {what} recurred{at}: a restart would only fail again"))
}

/// The confidence in the user's fault from which a job that failed twice in the same way stops without a try on
/// another host.
const SURE_WITHOUT_RETRY: f64 = 0.92;

/// The other hosts on which the same program raised the same exception at the same place before this run started, if
/// the program or its software stack is considered at fault.
fn confirmed_on(case: Case<'_>) -> String {
    let raised = matches!(case.verdict.cause, Cause::Exception { .. });
    let moves_with_it = matches!(case.verdict.domain, FaultDomain::User | FaultDomain::Platform);
    let seen = case.seen.filter(|_| raised && moves_with_it);
    let hosts: Vec<&str> = seen.into_iter().flat_map(SeenBefore::elsewhere_at_this_place).collect();
    hosts.join(", ")
}

/// Whether an earlier run of the unchanged program raised the same exception at the same step or the same data, and the
/// program or its software stack is considered at fault.
fn in_an_earlier_run(case: Case<'_>) -> bool {
    let verdict = case.verdict;
    let raised = matches!(verdict.cause, Cause::Exception { .. }) && !is_exhaustion(verdict);
    let moves_with_it = matches!(verdict.domain, FaultDomain::User | FaultDomain::Platform);
    let has_place = verdict.step.is_some() || verdict.data.is_some();
    raised && moves_with_it && has_place && case.seen.is_some_and(|seen| seen.in_earlier_runs > 0)
}

/// Whether one try on another host is worth more than to end here: this host may be at fault, other agents share the
/// record, so that the next host stops if it fails there, and this program has failed like this in no earlier run and
/// on no other host.
fn another_host_decides(case: Case<'_>) -> bool {
    let verdict = case.verdict;
    let in_doubt = match verdict.domain {
        FaultDomain::Hardware | FaultDomain::Unknown => true,
        FaultDomain::User => verdict.confidence < SURE_WITHOUT_RETRY,
        FaultDomain::Infrastructure | FaultDomain::Platform => false,
    };
    let raised = matches!(verdict.cause, Cause::Exception { .. });
    let new = |seen: &SeenBefore| seen.in_earlier_runs == 0 && seen.elsewhere.is_empty();
    in_doubt && raised && case.seen.is_some_and(|seen| seen.answered_by > 0 && new(seen))
}

/// The most restarts in a row without progress, for any causes. After NVRx's restart agent, like [`confirmed`].
const MAX_RESTARTS_WITHOUT_PROGRESS: u32 = 3;

/// Whether one restart without a new step has confirmed the failure: it recurred, and it is likely the user's fault
/// or deterministic. Another failure in the same place has its own restart, within [`MAX_RESTARTS_WITHOUT_PROGRESS`].
fn confirmed(case: Case<'_>, idle: u32) -> Option<&'static str> {
    let verdict = case.verdict;
    let why = match verdict.domain {
        FaultDomain::User if verdict.confidence >= LIKELY && verdict.resource_ran_out() => {
            "it would happen again"
        }
        FaultDomain::User if verdict.confidence >= LIKELY => "it is likely the program's own fault",
        FaultDomain::User | FaultDomain::Unknown if verdict.deterministic => "it would happen again",
        _ => return None,
    };
    let mut in_a_row = case.past.iter().rev().take(idle as usize);
    in_a_row.any(|past| came_again(past, verdict)).then_some(why)
}

/// Whether a failure is the same as `past`. A signal does not identify its sender, and a lost host does not show why:
/// they are the same only at the same step.
fn came_again(past: &PastFailure, verdict: &Verdict) -> bool {
    let of_the_outside = matches!(verdict.cause, Cause::Signal { .. } | Cause::HostLost { .. });
    let same_place = !of_the_outside || past.step == verdict.step;
    past.cause == verdict.cause && same_place
}

/// Failures that are not restarted any more, although they might pass.
fn end_of_budget(settings: &Settings, case: Case<'_>) -> Option<Choice> {
    let (action, words) = ending(settings, case);
    let end = |rule, why: String| Some(at_once(action, rule, format!("{why}{words}")));
    let idle = idle(case);
    // A signal is not a failure of the program, regardless of its sender, and neither is a limit of the host: only the
    // budgets end the job.
    let from_outside = case.verdict.cause.is_from_outside() || is_exhaustion(case.verdict);
    if let Some(why) = confirmed(case, idle).filter(|_| !from_outside) {
        let brought = brought_nothing(case);
        return end(Rule::NoProgress, format!("the same failure recurred and a restart {brought}: {why}"));
    }
    if idle >= MAX_RESTARTS_WITHOUT_PROGRESS && !from_outside {
        let brought = brought_nothing(case);
        return end(Rule::NoProgress, format!("{idle} restart(s) in a row {brought}, whatever their causes"));
    }
    let used = in_window(settings.budget, case, |_| true);
    let within =
        |budget: Budget| budget.window.map_or_else(String::new, |window| format!(" within {window}"));
    if used >= settings.budget.max_restarts {
        let (max, within) = (settings.budget.max_restarts, within(settings.budget));
        return end(Rule::Budget, format!("the budget of {max} restart(s){within} is used up"));
    }
    let kind = CauseKind::from_cause(&case.verdict.cause);
    let budget = *settings.by_cause.get(&kind)?;
    if in_window(budget, case, |past| CauseKind::from_cause(&past.cause) == kind) >= budget.max_restarts {
        let (max, within, word) = (budget.max_restarts, within(budget), kind.as_str());
        return end(Rule::Budget, format!("the budget of {max} restart(s) for {word}{within} is used up"));
    }
    None
}

/// The result of restarts without progress.
fn brought_nothing(case: Case<'_>) -> &'static str {
    if case.job.committed.is_some() { "brought no newer checkpoint" } else { "brought no new step" }
}

/// How a job ends that may still run elsewhere: the scheduler can fix what the host or its environment caused.
fn ending(settings: &Settings, case: Case<'_>) -> (Action, &'static str) {
    let elsewhere = matches!(case.verdict.domain, FaultDomain::Hardware | FaultDomain::Infrastructure);
    if elsewhere && case.verdict.confidence >= SURE_ENOUGH_TO_LEAVE {
        (Action::HandBack { exit: settings.hand_back_exit }, "; another host may work")
    } else {
        (Action::Stop { exit: case.job.exit }, "")
    }
}

/// A restart, if the host is ready for one.
fn restart(settings: &Settings, case: Case<'_>) -> Choice {
    let kind = CauseKind::from_cause(&case.verdict.cause);
    let Some(rung) = learned::cheapest(kind, &ladder::open(settings, case), case.past, case.earlier) else {
        let next = case.verdict.attempt.next();
        let why = "nothing can be restarted on this host".to_owned();
        return leave(settings, case.spares, next, Rule::NothingToRestart, why);
    };
    if let Some(instead) = hindrance(settings, case.host, case.spares, case.verdict.attempt.next()) {
        return instead;
    }
    let idle = idle(case);
    let used = in_window(settings.budget, case, |_| true);
    let attempt: Attempt = case.verdict.attempt.next();
    Choice {
        action: Action::from_rung(rung, attempt, case.job.exit),
        // The time spent waiting for the host counts.
        after: backoff::wait(idle.max(not_started(case)), settings.seed).minus(case.host.waited),
        rule: Rule::Restart,
        why: format!("restart {} of {} in the job", used + 1, settings.budget.max_restarts),
    }
}

/// The action that replaces a restart to attempt `next`, even an ordered one: wait for the host, or leave it. `None`
/// if the host is ready, and if readiness checks are off.
pub fn hindrance(settings: &Settings, host: Host<'_>, spares: u32, next: Attempt) -> Option<Choice> {
    let limit = settings.ready_within?;
    let leave = |why: String| Some(leave(settings, spares, next, Rule::HostUnfit, why));
    match readiness(host) {
        Readiness::Ready => None,
        Readiness::Unfit(why) => leave(format!("this host is not fit for training: {why}")),
        Readiness::NotYet(why) if host.waited >= limit => {
            leave(format!("this host was not ready within {limit}: {why}"))
        }
        Readiness::NotYet(why) => Some(at_once(
            Action::Wait,
            Rule::HostNotReady,
            format!("this host is not ready for a restart: {why}; waiting up to {limit}"),
        )),
    }
}

/// Continues without this host: with a spare, with fewer hosts, or handed back to the scheduler.
fn leave(settings: &Settings, spares: u32, attempt: Attempt, rule: Rule, why: String) -> Choice {
    let rung = match settings.rungs {
        rungs if rungs.has(Rung::Replace) && spares > 0 => Rung::Replace,
        rungs if rungs.has(Rung::Shrink) => Rung::Shrink,
        _ => Rung::HandBack,
    };
    at_once(Action::from_rung(rung, attempt, settings.hand_back_exit), rule, why)
}

/// How many restarts in a row brought no new step.
fn idle(case: Case<'_>) -> u32 {
    let (heartbeats, lived) = (case.verdict.heartbeats, case.job.lived);
    let JobState { reached: step, committed, .. } = case.job;
    without_progress(case.past, Reached { step, committed, heartbeats, lived })
}

/// How many attempts in a row could not start their ranks, this one included: what they lacked may come back, but not
/// at once.
fn not_started(case: Case<'_>) -> u32 {
    if case.verdict.cause != Cause::StartFailed {
        return 0;
    }
    let before = case.past.iter().rev().take_while(|past| past.cause == Cause::StartFailed).count();
    u32::try_from(before).unwrap_or(u32::MAX).saturating_add(1)
}

fn at_once(action: Action, rule: Rule, why: String) -> Choice {
    Choice { action, after: Span::default(), rule, why }
}

/// The confidence in the user's fault from which only one restart is allowed.
const LIKELY: f64 = 0.6;

/// The confidence in the host's fault from which the scheduler is asked for another host.
const SURE_ENOUGH_TO_LEAVE: f64 = 0.9;

/// The confidence in the user's fault from which a job stops at its first failure.
const PLAIN: f64 = 0.97;

/// Whether the program failed by its own fault, in a deterministic way, before its first step. A restart would fail
/// too.
fn is_plainly_the_programs_own(verdict: &Verdict) -> bool {
    verdict.domain == FaultDomain::User
        && verdict.deterministic
        && verdict.confidence >= PLAIN
        && verdict.heartbeats
        && verdict.step.is_none()
        && verdict.attempt == Attempt(0)
}

/// Earlier attempts in which the culprit raised the same exception, or hung in the same way, at the same step or the
/// same data. None if a limit of the host was reached, whatever the exception.
fn repeats_at_same_place(case: Case<'_>) -> impl Iterator<Item = &PastFailure> {
    let comes_again = move |past: &Cause| match (&case.verdict.cause, past) {
        (Cause::Exception { fingerprint, .. }, Cause::Exception { fingerprint: before, .. }) => {
            fingerprint == before
        }
        (Cause::Hang { hang, place }, Cause::Hang { hang: before, place: there }) => {
            is_the_programs_own(*hang) && hang == before && place == there
        }
        _ => false,
    };
    let passes = is_exhaustion(case.verdict);
    case.past
        .iter()
        .filter(move |past| !passes && stood_at_the_same_place(past, case) && comes_again(&past.cause))
}

/// Whether a hang of this kind is caused by the program. Others pass with their cause.
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

/// Whether the culprit was at the same step as in an earlier attempt, or read the same data. Without heartbeats its
/// step is unknown. Then the attempts must at least have lived about as long: a transient error does not recur at the
/// same time.
fn stood_at_the_same_place(past: &PastFailure, case: Case<'_>) -> bool {
    if case.verdict.data.is_some() && past.data == case.verdict.data {
        return true;
    }
    if case.verdict.heartbeats || case.verdict.step.is_some() {
        return past.step == case.verdict.step;
    }
    // In seconds, like in a policy file, so that both agree.
    let (shorter, longer) = (past.lived.min(case.job.lived), past.lived.max(case.job.lived));
    past.step.is_none() && longer.as_seconds() <= shorter.as_seconds() * 2.0 + 5.0
}

fn in_window(budget: Budget, case: Case<'_>, counts: impl Fn(&PastFailure) -> bool) -> u32 {
    let recent = |past: &&PastFailure| match budget.window {
        Some(window) => case.now.since(past.decided_at) < window,
        None => true,
    };
    u32::try_from(case.past.iter().filter(recent).filter(|past| counts(past)).count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;

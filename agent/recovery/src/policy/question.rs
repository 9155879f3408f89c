//! The case of a failure as the user's policy gets it. Its fields are those of the classes in `mainstay/policy.py`, whose
//! constructors reject any other.

use mainstay_diagnosis::repeats::SeenBefore;
use mainstay_model::health::Component;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Cause, Verdict};
use serde_json::{Map, Value, json};

use super::advice::name_of;
use crate::policy::{
    Budget, Case, CauseKind, Experience, Host, PastFailure, Settings, available_rungs, passes_with_the_ranks,
};

/// The maximum number of past failures in the case; only the newest are included.
const MAX_PAST: usize = 1000;

/// The case as JSON.
pub fn question(settings: &Settings, case: Case<'_>) -> Value {
    let newest = &case.past[case.past.len().saturating_sub(MAX_PAST)..];
    json!({
        "verdict": verdict(case.verdict),
        "past": newest.iter().map(|past| past_failure(past, case.now)).collect::<Vec<_>>(),
        "earlier": case.earlier.iter().map(experience).collect::<Vec<_>>(),
        "exit": case.job.exit,
        "lived": case.job.lived.as_seconds(),
        "reached": case.job.reached,
        "committed": case.job.committed,
        "host": host(case.host, case.now),
        "seen": seen(case.seen.unwrap_or(&SeenBefore::default())),
        "spares": case.spares,
        "job": job(settings, case),
    })
}

fn verdict(verdict: &Verdict) -> Value {
    json!({
        "incident": verdict.incident,
        "attempt": verdict.attempt,
        "headline": verdict.headline,
        "cause": cause(&verdict.cause),
        "domain": verdict.domain,
        "failure_class": verdict.class,
        "deterministic": verdict.deterministic,
        "confidence": verdict.confidence,
        "culprit": verdict.culprit,
        "victims": verdict.victims,
        "step": verdict.step,
        "data": verdict.data,
        "heartbeats": verdict.heartbeats,
        "cannot_run": verdict.cannot_run,
        "evidence": verdict.evidence,
    })
}

fn cause(cause: &Cause) -> Value {
    let mut value = json!({
        "kind": CauseKind::from_cause(cause).as_str(),
        "exception": null,
        "fingerprint": null,
        "code": null,
        "signal": null,
        "hang": null,
        "place": null,
    });
    match cause {
        Cause::Exception { exception, fingerprint } => {
            value["exception"] = json!(exception);
            value["fingerprint"] = json!(fingerprint);
        }
        Cause::ExitCode { code } => value["code"] = json!(code),
        Cause::Signal { signal } => value["signal"] = json!(signal),
        Cause::Hang { hang, place } => {
            value["hang"] = json!(hang);
            value["place"] = json!(place);
        }
        Cause::HostLost { host } => value["place"] = json!(host),
        Cause::OutOfMemory | Cause::StartFailed => {}
    }
    value
}

fn past_failure(past: &PastFailure, now: Mono) -> Value {
    json!({
        "ago": now.since(past.decided_at).as_seconds(),
        "cause": cause(&past.cause),
        "step": past.step,
        "data": past.data,
        "lived": past.lived.as_seconds(),
        "action": name_of(past.rung),
        "reached": past.reached,
        "committed": past.committed,
        "heartbeats": past.heartbeats,
        "back_after": past.back_after.map(Span::as_seconds),
    })
}

fn experience(known: &Experience) -> Value {
    json!({
        "cause": known.cause.as_str(),
        "action": name_of(known.rung),
        "tried": known.tried,
        "helped": known.helped,
        "seconds": known.seconds,
    })
}

fn host(host: Host<'_>, now: Mono) -> Value {
    json!({
        "unhealthy": host.unhealthy.iter().map(|unhealthy| component(unhealthy, host.last_step)).collect::<Vec<_>>(),
        "held": host.held,
        "waited": host.waited.as_seconds(),
        "last_step_ago": host.last_step.map(|step| now.since(step).as_seconds()),
    })
}

fn component(component: &Component, last_step: Option<Mono>) -> Value {
    json!({
        "name": component.name,
        "state": component.state,
        "reason": component.reason,
        "action": component.action,
        "trained_with": last_step.map(|step| step.since(component.since).as_seconds()),
        "passes_with_ranks": passes_with_the_ranks(&component.name),
    })
}

fn seen(seen: &SeenBefore) -> Value {
    json!({
        "elsewhere": seen.elsewhere.iter().map(|on| on.host.as_str()).collect::<Vec<_>>(),
        "at_this_place": seen.elsewhere_at_this_place().collect::<Vec<_>>(),
        "in_earlier_runs": seen.in_earlier_runs,
        "answered_by": seen.answered_by,
    })
}

fn job(settings: &Settings, case: Case<'_>) -> Value {
    let budget = |budget: &Budget| json!({ "max_restarts": budget.max_restarts, "window": budget.window.map(Span::as_seconds) });
    let budgets: Map<String, Value> =
        settings.by_cause.iter().map(|(kind, of)| (kind.as_str().to_owned(), budget(of))).collect();
    json!({
        "actions": available_rungs(settings, case).iter().map(name_of).collect::<Vec<_>>(),
        "max_restarts": settings.budget.max_restarts,
        "window": settings.budget.window.map(Span::as_seconds),
        "budgets": budgets,
        "ready_within": settings.ready_within.map(Span::as_seconds),
        "hand_back_exit": settings.hand_back_exit,
    })
}

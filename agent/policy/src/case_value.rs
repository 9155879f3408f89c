//! The argument of a policy: the case of a failure as a value of the language.

use mainstay_diagnosis::repeats::SeenBefore;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::time::Mono;
use mainstay_model::verdict::{Cause, Verdict};
use mainstay_recovery::policy::{
    Budget, Case, CauseKind, Experience, PastFailure, Settings, available_rungs, passes_with_the_ranks,
};

use crate::language::{Heap, Made, Value};
use crate::words::{self, word};

/// The maximum number of past failures in the case; only the newest are included.
const NEWEST: usize = 1000;

/// The case as a policy sees it.
pub(crate) fn value_of(heap: &mut Heap<'_>, settings: &Settings, case: Case<'_>) -> Made<Value> {
    let verdict = verdict(heap, case.verdict)?;
    let newest = &case.past[case.past.len().saturating_sub(NEWEST)..];
    let past: Made<Vec<Value>> = newest.iter().map(|past| past_failure(heap, past, case.now)).collect();
    let past = heap.list(past?)?;
    let earlier: Made<Vec<Value>> = case.earlier.iter().map(|known| experience(heap, known)).collect();
    let earlier = heap.list(earlier?)?;
    let host = host(heap, case)?;
    let seen = seen(heap, case.seen)?;
    let job = job(heap, settings, case)?;
    record(
        heap,
        vec![
            ("verdict", verdict),
            ("past", past),
            ("earlier", earlier),
            ("exit", Value::Int(case.job.exit.into())),
            ("lived", Value::Float(case.job.lived.as_seconds())),
            ("reached", count(case.job.reached)),
            ("committed", count(case.job.committed)),
            ("host", host),
            ("seen", seen),
            ("spares", Value::Int(case.spares.into())),
            ("job", job),
        ],
    )
}

fn verdict(heap: &mut Heap<'_>, verdict: &Verdict) -> Made<Value> {
    let cause = cause(heap, &verdict.cause)?;
    let headline = heap.text(&verdict.headline)?;
    let failure_class = maybe_text(heap, verdict.class.as_deref())?;
    let domain = heap.text(verdict.domain.name())?;
    let victims = heap.list(verdict.victims.iter().map(|rank| Value::Int(rank.0.into())).collect())?;
    let evidence = texts(heap, verdict.evidence.iter().map(String::as_str))?;
    record(
        heap,
        vec![
            ("incident", count(Some(verdict.incident.0))),
            ("attempt", Value::Int(verdict.attempt.0.into())),
            ("headline", headline),
            ("cause", cause),
            ("domain", domain),
            ("failure_class", failure_class),
            ("deterministic", Value::Bool(verdict.deterministic)),
            ("confidence", Value::Float(verdict.confidence)),
            ("culprit", count(verdict.culprit.map(|rank| rank.0.into()))),
            ("victims", victims),
            ("step", count(verdict.step)),
            ("data", count(verdict.data)),
            ("heartbeats", Value::Bool(verdict.heartbeats)),
            ("cannot_run", Value::Bool(verdict.cannot_run)),
            ("evidence", evidence),
        ],
    )
}

fn cause(heap: &mut Heap<'_>, cause: &Cause) -> Made<Value> {
    let (mut exception, mut fingerprint, mut code, mut signal) = (None, None, None, None);
    let (mut hang, mut place) = (None, None);
    match cause {
        Cause::Exception { exception: kind, fingerprint: print } => {
            (exception, fingerprint) = (Some(kind.as_str()), Some(print.as_str()));
        }
        Cause::ExitCode { code: number } => code = Some(*number),
        Cause::Signal { signal: number } => signal = Some(*number),
        Cause::Hang { hang: kind, place: at } => {
            (hang, place) = (Some(words::hang(*kind)), Some(at.as_str()))
        }
        Cause::HostLost { host } => place = Some(host.as_str()),
        Cause::OutOfMemory | Cause::StartFailed => {}
    }
    let number = |number: Option<i32>| number.map_or(Value::None, |number| Value::Int(number.into()));
    let kind = heap.text(CauseKind::of(cause).word())?;
    let exception = maybe_text(heap, exception)?;
    let fingerprint = maybe_text(heap, fingerprint)?;
    let hang = maybe_text(heap, hang)?;
    let place = maybe_text(heap, place)?;
    record(
        heap,
        vec![
            ("kind", kind),
            ("exception", exception),
            ("fingerprint", fingerprint),
            ("code", number(code)),
            ("signal", number(signal)),
            ("hang", hang),
            ("place", place),
        ],
    )
}

fn past_failure(heap: &mut Heap<'_>, past: &PastFailure, now: Mono) -> Made<Value> {
    let cause = cause(heap, &past.cause)?;
    let action = heap.text(word(past.rung))?;
    record(
        heap,
        vec![
            ("ago", Value::Float(now.since(past.decided_at).as_seconds())),
            ("cause", cause),
            ("step", count(past.step)),
            ("data", count(past.data)),
            ("lived", Value::Float(past.lived.as_seconds())),
            ("action", action),
            ("reached", count(past.reached)),
            ("committed", count(past.committed)),
            ("heartbeats", Value::Bool(past.heartbeats)),
            ("back_after", seconds(past.back_after)),
        ],
    )
}

fn experience(heap: &mut Heap<'_>, known: &Experience) -> Made<Value> {
    let cause = heap.text(known.cause.word())?;
    let action = heap.text(word(known.rung))?;
    record(
        heap,
        vec![
            ("cause", cause),
            ("action", action),
            ("tried", Value::Float(known.tried)),
            ("helped", Value::Float(known.helped)),
            ("seconds", Value::Float(known.seconds)),
        ],
    )
}

fn host(heap: &mut Heap<'_>, case: Case<'_>) -> Made<Value> {
    let host = case.host;
    let unhealthy: Made<Vec<Value>> =
        host.unhealthy.iter().map(|component| component_value(heap, component, host.last_step)).collect();
    let unhealthy = heap.list(unhealthy?)?;
    let held = texts(heap, host.held.iter().map(String::as_str))?;
    record(
        heap,
        vec![
            ("unhealthy", unhealthy.clone()),
            // The name before 0.1.0, for older policies.
            ("sick", unhealthy),
            ("held", held),
            ("waited", Value::Float(host.waited.as_seconds())),
            ("last_step_ago", seconds(host.last_step.map(|step| case.now.since(step)))),
        ],
    )
}

fn seen(heap: &mut Heap<'_>, seen: Option<&SeenBefore>) -> Made<Value> {
    let hosts = seen.into_iter().flat_map(|seen| seen.elsewhere.iter().map(|of| of.host.as_str()));
    let elsewhere = texts(heap, hosts)?;
    let at_this_place = texts(heap, seen.into_iter().flat_map(SeenBefore::elsewhere_at_this_place))?;
    let number = |of: fn(&SeenBefore) -> u32| Value::Int(seen.map_or(0, of).into());
    record(
        heap,
        vec![
            ("elsewhere", elsewhere),
            ("at_this_place", at_this_place),
            ("in_earlier_runs", number(|seen| seen.in_earlier_runs)),
            ("answered_by", number(|seen| seen.answered_by)),
            // The name before 0.1.0, for older policies.
            ("heard_by", number(|seen| seen.answered_by)),
        ],
    )
}

fn component_value(heap: &mut Heap<'_>, component: &Component, last_step: Option<Mono>) -> Made<Value> {
    let name = heap.text(&component.name)?;
    let reason = heap.text(&component.reason)?;
    let state = heap.text(state(component.state))?;
    let action = heap.text(recommended(component.action))?;
    record(
        heap,
        vec![
            ("name", name),
            ("state", state),
            ("reason", reason),
            ("action", action),
            ("trained_with", seconds(last_step.map(|step| step.since(component.since)))),
            ("passes_with_ranks", Value::Bool(passes_with_the_ranks(&component.name))),
        ],
    )
}

fn job(heap: &mut Heap<'_>, settings: &Settings, case: Case<'_>) -> Made<Value> {
    let actions = texts(heap, available_rungs(settings, case).iter().map(word))?;
    let mut budgets = Vec::new();
    for (kind, Budget { max_restarts, window }) in &settings.by_cause {
        let kind = heap.text(kind.word())?;
        let budget = vec![("max_restarts", Value::Int((*max_restarts).into())), ("window", seconds(*window))];
        budgets.push((kind, record(heap, budget)?));
    }
    let budgets = heap.dict(budgets)?;
    record(
        heap,
        vec![
            ("actions", actions),
            ("max_restarts", Value::Int(settings.budget.max_restarts.into())),
            ("window", seconds(settings.budget.window)),
            ("budgets", budgets),
            ("ready_within", seconds(settings.ready_within)),
            ("hand_back_exit", Value::Int(settings.hand_back_exit.into())),
        ],
    )
}

pub(crate) fn state(state: HealthState) -> &'static str {
    match state {
        HealthState::Healthy => "HEALTHY",
        HealthState::Unknown => "UNKNOWN",
        HealthState::Degraded => "DEGRADED",
        HealthState::Unhealthy => "UNHEALTHY",
    }
}

fn recommended(action: RecommendedAction) -> &'static str {
    match action {
        RecommendedAction::None => "NONE",
        RecommendedAction::RestartProcess => "RESTART_PROCESS",
        RecommendedAction::ResetDevice => "RESET_DEVICE",
        RecommendedAction::RebootNode => "REBOOT_NODE",
        RecommendedAction::ReplaceNode => "REPLACE_NODE",
        RecommendedAction::ContactSupport => "CONTACT_SUPPORT",
    }
}

fn record(heap: &mut Heap<'_>, fields: Vec<(&'static str, Value)>) -> Made<Value> {
    heap.fields(fields.into_iter().map(|(name, value)| (name.into(), value)).collect())
}

fn texts<'t>(heap: &mut Heap<'_>, all: impl Iterator<Item = &'t str>) -> Made<Value> {
    let all: Made<Vec<Value>> = all.map(|text| heap.text(text)).collect();
    heap.list(all?)
}

fn maybe_text(heap: &mut Heap<'_>, text: Option<&str>) -> Made<Value> {
    text.map_or(Ok(Value::None), |text| heap.text(text))
}

fn count(number: Option<u64>) -> Value {
    number.map_or(Value::None, |number| Value::Int(i64::try_from(number).unwrap_or(i64::MAX)))
}

fn seconds(span: Option<mainstay_model::time::Span>) -> Value {
    span.map_or(Value::None, |span| Value::Float(span.as_seconds()))
}

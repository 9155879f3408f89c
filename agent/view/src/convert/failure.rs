//! Failures, decisions, outcomes and findings, in both directions.

use mainstay_model::finding::Finding;
use mainstay_model::id::{Attempt, Incident, Rank};
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_model::verdict::{
    Action, Cause, DecidedBy, Decision, Doubts, FaultDomain, Outcome, Rule, Verdict,
};
use mainstay_proto::v1::{self, cause::Kind};
use serde::de::DeserializeOwned;

use super::{duration, serialized_name, span, wall, wall_time};
use crate::incident_report::IncidentReport;

/// A message that lacks a part, or has one that only a newer version knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreadable(pub &'static str);

impl std::fmt::Display for Unreadable {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{} is missing or of a newer version", self.0)
    }
}

impl std::error::Error for Unreadable {}

/// The value with this name in the journal.
fn named<T: DeserializeOwned>(what: &'static str, name: String) -> Result<T, Unreadable> {
    serde_json::from_value(name.into()).map_err(|_| Unreadable(what))
}

/// A report on a failure as an API message.
pub fn report(job: &str, report: &IncidentReport, now: Stamp) -> v1::FailureReport {
    v1::FailureReport {
        job: job.to_owned(),
        verdict: Some(verdict(&report.verdict, now)),
        decision: report.decision.as_ref().map(decision),
        outcome: report.outcome.as_ref().map(outcome),
        happened: Some(super::timestamp(report.happened)),
        into_the_job: report.into_the_job.map(duration),
        job_ended: report.job_ended,
        findings: report.findings.values().map(finding).collect(),
        avoided: report.avoided.clone(),
    }
}

/// A report on a failure from an API message.
///
/// # Errors
/// A part is missing or of a newer version.
pub fn report_in(report: v1::FailureReport) -> Result<IncidentReport, Unreadable> {
    let findings = report.findings.into_iter().map(finding_in);
    let findings = findings.map(|of| of.map(|of| (of.finding, of)));
    Ok(IncidentReport {
        verdict: verdict_in(report.verdict.ok_or(Unreadable("the verdict"))?)?,
        decision: report.decision.map(decision_in).transpose()?,
        outcome: report.outcome.as_ref().map(outcome_in),
        happened: report.happened.as_ref().map(wall).unwrap_or_default(),
        into_the_job: report.into_the_job.as_ref().map(span),
        job_ended: report.job_ended,
        findings: findings.collect::<Result<_, _>>()?,
        avoided: report.avoided,
    })
}

/// A verdict as an API message.
pub fn verdict(verdict: &Verdict, now: Stamp) -> v1::Verdict {
    v1::Verdict {
        incident: verdict.incident.0,
        attempt: verdict.attempt.0,
        headline: verdict.headline.clone(),
        cause: cause_name(&verdict.cause).to_owned(),
        domain: domain(verdict.domain).into(),
        confidence: verdict.confidence,
        culprit: verdict.culprit.map(|rank| rank.0),
        victims: verdict.victims.iter().map(|rank| rank.0).collect(),
        step: verdict.step,
        fault_time: wall_time(verdict.fault_at, now),
        detect_time: wall_time(verdict.detected_at, now),
        evidence: verdict.evidence.clone(),
        fault_class: verdict.class.clone(),
        deterministic: verdict.deterministic,
        against: verdict.doubts.against.clone(),
        would_change: verdict.doubts.would_change.clone(),
        ended_by: Some(v1::Cause { kind: Some(cause(&verdict.cause)) }),
        culprit_confidence: verdict.culprit_confidence,
        host: verdict.host.clone(),
        data: verdict.data,
        heartbeats: verdict.heartbeats,
        cannot_run: verdict.cannot_run,
        fault_monotonic_ns: verdict.fault_at.0,
        detect_monotonic_ns: verdict.detected_at.0,
    }
}

/// A verdict from an API message.
///
/// # Errors
/// Its cause is missing or of a newer version.
pub fn verdict_in(verdict: v1::Verdict) -> Result<Verdict, Unreadable> {
    let domain = domain_in(verdict.domain());
    let cause = verdict.ended_by.and_then(|cause| cause.kind).ok_or(Unreadable("the cause"))?;
    Ok(Verdict {
        incident: Incident(verdict.incident),
        attempt: Attempt(verdict.attempt),
        headline: verdict.headline,
        cause: cause_in(cause)?,
        domain,
        class: verdict.fault_class,
        deterministic: verdict.deterministic,
        doubts: Doubts { against: verdict.against, would_change: verdict.would_change },
        confidence: verdict.confidence,
        culprit_confidence: verdict.culprit_confidence,
        culprit: verdict.culprit.map(Rank),
        host: verdict.host,
        victims: verdict.victims.into_iter().map(Rank).collect(),
        step: verdict.step,
        data: verdict.data,
        heartbeats: verdict.heartbeats,
        cannot_run: verdict.cannot_run,
        fault_at: Mono(verdict.fault_monotonic_ns),
        detected_at: Mono(verdict.detect_monotonic_ns),
        evidence: verdict.evidence,
    })
}

fn cause_name(cause: &Cause) -> &'static str {
    match cause {
        Cause::Exception { .. } => "exception",
        Cause::ExitCode { .. } => "exit_code",
        Cause::Signal { .. } => "signal",
        Cause::OutOfMemory => "out_of_memory",
        Cause::StartFailed => "start_failed",
        Cause::Hang { .. } => "hang",
        Cause::HostLost { .. } => "host_lost",
    }
}

fn cause(cause: &Cause) -> Kind {
    match cause {
        Cause::Exception { exception, fingerprint } => Kind::Exception(v1::RaisedException {
            exception: exception.clone(),
            fingerprint: fingerprint.clone(),
        }),
        Cause::ExitCode { code } => Kind::ExitCode(*code),
        Cause::Signal { signal } => Kind::Signal(*signal),
        Cause::OutOfMemory => Kind::OutOfMemory(true),
        Cause::StartFailed => Kind::StartFailed(true),
        Cause::Hang { hang, place } => {
            Kind::Hang(v1::HangPlace { kind: serialized_name(hang), place: place.clone() })
        }
        Cause::HostLost { host } => Kind::HostLost(host.clone()),
    }
}

fn cause_in(cause: Kind) -> Result<Cause, Unreadable> {
    Ok(match cause {
        Kind::Exception(v1::RaisedException { exception, fingerprint }) => {
            Cause::Exception { exception, fingerprint }
        }
        Kind::ExitCode(code) => Cause::ExitCode { code },
        Kind::Signal(signal) => Cause::Signal { signal },
        Kind::OutOfMemory(_) => Cause::OutOfMemory,
        Kind::StartFailed(_) => Cause::StartFailed,
        Kind::Hang(v1::HangPlace { kind, place }) => {
            Cause::Hang { hang: named("the kind of hang", kind)?, place }
        }
        Kind::HostLost(host) => Cause::HostLost { host },
    })
}

fn domain(domain: FaultDomain) -> v1::FaultDomain {
    match domain {
        FaultDomain::User => v1::FaultDomain::User,
        FaultDomain::Hardware => v1::FaultDomain::Hardware,
        FaultDomain::Infrastructure => v1::FaultDomain::Infrastructure,
        FaultDomain::Platform => v1::FaultDomain::Platform,
        FaultDomain::Unknown => v1::FaultDomain::Unknown,
    }
}

fn domain_in(from: v1::FaultDomain) -> FaultDomain {
    FaultDomain::ALL.into_iter().find(|of| domain(*of) == from).unwrap_or(FaultDomain::Unknown)
}

/// A decision as an API message.
pub fn decision(decision: &Decision) -> v1::Decision {
    let action = match decision.action {
        Action::RestartInProcess { .. } => v1::DecidedAction::RestartInProcess,
        Action::RespawnRanks { .. } => v1::DecidedAction::RespawnRanks,
        Action::RespawnHost { .. } => v1::DecidedAction::RespawnHost,
        Action::RestartInJob { .. } => v1::DecidedAction::RestartInJob,
        Action::ReplaceHost { .. } => v1::DecidedAction::ReplaceHost,
        Action::Shrink { .. } => v1::DecidedAction::Shrink,
        Action::HandBack { .. } => v1::DecidedAction::HandBack,
        Action::Stop { .. } => v1::DecidedAction::Stop,
        Action::Wait => v1::DecidedAction::Wait,
    };
    let (attempt, exit_status) = (decision.action.attempt().map(|attempt| attempt.0), decision.action.exit());
    v1::Decision {
        incident: decision.incident.0,
        action: action.into(),
        attempt,
        exit_status,
        why: decision.why.clone(),
        by: v1::DecidedBy::Launcher.into(),
        agent_evidence: decision.used_agent_evidence(),
        after: (decision.after.0 > 0).then(|| duration(decision.after)),
    }
}

fn decision_in(decision: v1::Decision) -> Result<Decision, Unreadable> {
    let attempt = Attempt(decision.attempt.unwrap_or_default());
    let exit = decision.exit_status.unwrap_or_default();
    let action = match decision.action() {
        v1::DecidedAction::RestartInProcess => Action::RestartInProcess { attempt },
        v1::DecidedAction::RespawnRanks => Action::RespawnRanks { attempt },
        v1::DecidedAction::RespawnHost => Action::RespawnHost { attempt },
        v1::DecidedAction::RestartInJob => Action::RestartInJob { attempt },
        v1::DecidedAction::ReplaceHost => Action::ReplaceHost { attempt },
        v1::DecidedAction::Shrink => Action::Shrink { attempt },
        v1::DecidedAction::HandBack => Action::HandBack { exit },
        v1::DecidedAction::Stop => Action::Stop { exit },
        v1::DecidedAction::Wait => Action::Wait,
        v1::DecidedAction::Unspecified => return Err(Unreadable("the action")),
    };
    Ok(Decision {
        incident: Incident(decision.incident),
        action,
        after: decision.after.as_ref().map_or(Span(0), span),
        rule: Rule::Unknown,
        why: decision.why,
        by: DecidedBy::Launcher,
        agent_evidence: decision.agent_evidence,
    })
}

fn outcome(outcome: &Outcome) -> v1::Outcome {
    v1::Outcome {
        incident: outcome.incident.0,
        attempt: outcome.attempt.0,
        step: outcome.step,
        reached_before: outcome.reached_before,
        steps_lost: outcome.steps_lost,
        counted: outcome.counted,
        to_ranks_started: Some(duration(outcome.to_ranks_started)),
        to_ranks_connected: outcome.to_ranks_connected.map(duration),
        to_first_step: Some(duration(outcome.to_first_step)),
    }
}

fn outcome_in(outcome: &v1::Outcome) -> Outcome {
    Outcome {
        incident: Incident(outcome.incident),
        attempt: Attempt(outcome.attempt),
        step: outcome.step,
        reached_before: outcome.reached_before,
        steps_lost: outcome.steps_lost,
        counted: outcome.counted,
        to_ranks_started: outcome.to_ranks_started.as_ref().map_or(Span(0), span),
        to_ranks_connected: outcome.to_ranks_connected.as_ref().map(span),
        to_first_step: outcome.to_first_step.as_ref().map_or(Span(0), span),
    }
}

/// A finding as an API message.
pub fn finding(of: &Finding) -> v1::Finding {
    v1::Finding {
        number: of.finding,
        attempt: of.attempt.0,
        what: of.what.as_str().to_owned(),
        over: of.over,
        headline: of.headline.clone(),
        domain: domain(of.domain).into(),
        confidence: of.confidence,
        ranks: of.ranks.iter().map(|rank| rank.0).collect(),
        device: of.device.clone(),
        host: of.host.clone(),
        stage: of.stage,
        since_step: of.since_step,
        step: of.step,
        cost_percent: of.cost_percent,
        evidence: of.evidence.clone(),
        last_agreed_step: of.last_agreed_step,
        doubtful_steps: of.doubtful_steps.clone(),
    }
}

fn finding_in(of: v1::Finding) -> Result<Finding, Unreadable> {
    Ok(Finding {
        finding: of.number,
        attempt: Attempt(of.attempt),
        domain: domain_in(of.domain()),
        what: named("the kind of finding", of.what)?,
        over: of.over,
        headline: of.headline,
        confidence: of.confidence,
        ranks: of.ranks.into_iter().map(Rank).collect(),
        device: of.device,
        host: of.host,
        stage: of.stage,
        since_step: of.since_step,
        step: of.step,
        cost_percent: of.cost_percent,
        evidence: of.evidence,
        last_agreed_step: of.last_agreed_step,
        doubtful_steps: of.doubtful_steps,
    })
}

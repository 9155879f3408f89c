//! The API's messages as JSON for scripts: names as in the API, times as RFC 3339 in UTC, ages in seconds, states
//! and phases by their plain names. Unset fields are absent. Documented in `docs/reference/cli.md`.

use mainstay_proto::v1::process_exit::How;
use mainstay_proto::v1::{
    Component, Decision, Event, Finding, Gap, Hang, Job, Node, ProcessExit, Rank, Saving, Server, Verdict,
};
use prost_types::{Duration, Timestamp};
use serde_json::{Map, Value, json};

use crate::convert::health::code_in;

/// The last part of an enum's name: `HEALTH_STATE_DEGRADED` is `DEGRADED`.
pub fn plain(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).trim_start_matches('_').to_owned()
}

/// The server.
pub fn server(server: &Server) -> Value {
    present(json!({
        "mode": plain(server.mode().as_str_name(), "SERVER_MODE"),
        "version": server.version,
        "pid": server.pid,
        "start_time": server.start_time.as_ref().map(time),
        "hostname": server.hostname,
        "boot_id": server.boot_id,
        "time": server.time.as_ref().map(time),
        "journal_error": server.journal_error,
    }))
}

/// The node.
pub fn node(node: &Node) -> Value {
    json!({
        "state": plain(node.state().as_str_name(), "HEALTH_STATE"),
        "reason": node.reason,
        "recommended_action": plain(node.recommended_action().as_str_name(), "RECOMMENDED_ACTION"),
        "components": node.components.iter().map(component).collect::<Vec<Value>>(),
    })
}

fn component(component: &Component) -> Value {
    let evidence: Vec<Value> = component
        .evidence
        .iter()
        .map(|of| {
            present(json!({
                "source": of.source,
                "reading": of.reading,
                "limit": of.limit,
                "before": of.before,
                "code": of.code.as_ref().and_then(code_in),
                "meaning": of.meaning,
            }))
        })
        .collect();
    present(json!({
        "name": component.name,
        "state": plain(component.state().as_str_name(), "HEALTH_STATE"),
        "reason": component.reason,
        "recommended_action": plain(component.recommended_action().as_str_name(), "RECOMMENDED_ACTION"),
        "evidence": evidence,
        "since": component.since.as_ref().map(time),
        "read_at": component.read_at.as_ref().map(time),
        "read_age": component.read_age.as_ref().map(seconds),
        "confidence": component.confidence,
        "acknowledgement": component.acknowledgement.as_ref().map(|known| present(json!({
            "uid": known.uid, "reason": known.reason, "time": known.time.as_ref().map(time),
        }))),
        "silence": component.silence.as_ref().map(|silence| present(json!({
            "uid": silence.uid,
            "reason": silence.reason,
            "since": silence.since.as_ref().map(time),
            "until": silence.until.as_ref().map(time),
        }))),
    }))
}

/// A job.
pub fn job(job: &Job) -> Value {
    present(json!({
        "id": job.id,
        "phase": plain(job.phase().as_str_name(), "JOB_PHASE"),
        "exit_status": job.exit_status,
        "end_reason": job.end_reason,
        "attempt": job.attempt,
        "restarts": job.restarts,
        "max_restarts": job.max_restarts,
        "step": job.step,
        "steps_per_second": job.steps_per_second,
        "start_time": job.start_time.as_ref().map(time),
        "command": job.command,
        "texts_withheld": job.texts_withheld.then_some(true),
        "world_size": job.world_size,
        "local_world_size": job.local_world_size,
        "launcher_pid": job.launcher_pid,
        "uid": job.uid,
        "run_dir": job.run_dir,
        "checkpoint_dir": job.checkpoint_dir,
        "run": job.run,
        "ranks": job.ranks.iter().map(rank).collect::<Vec<Value>>(),
        "last_verdict": job.last_verdict.as_ref().map(verdict),
        "hang": job.hang.as_ref().map(hang),
        "last_decision": job.last_decision.as_ref().map(decision),
        "findings": job.findings.iter().map(finding).collect::<Vec<_>>(),
        "policy_trouble": (!job.policy_trouble.is_empty()).then_some(&job.policy_trouble),
        "policy_troubles": job.policy_troubles,
        "saving": job.saving.as_ref().map(saving),
        "copied_step": job.copied_step.as_ref().map(|of| present(json!({
            "step": of.step,
            "attempt": of.attempt,
            "time": of.time.as_ref().map(time),
        }))),
        "copies_behind": (!job.copies_behind.is_empty()).then_some(&job.copies_behind),
        "waits_as_spare": (!job.waits_as_spare.is_empty()).then_some(&job.waits_as_spare),
    }))
}

fn saving(advised: &Saving) -> Value {
    json!({
        "every_s": advised.every_s,
        "was_s": advised.was_s,
        "stall_s": advised.stall_s,
        "between_failures_s": advised.between_failures_s,
        "restore_s": advised.restore_s,
        "cost": advised.cost,
        "cost_was": advised.cost_was,
        "tiers": advised.tiers.iter().map(|of| json!({"tier": of.tier, "every_s": of.every_s})).collect::<Vec<_>>(),
    })
}

fn hang(hang: &Hang) -> Value {
    present(json!({
        "kind": hang.kind,
        "headline": hang.headline,
        "culprits": hang.culprits,
        "since": hang.since.as_ref().map(time),
    }))
}

fn rank(rank: &Rank) -> Value {
    present(json!({
        "rank": rank.rank,
        "host": rank.host,
        "local_rank": rank.local_rank,
        "pid": rank.pid,
        "start_ticks": rank.start_ticks,
        "phase": plain(rank.phase().as_str_name(), "RANK_PHASE"),
        "exit": rank.exit.as_ref().and_then(exit),
        "step": rank.step,
        "sections": rank.sections,
        "heartbeat_time": rank.heartbeat_time.as_ref().map(time),
        "heartbeat_age": rank.heartbeat_age.as_ref().map(seconds),
        "loss": rank.loss,
        "refusal": rank.refusal,
        "median_step": rank.median_step.as_ref().map(seconds),
        "self_time": rank.self_time.as_ref().map(seconds),
        "against_peers": rank.against_peers,
        "wait_share": rank.wait_share,
    }))
}

fn exit(exit: &ProcessExit) -> Option<Value> {
    exit.how.as_ref().map(|how| match how {
        How::Code(code) => json!({ "code": code }),
        How::Signal(signal) => json!({ "signal": signal }),
    })
}

fn finding(finding: &Finding) -> Value {
    json!({
        "number": finding.number,
        "attempt": finding.attempt,
        "what": finding.what,
        "headline": finding.headline,
        "domain": plain(finding.domain().as_str_name(), "FAULT_DOMAIN"),
        "confidence": finding.confidence,
        "ranks": finding.ranks,
        "device": finding.device,
        "host": finding.host,
        "stage": finding.stage,
        "since_step": finding.since_step,
        "step": finding.step,
        "cost_percent": finding.cost_percent,
        "evidence": finding.evidence,
        "last_agreed_step": finding.last_agreed_step,
        "doubtful_steps": finding.doubtful_steps,
    })
}

fn verdict(verdict: &Verdict) -> Value {
    present(json!({
        "incident": verdict.incident,
        "attempt": verdict.attempt,
        "headline": verdict.headline,
        "cause": verdict.cause,
        "domain": plain(verdict.domain().as_str_name(), "FAULT_DOMAIN"),
        "confidence": verdict.confidence,
        "culprit": verdict.culprit,
        "victims": verdict.victims,
        "step": verdict.step,
        "fault_time": verdict.fault_time.as_ref().map(time),
        "detect_time": verdict.detect_time.as_ref().map(time),
        "evidence": verdict.evidence,
        "fault_class": verdict.fault_class,
        "deterministic": verdict.deterministic,
        "against": verdict.against,
        "would_change": verdict.would_change,
    }))
}

fn decision(decision: &Decision) -> Value {
    present(json!({
        "incident": decision.incident,
        "action": plain(decision.action().as_str_name(), "DECIDED_ACTION"),
        "attempt": decision.attempt,
        "exit_status": decision.exit_status,
        "why": decision.why,
        "by": plain(decision.by().as_str_name(), "DECIDED_BY"),
        "agent_evidence": decision.agent_evidence,
    }))
}

/// An event.
pub fn event(event: &Event) -> Value {
    present(json!({
        "cursor": event.cursor,
        "time": event.time.as_ref().map(time),
        "monotonic_ns": event.monotonic_ns,
        "boot_id": event.boot_id,
        "kind": plain(event.kind().as_str_name(), "EVENT_KIND"),
        "type": event.r#type,
        "severity": plain(event.severity().as_str_name(), "SEVERITY"),
        "job": event.job,
        "attempt": event.attempt,
        "rank": event.rank,
        "incident": event.incident,
        "message": event.message,
        "attributes": event.attributes,
    }))
}

/// A gap.
pub fn gap(gap: &Gap) -> Value {
    json!({ "gap": {
        "first_missing": gap.first_missing,
        "last_missing": gap.last_missing,
        "message": gap.message,
    }})
}

/// An object without the fields that are not set.
pub fn present(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            Value::Object(fields.into_iter().filter(|(_, value)| !value.is_null()).collect::<Map<_, _>>())
        }
        other => other,
    }
}

fn time(time: &Timestamp) -> String {
    point(time).map(|point| format!("{point:.9}")).unwrap_or_default()
}

/// None for a time outside the calendar.
pub fn point(time: &Timestamp) -> Option<jiff::Timestamp> {
    jiff::Timestamp::new(time.seconds, time.nanos).ok()
}

/// A duration in seconds.
pub fn seconds(duration: &Duration) -> f64 {
    duration.seconds as f64 + f64::from(duration.nanos) / 1e9
}

//! One plain sentence for each entry, for the person on call.

use mainstay_hang::listed;
use mainstay_model::entry::{Body, ExitStatus, Fact};
use mainstay_model::health::HealthChange;
use mainstay_model::id::Attempt;
use mainstay_model::verdict::{Action, Decision};

use super::health::state_name;
use crate::incident_report::brief;

pub(super) fn sentence(body: &Body) -> String {
    match body {
        Body::Fact(fact) => fact_sentence(fact),
        Body::Health(change) => health(change),
        Body::Verdict(of) => brief(of),
        Body::Decision(of) => decision(of),
        Body::Outcome(of) => of.describe(),
        Body::Finding(finding) => finding.headline.clone(),
    }
}

/// The same without what the program or the user of a job wrote.
pub(super) fn without_texts(body: &Body) -> String {
    match body {
        Body::Fact(Fact::JobStarted(spec)) => {
            format!(
                "job started with {} on this host",
                counted(spec.local_world_size.into(), "rank", "ranks")
            )
        }
        Body::Fact(Fact::StartFailed { attempt, .. }) => {
            format!("{}: the ranks could not be started", run(*attempt))
        }
        Body::Fact(Fact::RankRefused { rank, .. }) => format!("{rank} trains without heartbeats"),
        Body::Fact(Fact::PagesUnavailable { .. }) => "the job runs without heartbeats".to_owned(),
        Body::Fact(Fact::RankRaised { rank, pid, note, .. }) => {
            format!("{rank} (pid {}) raised an exception{}", pid.0, after(note.step))
        }
        Body::Fact(Fact::RanksHung { .. }) => "ranks of the job make no progress".to_owned(),
        Body::Fact(Fact::EvidenceTaken { took, .. }) => {
            format!("the state of the ranks was recorded in {took}")
        }
        Body::Fact(Fact::Observed(observation)) => {
            format!("{}: {}", observation.component, observation.event)
        }
        Body::Fact(Fact::JobEnded { exit, .. }) => format!("job ended with exit status {exit}"),
        Body::Fact(Fact::StopRequested { .. }) => "the launcher was asked to stop".to_owned(),
        Body::Fact(Fact::AgentLost { .. }) => {
            "the launcher lost its agent and decides alone until it is back".to_owned()
        }
        Body::Verdict(verdict) => match verdict.culprit {
            Some(rank) => format!("failure {}: {rank} failed", verdict.incident.0),
            None => format!("failure {}", verdict.incident.0),
        },
        Body::Decision(decision) => format!("failure {}: {}", decision.incident.0, decision.action.as_str()),
        Body::Finding(finding) => finding.what.as_str().to_owned(),
        Body::Fact(
            Fact::AgentStarted { .. }
            | Fact::AgentStopped
            | Fact::OutOfMemoryKills { .. }
            | Fact::Xid(_)
            | Fact::Sxid(_)
            | Fact::KernelReport(_)
            | Fact::KernelLinesLeftOut { .. }
            | Fact::KernelLogGap { .. }
            | Fact::HostEvidenceReported { .. }
            | Fact::GpuDriverSilent { .. }
            | Fact::GpuDriverAnswered { .. }
            | Fact::AttemptStarted { .. }
            | Fact::RankConnected { .. }
            | Fact::RanksStepping { .. }
            | Fact::Progress { .. }
            | Fact::RankEnding { .. }
            | Fact::RankExited { .. }
            | Fact::HostLost { .. }
            | Fact::WorldChanged { .. }
            | Fact::HangPassed { .. }
            | Fact::AttemptEnded { .. }
            | Fact::LauncherLost { .. }
            | Fact::AgentFound { .. },
        )
        | Body::Health(_)
        | Body::Outcome(_) => sentence(body),
    }
}

fn fact_sentence(fact: &Fact) -> String {
    match fact {
        Fact::AgentStarted { version, pid } => format!("agent {version} started (pid {})", pid.0),
        Fact::AgentStopped => "the agent stopped cleanly".to_owned(),
        Fact::OutOfMemoryKills { count } => {
            format!("the kernel killed {} for lack of memory", counted(*count, "process", "processes"))
        }
        Fact::Xid(xid) => format!("XID {} of GPU {}: {}", xid.code, xid.gpu, xid.place.line),
        Fact::Sxid(sxid) => format!("SXID {} of {}: {}", sxid.code, sxid.switch, sxid.place.line),
        Fact::KernelReport(report) => format!("the kernel reports: {}", report.place.line),
        Fact::KernelLinesLeftOut { of, count } => {
            format!(
                "{} of {of} were counted but not stored",
                counted(*count, "more kernel line", "more kernel lines")
            )
        }
        Fact::KernelLogGap { records: Some(records) } => format!(
            "{} of the kernel log were overwritten before they were read",
            counted(*records, "record", "records")
        ),
        Fact::KernelLogGap { records: None } => {
            "records of the kernel log were overwritten before they were read".to_owned()
        }
        Fact::HostEvidenceReported { host_evidence, .. } => format!(
            "host evidence: {} of the kernel log, {} not fit for training{}",
            counted(host_evidence.kernel_lines.len() as u64, "line", "lines"),
            counted(host_evidence.unhealthy.len() as u64, "component", "components"),
            match host_evidence.findings.len() as u64 {
                0 => String::new(),
                findings => format!("; {} of the job open", counted(findings, "finding", "findings")),
            }
        ),
        Fact::Observed(observation) => format!("{}: {}", observation.component, observation.detail),
        Fact::GpuDriverSilent { .. } => {
            "the GPUs' driver does not answer: a call into it has not returned in time".to_owned()
        }
        Fact::GpuDriverAnswered { after } => format!("the GPUs' driver answers again, after {after}"),
        Fact::JobStarted(spec) => format!(
            "job started with {} on this host: {}",
            counted(spec.local_world_size.into(), "rank", "ranks"),
            spec.command.join(" ")
        ),
        Fact::AttemptStarted { attempt, master_port, ranks, .. } => format!(
            "{}: {} started, MASTER_PORT {master_port}",
            run(*attempt),
            counted(ranks.len() as u64, "rank", "ranks")
        ),
        Fact::StartFailed { attempt, error, .. } => {
            format!("{}: the ranks could not be started: {error}", run(*attempt))
        }
        Fact::RankConnected { rank, client, .. } => format!("{rank} sends heartbeats ({client})"),
        Fact::RankRefused { rank, reason, .. } => format!("{rank} trains without heartbeats: {reason}"),
        Fact::PagesUnavailable { reason } => format!("the job runs without heartbeats: {reason}"),
        Fact::RanksStepping { attempt, step, .. } => {
            format!("{}: training, all ranks completed step {step}", run(*attempt))
        }
        Fact::Progress { step, loss: Some(loss), .. } => format!("step {step} completed, loss {loss:.4}"),
        Fact::Progress { step, loss: None, .. } => format!("step {step} completed"),
        Fact::RankRaised { rank, pid, note, .. } => {
            let message = note.message.lines().next().unwrap_or_default();
            format!("{rank} (pid {}) raised {}: {message}{}", pid.0, note.exception, after(note.step))
        }
        Fact::RankEnding { rank, pid, status, .. } => {
            format!("{rank} (pid {}) is exiting by {status}: the kernel is freeing its memory", pid.0)
        }
        Fact::RankExited { rank, pid, status, step, after_stop, .. } => {
            format!("{rank} (pid {}) {}", pid.0, exited(*status, *step, *after_stop))
        }
        Fact::RanksHung { hang, acts: true, .. } => {
            format!("{}; evidence is collected, then the ranks are stopped", hang.headline())
        }
        Fact::RanksHung { hang, acts: false, .. } => {
            format!("{}; it is only reported, as configured", hang.headline())
        }
        Fact::HostLost { named, how, .. } => format!("{named} is lost: {how}"),
        Fact::WorldChanged { before, now, hosts, why, .. } => {
            format!("the job goes on with {now} ranks instead of {before}, on {}: {why}", hosts.join(", "))
        }
        Fact::HangPassed { after, .. } => {
            format!("the ranks make progress again after {after}: they did not hang")
        }
        Fact::EvidenceTaken { file, groups, took, .. } => {
            let file = file.as_ref().map_or_else(String::new, |file| format!(" ({file})"));
            let found = groups.first().map_or_else(String::new, |first| format!(": {first}"));
            format!("the state of the ranks was recorded in {took}{file}{found}")
        }
        Fact::AttemptEnded { attempt, orphans_killed, waiting } => {
            let left = match waiting.as_slice() {
                [] => "no process of it is left".to_owned(),
                waiting => format!("{} wait in process for the next", listed(waiting)),
            };
            let killed = match orphans_killed {
                0 => String::new(),
                some => format!("; {} had to be killed", counted((*some).into(), "orphan", "orphans")),
            };
            format!("{} is over: {left}{killed}", run(*attempt))
        }
        Fact::StopRequested { by, .. } => format!("the launcher was asked to stop by {by}"),
        Fact::LauncherLost { pid } => {
            format!("the launcher (pid {}) vanished and its ranks with it", pid.0)
        }
        Fact::AgentFound { version } => format!("the launcher found agent {version} and reports to it"),
        Fact::AgentLost { reason } => {
            format!("the launcher lost its agent and decides alone until it is back: {reason}")
        }
        Fact::JobEnded { exit, reason } => format!("job ended with exit status {exit}: {reason}"),
    }
}

fn exited(status: ExitStatus, step: Option<u64>, after_stop: bool) -> String {
    match status {
        _ if after_stop => format!("ended as requested: {status}"),
        ExitStatus::Code(0) => format!("finished{}", after(step)),
        ExitStatus::Code(code) => format!("exited with code {code}{}", after(step)),
        ExitStatus::Signal(_) => format!("was killed by {status}{}", after(step)),
    }
}

fn after(step: Option<u64>) -> String {
    step.map(|step| format!(" after step {step}")).unwrap_or_default()
}

fn health(change: &HealthChange) -> String {
    let component = &change.component;
    let state = state_name(component.state);
    match change.from {
        None => format!("{} is {state}: {}", component.name, component.reason),
        Some(from) => {
            format!("{} went from {} to {state}: {}", component.name, state_name(from), component.reason)
        }
    }
}

fn decision(decision: &Decision) -> String {
    let with = if decision.used_agent_evidence() { ", with evidence from the agent" } else { "" };
    let done = match decision.action {
        Action::RestartInProcess { attempt } => format!("start {} in the same processes", run(attempt)),
        Action::RespawnRanks { attempt } => format!("start the lost ranks again as {}", run(attempt)),
        Action::RespawnHost { attempt } => format!("start this host's ranks again as {}", run(attempt)),
        Action::RestartInJob { attempt } => format!("restart all ranks as {}", run(attempt)),
        Action::ReplaceHost { attempt } => format!("go on with a spare host as {}", run(attempt)),
        Action::Shrink { attempt } => format!("go on with fewer ranks as {}", run(attempt)),
        Action::HandBack { exit } => format!("hand the job back to the scheduler with exit status {exit}"),
        Action::Stop { exit } => format!("stop the job with exit status {exit}"),
        Action::Wait => "wait before a restart".to_owned(),
    };
    let later = if decision.after.0 > 0 { format!(" in {}", decision.after) } else { String::new() };
    format!("{done}{later}: {} (decided by the launcher{with})", decision.why)
}

/// What people call an attempt: restarts are counted from 1, as in "restart 1 of 3".
fn run(attempt: Attempt) -> String {
    match attempt.0 {
        0 => "the first start".to_owned(),
        restart => format!("restart {restart}"),
    }
}

fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

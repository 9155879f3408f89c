//! The node and its jobs.

use std::collections::BTreeMap;

use crate::node::{JobPhase, JobView, NodeView, RankPhase, RankView};
use crate::progress;
use mainstay_checkpoint::advice::Advised;
use mainstay_checkpoint::tiers::Tier;
use mainstay_hang::Hang;
use mainstay_model::entry::ExitStatus;
use mainstay_model::fault_code::FaultCode;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::kernel::KernelClass;
use mainstay_model::operator::{Acknowledgement, OperatorState, Silence};
use mainstay_model::redact::{mask, mask_list};
use mainstay_model::time::{Span, Stamp, Wall};
use mainstay_proto::v1::{self, fault_code::Code};

use super::books::books;
use super::failure::{decision, finding, verdict};
use super::{age, duration, serialized_name, timestamp, wall_time};

/// The node as an API message.
pub fn node(view: &NodeView, now: Stamp) -> v1::Node {
    let worst = view.counting().map(|component| component.action).max().unwrap_or_default();
    v1::Node {
        state: state(view.state()).into(),
        reason: reasons(view).join("; "),
        recommended_action: action(worst).into(),
        components: view.components.values().map(|of| component(&view.operator_state, of, now)).collect(),
        implicated: view.implicated.recent(now.wall).map(implication).collect(),
    }
}

fn implication(at: Wall) -> v1::Implication {
    v1::Implication { time: Some(timestamp(at)) }
}

/// What is not healthy and why, worst first.
pub fn reasons(view: &NodeView) -> Vec<String> {
    if view.components.is_empty() {
        return vec!["no component was read yet".to_owned()];
    }
    let mut ill: Vec<&Component> =
        view.counting().filter(|component| component.state != HealthState::Healthy).collect();
    ill.sort_by_key(|component| std::cmp::Reverse(component.state));
    ill.into_iter()
        .map(|component| {
            let state = state_name(component.state);
            format!("{} is {state}: {}", component.name, component.reason)
        })
        .collect()
}

/// Its name in the API.
pub fn state_name(state: HealthState) -> &'static str {
    match state {
        HealthState::Healthy => "HEALTHY",
        HealthState::Unknown => "UNKNOWN",
        HealthState::Degraded => "DEGRADED",
        HealthState::Unhealthy => "UNHEALTHY",
    }
}

pub(super) fn state(state: HealthState) -> v1::HealthState {
    match state {
        HealthState::Healthy => v1::HealthState::Healthy,
        HealthState::Unknown => v1::HealthState::Unknown,
        HealthState::Degraded => v1::HealthState::Degraded,
        HealthState::Unhealthy => v1::HealthState::Unhealthy,
    }
}

/// A recommendation as an API message.
pub fn action(action: RecommendedAction) -> v1::RecommendedAction {
    match action {
        RecommendedAction::None => v1::RecommendedAction::None,
        RecommendedAction::RestartProcess => v1::RecommendedAction::RestartProcess,
        RecommendedAction::ResetDevice => v1::RecommendedAction::ResetDevice,
        RecommendedAction::RebootNode => v1::RecommendedAction::RebootNode,
        RecommendedAction::ReplaceNode => v1::RecommendedAction::ReplaceNode,
        RecommendedAction::ContactSupport => v1::RecommendedAction::ContactSupport,
    }
}

pub(super) fn state_in(from: v1::HealthState) -> HealthState {
    match from {
        v1::HealthState::Healthy => HealthState::Healthy,
        v1::HealthState::Unknown | v1::HealthState::Unspecified => HealthState::Unknown,
        v1::HealthState::Degraded => HealthState::Degraded,
        v1::HealthState::Unhealthy => HealthState::Unhealthy,
    }
}

pub(super) fn action_in(from: v1::RecommendedAction) -> RecommendedAction {
    match from {
        v1::RecommendedAction::None | v1::RecommendedAction::Unspecified => RecommendedAction::None,
        v1::RecommendedAction::RestartProcess => RecommendedAction::RestartProcess,
        v1::RecommendedAction::ResetDevice => RecommendedAction::ResetDevice,
        v1::RecommendedAction::RebootNode => RecommendedAction::RebootNode,
        v1::RecommendedAction::ReplaceNode => RecommendedAction::ReplaceNode,
        v1::RecommendedAction::ContactSupport => RecommendedAction::ContactSupport,
    }
}

pub(crate) fn component(operators: &OperatorState, component: &Component, now: Stamp) -> v1::Component {
    v1::Component {
        name: component.name.clone(),
        state: state(component.state).into(),
        reason: component.reason.clone(),
        recommended_action: action(component.action).into(),
        evidence: component.evidence.iter().map(evidence).collect(),
        since: wall_time(component.since, now),
        read_at: component.read_at.and_then(|at| wall_time(at, now)),
        read_age: component.read_at.and_then(|at| age(at, now)).map(duration),
        confidence: Some(component.confidence),
        acknowledgement: operators.acknowledgement(&component.name).map(acknowledgement),
        silence: operators.silence(&component.name).map(silence),
        fault_monotonic_ns: component.fault_at.map(|at| at.0),
        since_monotonic_ns: component.since.0,
        read_monotonic_ns: component.read_at.map(|at| at.0),
    }
}

pub(super) fn acknowledgement(known: &Acknowledgement) -> v1::Acknowledgement {
    v1::Acknowledgement { uid: known.uid, reason: known.reason.clone(), time: Some(timestamp(known.at.wall)) }
}

fn silence(silence: &Silence) -> v1::Silence {
    v1::Silence {
        uid: silence.uid,
        reason: silence.reason.clone(),
        since: Some(timestamp(silence.since.wall)),
        until: Some(timestamp(silence.until)),
    }
}

pub(super) fn evidence(evidence: &Evidence) -> v1::Evidence {
    v1::Evidence {
        source: evidence.source.clone(),
        reading: evidence.reading.clone(),
        limit: evidence.limit.clone(),
        before: evidence.before.clone(),
        code: evidence.code.map(code),
        meaning: evidence.meaning.clone(),
    }
}

pub(super) fn evidence_in(evidence: v1::Evidence) -> Evidence {
    Evidence {
        source: evidence.source,
        reading: evidence.reading,
        limit: evidence.limit,
        before: evidence.before,
        code: evidence.code.as_ref().and_then(code_in),
        meaning: evidence.meaning,
    }
}

/// A code as an API message.
pub fn code(code: FaultCode) -> v1::FaultCode {
    let code = match code {
        FaultCode::Xid(code) => Code::Xid(code),
        FaultCode::Sxid(code) => Code::Sxid(code),
        FaultCode::KernelLine(class) => Code::KernelLine(class.name().to_owned()),
    };
    v1::FaultCode { code: Some(code) }
}

/// A code from an API message. None for a kind or a class that this version does not know.
pub fn code_in(code: &v1::FaultCode) -> Option<FaultCode> {
    Some(match code.code.as_ref()? {
        Code::Xid(code) => FaultCode::Xid(*code),
        Code::Sxid(code) => FaultCode::Sxid(*code),
        Code::KernelLine(name) => {
            FaultCode::KernelLine(KernelClass::ALL.iter().copied().find(|class| class.name() == name)?)
        }
    })
}

/// A job as an API message, with its current speed and the intervals that are advised for its tiers.
pub fn job(
    job: &JobView,
    now: Stamp,
    steps_per_second: Option<f64>,
    saving_tiers: &[(Tier, f64)],
) -> v1::Job {
    let (phase, exit_status) = job_phase(job.phase);
    let spec = &job.spec;
    let steps_per_second = steps_per_second.filter(|_| phase == v1::JobPhase::Running);
    let remaining = steps_per_second.and_then(|rate| progress::remaining(job, rate));
    v1::Job {
        id: job.id.0.clone(),
        phase: phase.into(),
        exit_status,
        end_reason: job.end_reason.clone(),
        attempt: job.attempt.0,
        restarts: job.restarts,
        max_restarts: spec.max_restarts,
        step: job.step,
        steps_per_second,
        start_time: Some(timestamp(job.started.wall)),
        command: spec.command.clone(),
        world_size: spec.world_size,
        local_world_size: spec.local_world_size,
        launcher_pid: spec.launcher.0.into(),
        uid: spec.uid,
        run_dir: spec.run_dir.clone(),
        checkpoint_dir: spec.checkpoint_dir.clone(),
        run: spec.run.clone(),
        ranks: job.ranks.values().map(|of| rank(of, now)).collect(),
        last_verdict: job.last_verdict.as_ref().map(|of| verdict(of, now)),
        last_decision: job.last_decision.as_ref().map(decision),
        hang: job.hang.as_ref().map(|of| hang(of, now)),
        findings: job.findings.values().map(finding).collect(),
        policy_trouble: job.policy_trouble.clone().unwrap_or_default(),
        policy_troubles: job.policy_troubles,
        saving: job.saving.as_ref().map(|of| saving(of, saving_tiers)),
        copied_step: job.copied.map(|(of, at)| v1::CopiedStep {
            step: of.step,
            attempt: of.attempt,
            time: Some(timestamp(at.wall)),
        }),
        copies_behind: job.copies_behind.clone().unwrap_or_default(),
        waits_as_spare: job.waits.clone().unwrap_or_default(),
        texts_withheld: false,
        leading_host: String::new(),
        incomplete: String::new(),
        total_steps: job.total_steps(),
        remaining: remaining.map(|seconds| duration(Span((seconds * 1e9) as u64))),
        books: Some(books(&job.books, (!is_over(job.phase)).then_some(now.wall))),
    }
}

/// Adds to a job, as a host that does not lead knows it, what the launcher that leads reports.
pub fn complete(job: &mut v1::Job, leading: &v1::Job) {
    // The journal of the leader is written here a moment later.
    if leading.attempt < job.attempt {
        return;
    }
    let own = std::mem::take(&mut job.ranks).into_iter().filter(|_| leading.attempt == job.attempt);
    let mut own: BTreeMap<u32, v1::Rank> = own.map(|rank| (rank.rank, rank)).collect();
    job.ranks = leading.ranks.iter().map(|rank| completed(own.remove(&rank.rank), rank)).collect();
    (job.phase, job.attempt, job.restarts) = (leading.phase, leading.attempt, leading.restarts);
    (job.step, job.steps_per_second) = (leading.step, leading.steps_per_second);
    (job.world_size, job.max_restarts) = (leading.world_size, leading.max_restarts);
    (job.findings, job.hang) = (leading.findings.clone(), leading.hang.clone());
}

/// A rank as the leader reports it. Its own host knows more of its heartbeats, and only the leader compares it with the
/// ranks of other hosts.
fn completed(own: Option<v1::Rank>, leading: &v1::Rank) -> v1::Rank {
    match own.filter(|own| own.heartbeat_time.is_some()) {
        Some(own) => v1::Rank {
            self_time: leading.self_time.or(own.self_time),
            against_peers: leading.against_peers.or(own.against_peers),
            wait_share: leading.wait_share.or(own.wait_share),
            ..own
        },
        None => leading.clone(),
    }
}

/// Removes from a rank what its program wrote.
pub fn withhold_texts_of(rank: &mut v1::Rank) {
    (rank.refusal, rank.sections) = (rank.refusal.take().map(|_| String::new()), Vec::new());
}

/// Removes from a job what its program or its user wrote.
pub fn withhold_texts(job: &mut v1::Job) {
    job.texts_withheld = true;
    (job.command, job.end_reason) = (Vec::new(), None);
    for text in [&mut job.run_dir, &mut job.checkpoint_dir, &mut job.policy_trouble, &mut job.copies_behind] {
        text.clear();
    }
    if let Some(verdict) = &mut job.last_verdict {
        verdict.headline = match verdict.culprit {
            Some(rank) => format!("rank {rank} failed"),
            None => "the job failed".to_owned(),
        };
        (verdict.evidence, verdict.against, verdict.would_change) = (Vec::new(), Vec::new(), Vec::new());
    }
    if let Some(decision) = &mut job.last_decision {
        decision.why = String::new();
    }
    if let Some(hang) = &mut job.hang {
        hang.headline = "the ranks make no progress".to_owned();
    }
    for cause in job.books.iter_mut().flat_map(|books| &mut books.causes) {
        cause.headline.clear();
    }
    for finding in &mut job.findings {
        (finding.headline, finding.evidence) = (finding.what.clone(), Vec::new());
    }
    job.ranks.iter_mut().for_each(withhold_texts_of);
}

/// Masks secrets in what the program of a rank wrote.
pub fn mask_secrets_of(rank: &mut v1::Rank) {
    rank.refusal.iter_mut().for_each(|text| *text = mask(text));
}

/// Masks secrets in what a job's program or its user wrote.
pub fn mask_secrets(job: &mut v1::Job) {
    mask_list(&mut job.command);
    let mut texts = vec![&mut job.policy_trouble, &mut job.copies_behind];
    texts.extend(&mut job.end_reason);
    texts.extend(job.last_decision.iter_mut().map(|decision| &mut decision.why));
    texts.extend(job.hang.iter_mut().map(|hang| &mut hang.headline));
    texts.extend(job.books.iter_mut().flat_map(|books| &mut books.causes).map(|cause| &mut cause.headline));
    let mut lists = Vec::new();
    if let Some(verdict) = &mut job.last_verdict {
        texts.push(&mut verdict.headline);
        lists.extend([&mut verdict.evidence, &mut verdict.against, &mut verdict.would_change]);
    }
    for finding in &mut job.findings {
        texts.push(&mut finding.headline);
        lists.push(&mut finding.evidence);
    }
    texts.into_iter().for_each(|text| *text = mask(text));
    lists.into_iter().for_each(|list| mask_list(list));
    job.ranks.iter_mut().for_each(mask_secrets_of);
}

fn saving(of: &Advised, tiers: &[(Tier, f64)]) -> v1::Saving {
    let tiers =
        tiers.iter().map(|(tier, every)| v1::SavingTier { tier: tier.as_str().to_owned(), every_s: *every });
    v1::Saving {
        every_s: of.every,
        was_s: of.was,
        stall_s: of.stall,
        between_failures_s: of.between_failures,
        restore_s: of.restore,
        cost: of.cost,
        cost_was: of.cost_was,
        tiers: tiers.collect(),
    }
}

fn is_over(phase: JobPhase) -> bool {
    matches!(phase, JobPhase::Ended(_) | JobPhase::Lost)
}

fn job_phase(phase: JobPhase) -> (v1::JobPhase, Option<i32>) {
    match phase {
        JobPhase::Starting => (v1::JobPhase::Starting, None),
        JobPhase::Running => (v1::JobPhase::Running, None),
        JobPhase::Recovering => (v1::JobPhase::Recovering, None),
        JobPhase::Stopping => (v1::JobPhase::Stopping, None),
        JobPhase::Ended(status) => (v1::JobPhase::Ended, Some(status)),
        JobPhase::Lost => (v1::JobPhase::Lost, None),
    }
}

/// A rank as an API message.
pub fn rank(rank: &RankView, now: Stamp) -> v1::Rank {
    let (phase, exit) = match rank.phase {
        RankPhase::Started => (v1::RankPhase::Started, None),
        RankPhase::Connected => (v1::RankPhase::Connected, None),
        RankPhase::Raised => (v1::RankPhase::Raised, None),
        RankPhase::Exited(status) => (v1::RankPhase::Exited, Some(exit(status))),
    };
    let beat = rank.beat.as_ref();
    // A page that exists but has no heartbeat has no time.
    let beaten_at = beat.map(|beat| beat.at).filter(|at| at.0 > 0);
    v1::Rank {
        rank: rank.rank.0,
        local_rank: rank.local_rank,
        pid: rank.pid.0.into(),
        phase: phase.into(),
        exit,
        step: beat.and_then(|beat| beat.step).or(rank.last_step),
        sections: beat.map(|beat| beat.sections.clone()).unwrap_or_default(),
        heartbeat_time: beaten_at.and_then(|at| wall_time(at, now)),
        heartbeat_age: beaten_at.map(|at| duration(now.mono.since(at))),
        loss: beat.and_then(|beat| beat.loss),
        refusal: rank.refusal.clone(),
        median_step: beat.and_then(|beat| beat.median_step).map(duration),
        self_time: beat.and_then(|beat| beat.pace.self_time).map(duration),
        against_peers: beat.and_then(|beat| beat.pace.against_peers),
        wait_share: beat.and_then(|beat| beat.pace.wait_share),
        host: rank.host.clone(),
        start_ticks: rank.start_ticks,
    }
}

fn hang(hang: &Hang, now: Stamp) -> v1::Hang {
    v1::Hang {
        kind: serialized_name(&hang.kind),
        headline: hang.headline(),
        culprits: hang.culprits.iter().map(|rank| rank.0).collect(),
        since: wall_time(hang.since, now),
    }
}

fn exit(status: ExitStatus) -> v1::ProcessExit {
    let how = match status {
        ExitStatus::Code(code) => v1::process_exit::How::Code(code),
        ExitStatus::Signal(signal) => v1::process_exit::How::Signal(signal),
    };
    v1::ProcessExit { how: Some(how) }
}

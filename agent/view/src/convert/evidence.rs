//! What the agent sends a launcher about its host, in both directions.

use mainstay_model::finding::Hint;
use mainstay_model::health::Component;
use mainstay_model::host_context::{FailedBefore, HostEvidence};
use mainstay_model::id::{Incident, Rank};
use mainstay_model::operator::OperatorState;
use mainstay_model::repeats::{OnHost, SeenBefore};
use mainstay_model::slowdown_hints::SlowdownHints;
use mainstay_model::time::{Mono, Stamp};
use mainstay_proto::v1;

use super::health::{action_in, component, evidence_in, state_in};

/// The host's evidence about a failure as a message.
pub fn host_evidence(incident: Incident, of: &HostEvidence, now: Stamp) -> v1::HostEvidence {
    let no_operator = OperatorState::default();
    let failed_before = of.failed_before.iter().map(|of| v1::FailedBefore {
        component: of.component.clone(),
        incidents: of.incidents,
        hours: of.hours,
        suspicion: of.suspicion,
    });
    v1::HostEvidence {
        incident: incident.0,
        kernel_lines: of.kernel_lines.clone(),
        unhealthy: of.unhealthy.iter().map(|of| component(&no_operator, of, now)).collect(),
        held: of.held.clone(),
        failed_before: failed_before.collect(),
        gpus: of.gpus.clone(),
        seen_before: of.seen_before.as_ref().map(seen_before),
        notices: of.notices.clone(),
    }
}

/// The host's evidence about a failure from a message.
pub fn host_evidence_in(of: v1::HostEvidence) -> (Incident, HostEvidence) {
    let failed_before = of.failed_before.into_iter().map(|of| FailedBefore {
        component: of.component,
        incidents: of.incidents,
        hours: of.hours,
        suspicion: of.suspicion,
    });
    let evidence = HostEvidence {
        kernel_lines: of.kernel_lines,
        unhealthy: of.unhealthy.into_iter().map(component_in).collect(),
        held: of.held,
        failed_before: failed_before.collect(),
        gpus: of.gpus,
        seen_before: of.seen_before.map(seen_before_in),
        notices: of.notices,
        // The launcher has them itself.
        findings: Vec::new(),
    };
    (Incident(of.incident), evidence)
}

fn component_in(of: v1::Component) -> Component {
    Component {
        state: state_in(of.state()),
        action: action_in(of.recommended_action()),
        name: of.name,
        reason: of.reason,
        evidence: of.evidence.into_iter().map(evidence_in).collect(),
        read_at: of.read_monotonic_ns.map(Mono),
        since: Mono(of.since_monotonic_ns),
        confidence: of.confidence.unwrap_or(1.0),
        fault_at: of.fault_monotonic_ns.map(Mono),
        gauges: Vec::new(),
    }
}

fn seen_before(of: &SeenBefore) -> v1::SeenBefore {
    let elsewhere = of
        .elsewhere
        .iter()
        .map(|of| v1::FailedElsewhere { host: of.host.clone(), at_this_place: of.at_this_place });
    v1::SeenBefore {
        in_this_job: of.in_this_job,
        at_this_step: of.at_this_step,
        at_this_data: of.at_this_data,
        at_other_data: of.at_other_data,
        in_other_boots: of.in_other_boots,
        other_jobs: of.other_jobs,
        in_earlier_runs: of.in_earlier_runs,
        elsewhere: elsewhere.collect(),
        answered_by: of.answered_by,
    }
}

fn seen_before_in(of: v1::SeenBefore) -> SeenBefore {
    let elsewhere =
        of.elsewhere.into_iter().map(|of| OnHost { host: of.host, at_this_place: of.at_this_place });
    SeenBefore {
        in_this_job: of.in_this_job,
        at_this_step: of.at_this_step,
        at_this_data: of.at_this_data,
        at_other_data: of.at_other_data,
        in_other_boots: of.in_other_boots,
        other_jobs: of.other_jobs,
        in_earlier_runs: of.in_earlier_runs,
        elsewhere: elsewhere.collect(),
        answered_by: of.answered_by,
    }
}

/// What may explain why ranks are slow, as a message.
pub fn rank_context(of: &SlowdownHints) -> v1::RankContext {
    let hints = of.hints.iter().cloned().map(|of| v1::SlowdownHint {
        host: of.host,
        device: of.device,
        about: of.about,
        fact: of.fact,
    });
    v1::RankContext {
        devices: of.devices.iter().map(|(rank, device)| (rank.0, device.clone())).collect(),
        hints: hints.collect(),
        at_work: of.at_work.iter().map(|(rank, at_work)| (rank.0, *at_work)).collect(),
    }
}

/// What may explain why ranks are slow, from a message.
pub fn rank_context_in(of: v1::RankContext) -> SlowdownHints {
    let hints = of.hints.into_iter().map(|of| Hint {
        host: of.host,
        device: of.device,
        about: of.about,
        fact: of.fact,
    });
    SlowdownHints {
        devices: of.devices.into_iter().map(|(rank, device)| (Rank(rank), device)).collect(),
        hints: hints.collect(),
        at_work: of.at_work.into_iter().map(|(rank, at_work)| (Rank(rank), at_work)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use mainstay_model::fault_code::FaultCode;
    use mainstay_model::health::{Evidence, HealthState, RecommendedAction};
    use mainstay_model::kernel::KernelClass;

    use super::*;

    #[test]
    fn the_evidence_of_a_host_arrives_as_it_was_sent() {
        let component = Component {
            name: "gpu.0000:3b:00".into(),
            state: HealthState::Unhealthy,
            reason: "XID 79".into(),
            action: RecommendedAction::RebootNode,
            evidence: vec![Evidence {
                code: Some(FaultCode::KernelLine(KernelClass::GpuOffBus)),
                meaning: Some("a GPU has fallen off the bus".into()),
                ..Evidence::new("kernel log", "the line")
            }],
            read_at: None,
            since: Mono(5),
            confidence: 0.5,
            fault_at: Some(Mono(7)),
            gauges: Vec::new(),
        };
        let elsewhere = vec![OnHost { host: "b".into(), at_this_place: true }];
        let record =
            FailedBefore { component: component.name.clone(), incidents: 2, hours: 1.5, suspicion: 0.9 };
        let sent = HostEvidence {
            kernel_lines: vec!["the line".into()],
            unhealthy: vec![component],
            held: vec!["a port".into()],
            failed_before: vec![record],
            gpus: vec!["GPU 0: 3 % busy".into()],
            seen_before: Some(SeenBefore {
                in_this_job: 2,
                elsewhere,
                answered_by: 1,
                ..SeenBefore::default()
            }),
            notices: vec!["maintenance".into()],
            findings: Vec::new(),
        };
        let message = host_evidence(Incident(3), &sent, Stamp::default());
        assert_eq!(host_evidence_in(message), (Incident(3), sent));
    }

    #[test]
    fn what_may_slow_ranks_down_arrives_as_it_was_sent() {
        let hint = Hint { device: Some("gpu.0000:3b:00".into()), about: "clocks".into(), ..Hint::default() };
        let devices = [(Rank(0), "gpu.0000:3b:00".into())].into();
        let sent = SlowdownHints { devices, hints: vec![hint], at_work: [(Rank(0), true)].into() };
        assert_eq!(rank_context_in(rank_context(&sent)), sent);
    }
}

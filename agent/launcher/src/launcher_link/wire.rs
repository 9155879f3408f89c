//! Converts between the core's types and the messages of the link: the only place that knows both.

use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_health::host::cloud::leave::Leave;
use mainstay_health::host::contention::SlowdownHints;
use mainstay_model::entry::Entry;
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Attempt, Incident, Rank};
use mainstay_model::messages::{self, FormError};
use mainstay_model::time::{Mono, Span, Wall};
use mainstay_model::verdict::Verdict;
use mainstay_progress::monitor::Pace;
use mainstay_proto::v1;
use mainstay_recovery::protocol::AgentEvidence;
use mainstay_view::node::BeatView;

/// An invalid message.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// A received part is not in the journal's form, or has an unknown version.
    #[error(transparent)]
    Form(#[from] FormError),
    /// A part cannot be written as JSON.
    #[error("{what} cannot be written: {source}")]
    Unwritable {
        /// The part.
        what: &'static str,
        /// The error.
        source: serde_json::Error,
    },
}

fn form(what: &'static str) -> impl Fn(serde_json::Error) -> WireError {
    move |source| WireError::Unwritable { what, source }
}

/// Encodes an entry.
///
/// # Errors
/// It cannot be written as JSON.
pub fn entry_out(entry: &Entry) -> Result<v1::ForwardedEntry, WireError> {
    Ok(v1::ForwardedEntry { line: serde_json::to_string(entry).map_err(form("an entry"))? })
}

/// Decodes an entry.
///
/// # Errors
/// It is not an entry of this version.
pub fn entry_in(entry: &v1::ForwardedEntry) -> Result<Entry, WireError> {
    Ok(messages::entry(&entry.line)?)
}

/// Encodes a sample.
pub fn beats_out(attempt: Attempt, beats: &[(Rank, BeatView)], steps: &[StepTime]) -> v1::BeatSample {
    let beats = beats.iter().map(|(rank, beat)| v1::RankBeat {
        rank: rank.0,
        step: beat.step,
        sections: beat.sections.clone(),
        monotonic_ns: beat.at.0,
        loss: beat.loss,
        median_step_ns: beat.median_step.map(|median| median.0),
        self_time_ns: beat.pace.self_time.map(|own| own.0),
        against_peers: beat.pace.against_peers,
        wait_share: beat.pace.wait_share,
        stage: beat.stage,
    });
    let steps = steps.iter().map(|step| v1::StepTime {
        start_monotonic_ns: step.start.0,
        end_monotonic_ns: step.end.0,
        saving_ns: step.saving.0,
    });
    v1::BeatSample { attempt: attempt.0, beats: beats.collect(), steps: steps.collect() }
}

/// Decodes a sample.
pub fn beats_in(sample: v1::BeatSample) -> (Attempt, Vec<(Rank, BeatView)>) {
    let beats = sample.beats.into_iter().map(|beat| {
        let view = BeatView {
            step: beat.step,
            sections: beat.sections,
            at: Mono(beat.monotonic_ns),
            loss: beat.loss,
            median_step: beat.median_step_ns.map(Span),
            pace: Pace {
                self_time: beat.self_time_ns.map(Span),
                against_peers: beat.against_peers,
                wait_share: beat.wait_share,
            },
            stage: beat.stage,
        };
        (Rank(beat.rank), view)
    });
    (Attempt(sample.attempt), beats.collect())
}

/// Decodes the step times of a sample.
pub fn steps_in(sample: &v1::BeatSample) -> Vec<StepTime> {
    let steps = sample.steps.iter().map(|step| StepTime {
        start: Mono(step.start_monotonic_ns),
        end: Mono(step.end_monotonic_ns),
        saving: Span(step.saving_ns),
    });
    steps.collect()
}

/// Encodes a verdict.
///
/// # Errors
/// It cannot be written as JSON.
pub fn verdict_out(verdict: &Verdict) -> Result<v1::Proposal, WireError> {
    let text = serde_json::to_string(verdict).map_err(form("a verdict"))?;
    Ok(v1::Proposal { incident: verdict.incident.0, verdict: text, decision: String::new() })
}

/// Decodes a verdict.
///
/// # Errors
/// It is not of this version.
pub fn verdict_in(proposal: &v1::Proposal) -> Result<Verdict, WireError> {
    Ok(messages::verdict(&proposal.verdict)?)
}

/// Encodes the state of the host around a job's ranks.
///
/// # Errors
/// It cannot be written as JSON.
pub fn surroundings_out(known: &SlowdownHints) -> Result<v1::Surroundings, WireError> {
    Ok(v1::Surroundings { known: serde_json::to_string(known).map_err(form("what surrounds the ranks"))? })
}

/// Decodes the state of the host around a job's ranks.
///
/// # Errors
/// It is not of this version.
pub fn rank_context_in(reported: &v1::Surroundings) -> Result<SlowdownHints, WireError> {
    Ok(messages::rank_context(&reported.known)?)
}

/// Encodes the request to leave the machine.
pub fn leave_out(leave: &Leave) -> v1::Leave {
    v1::Leave { reason: leave.reason.clone(), by_unix_ns: leave.by.map_or(0, |by| by.0) }
}

/// Decodes the request to leave the machine.
pub fn leave_in(reported: v1::Leave) -> Leave {
    Leave { reason: reported.reason, by: (reported.by_unix_ns > 0).then_some(Wall(reported.by_unix_ns)) }
}

/// Encodes a ruling.
///
/// # Errors
/// It cannot be written as JSON.
pub fn ruling_out(incident: Incident, host_evidence: &HostEvidence) -> Result<v1::Ruling, WireError> {
    let unhealthy = host_evidence.unhealthy.iter().map(serde_json::to_string);
    let records = host_evidence.failed_before.iter().map(serde_json::to_string);
    let seen = host_evidence.seen_before.as_ref().map(serde_json::to_string).transpose();
    Ok(v1::Ruling {
        incident: incident.0,
        // An agent does not decide for the launcher.
        decision: None,
        kernel_lines: host_evidence.kernel_lines.clone(),
        sick_components: unhealthy.collect::<Result<_, _>>().map_err(form("a component"))?,
        held: host_evidence.held.clone(),
        failed_before: records.collect::<Result<_, _>>().map_err(form("a device's record"))?,
        gpus: host_evidence.gpus.clone(),
        notices: host_evidence.notices.clone(),
        seen_before: seen.map_err(form("earlier failures"))?,
    })
}

/// Decodes a ruling.
///
/// # Errors
/// It is not of this version.
pub fn ruling_in(ruling: &v1::Ruling) -> Result<AgentEvidence, WireError> {
    let unhealthy =
        ruling.sick_components.iter().map(|text| messages::component(text)).collect::<Result<_, _>>()?;
    let records = ruling.failed_before.iter().map(|text| messages::record(text));
    let failed_before = records.collect::<Result<_, _>>()?;
    let seen_before = ruling.seen_before.as_deref().map(messages::seen_before).transpose()?;
    Ok(AgentEvidence {
        incident: Incident(ruling.incident),
        instead: None,
        host_evidence: HostEvidence {
            kernel_lines: ruling.kernel_lines.clone(),
            unhealthy,
            held: ruling.held.clone(),
            failed_before,
            gpus: ruling.gpus.clone(),
            notices: ruling.notices.clone(),
            seen_before,
            // The launcher has them itself.
            findings: Vec::new(),
        },
    })
}

#[cfg(test)]
mod tests {
    use mainstay_model::finding::Hint;

    use super::*;

    #[test]
    fn the_pace_of_ranks_arrives_as_it_was_sent() {
        let pace =
            Pace { self_time: Some(Span::millis(80)), against_peers: Some(1.25), wait_share: Some(0.2) };
        let beats = [
            (Rank(3), BeatView { step: Some(7), pace, stage: Some(1), ..BeatView::default() }),
            (Rank(4), BeatView::default()),
        ];
        let steps = [StepTime { start: Mono(1), end: Mono(9), saving: Span(2) }];
        let sent = beats_out(Attempt(2), &beats, &steps);
        assert_eq!(steps_in(&sent), steps);
        let (attempt, arrived) = beats_in(sent);
        assert_eq!((attempt, arrived.as_slice()), (Attempt(2), beats.as_slice()));
    }

    #[test]
    fn that_the_machine_is_to_be_left_arrives_with_its_time_or_without() {
        for by in [None, Some(Wall(1_800_000_000_000_000_000))] {
            let leave = Leave { reason: "maintenance of the host".into(), by };
            assert_eq!(leave_in(leave_out(&leave)), leave);
        }
    }

    #[test]
    fn what_surrounds_ranks_arrives_as_it_was_sent_and_anything_else_is_refused() {
        let hint = Hint {
            device: Some("gpu.0000:3b:00".into()),
            about: "clocks".into(),
            fact: "held down".into(),
            ..Hint::default()
        };
        let devices = [(Rank(0), "gpu.0000:3b:00".into())].into();
        let known = SlowdownHints { devices, hints: vec![hint], at_work: [(Rank(0), true)].into() };
        let reported = surroundings_out(&known).unwrap();
        assert_eq!(rank_context_in(&reported).unwrap(), known);
        assert!(rank_context_in(&v1::Surroundings { known: "[1]".into() }).is_err());
    }
}

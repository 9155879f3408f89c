//! Converts between the core's types and the messages of the link: the only place that knows both.

use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_health::host::cloud::leave::Leave;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span, Wall};
use mainstay_progress::monitor::Pace;
use mainstay_proto::v1;
use mainstay_view::node::BeatView;

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
        total_steps: beat.total_steps,
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
            total_steps: beat.total_steps,
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

/// Encodes the request to leave the machine.
pub fn leave_out(leave: &Leave) -> v1::Leave {
    v1::Leave { reason: leave.reason.clone(), by_unix_ns: leave.by.map_or(0, |by| by.0) }
}

/// Decodes the request to leave the machine.
pub fn leave_in(reported: v1::Leave) -> Leave {
    Leave { reason: reported.reason, by: (reported.by_unix_ns > 0).then_some(Wall(reported.by_unix_ns)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_of_ranks_arrives_as_it_was_sent() {
        let pace =
            Pace { self_time: Some(Span::millis(80)), against_peers: Some(1.25), wait_share: Some(0.2) };
        let beats = [
            (
                Rank(3),
                BeatView { step: Some(7), pace, stage: Some(1), total_steps: Some(9), ..BeatView::default() },
            ),
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
}

//! The speed of a job: steps per second over the last minute.

use std::collections::VecDeque;

use mainstay_model::id::Attempt;
use mainstay_model::time::{Mono, Span};

/// How far back a rate looks. Two samples are always kept, for trainers with long steps.
const RATE_WINDOW: Span = Span::seconds(60);

/// The newest steps of a job, with the times at which they were completed.
#[derive(Clone, Debug, Default)]
pub struct StepRate {
    attempt: Attempt,
    seen: VecDeque<(Mono, u64)>,
}

impl StepRate {
    /// Takes the newest step of an attempt, and when it was completed.
    pub fn add(&mut self, at: Mono, attempt: Attempt, step: u64) {
        let newest = self.seen.back().map(|(_, step)| *step);
        if attempt != self.attempt || newest.is_some_and(|newest| step < newest) {
            self.attempt = attempt;
            self.seen.clear();
        } else if newest == Some(step) {
            return;
        }
        self.seen.push_back((at, step));
        while self.seen.len() > 2
            && self.seen.front().is_some_and(|(first, _)| at.since(*first) > RATE_WINDOW)
        {
            self.seen.pop_front();
        }
    }

    /// Steps per second at this moment; none before two different steps of the attempt were seen.
    pub fn rate(&self, now: Mono) -> Option<f64> {
        let (first_at, first) = *self.seen.front()?;
        let (last_at, last) = *self.seen.back()?;
        let steps = last.checked_sub(first).filter(|steps| *steps > 0)?;
        let span = last_at.since(first_at).as_seconds();
        // One usual step time may pass without a new step; time beyond it lowers the rate.
        let quiet = (now.since(last_at).as_seconds() - span / steps as f64).max(0.0);
        Some(steps as f64 / (span + quiet)).filter(|rate| rate.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(points: &[(u64, u64)]) -> StepRate {
        let mut samples = StepRate::default();
        for (second, step) in points {
            samples.add(at(*second), Attempt(0), *step);
        }
        samples
    }

    fn at(second: u64) -> Mono {
        Mono(second * 1_000_000_000)
    }

    #[test]
    fn a_rate_needs_two_different_steps() {
        assert_eq!(samples(&[]).rate(at(9)), None);
        assert_eq!(samples(&[(1, 5)]).rate(at(9)), None);
        assert_eq!(samples(&[(1, 5), (2, 5)]).rate(at(9)), None);
        assert_eq!(samples(&[(1, 5), (3, 9)]).rate(at(3)), Some(2.0));
    }

    #[test]
    fn the_rate_of_a_job_without_progress_falls() {
        let samples = samples(&[(0, 0), (10, 10)]);
        assert_eq!(samples.rate(at(11)), Some(1.0));
        assert_eq!(samples.rate(at(21)), Some(0.5));
    }

    #[test]
    fn only_the_last_minute_counts_and_a_new_attempt_starts_afresh() {
        let mut samples = samples(&[(0, 0), (100, 1000), (130, 1030), (160, 1060)]);
        assert_eq!(samples.rate(at(160)), Some(1.0));
        samples.add(at(161), Attempt(1), 1060);
        assert_eq!(samples.rate(at(161)), None);
    }

    #[test]
    fn steps_that_are_done_again_start_afresh() {
        let samples = samples(&[(0, 100), (10, 110), (20, 105), (21, 106)]);
        assert_eq!(samples.rate(at(21)), Some(1.0));
    }
}

//! The confidence that a silent host stays silent: the phi accrual failure detector of Hayashibara et al. (2004) over
//! the beats of a stream. It learns how regular the beats of each host are, so a link that is slow or loses packets
//! is suspected later than a good one. Suspicion alone is not a verdict: see [`lost`](super::lost).

use std::collections::VecDeque;

use mainstay_model::time::{Mono, Span};

/// The number of intervals that are kept: half a minute of beats.
const WINDOW: usize = 64;

/// Fewer intervals are not enough; until then mean and deviation, in seconds, are assumed to be these.
const MIN_INTERVALS: usize = 8;
const EXPECTED: (f64, f64) = (0.5, 0.25);

/// On a busy host the scheduler alone delays a beat by this much, in seconds.
const LEAST_DEVIATION: f64 = 0.2;

/// A silence with a probability of at most 1 in 10^8 is suspicious.
const THRESHOLD: f64 = 8.0;

/// No shorter silence is suspicious. With the least deviation it would not be unusual even for a host that beats
/// without pause.
const MIN_SILENCE: Span = Span::seconds(1);

/// A silence of this length is suspicious on any link.
const MAX_SILENCE: Span = Span::seconds(6);

/// The observed beats of one host.
#[derive(Clone, Debug, PartialEq)]
pub struct Suspicion {
    received: Mono,
    beat: Option<Mono>,
    /// In seconds, oldest first.
    intervals: VecDeque<f64>,
}

impl Suspicion {
    /// A host that has just sent something.
    pub fn new(at: Mono) -> Suspicion {
        Suspicion { received: at, beat: None, intervals: VecDeque::new() }
    }

    /// Anything arrived from it.
    pub fn received(&mut self, at: Mono) {
        self.received = self.received.max(at);
    }

    /// A beat arrived. Beats are sent regularly.
    pub fn beat(&mut self, at: Mono) {
        if let Some(last) = self.beat {
            if self.intervals.len() == WINDOW {
                self.intervals.pop_front();
            }
            self.intervals.push_back(at.since(last).as_seconds());
        }
        self.beat = Some(at);
        self.received(at);
    }

    /// The receiver was stalled for this long until now: nothing could arrive in that time.
    pub fn exclude(&mut self, at: Mono, span: Span) {
        self.received = self.received.after(span).min(at).max(self.received);
        // The interval to the next beat would show nothing about the host.
        self.beat = None;
    }

    /// It has a new connection: the interval between two connections is not one between beats.
    pub fn connected(&mut self, at: Mono) {
        self.beat = None;
        self.received(at);
    }

    /// How long nothing has arrived.
    pub fn silence(&self, at: Mono) -> Span {
        at.since(self.received)
    }

    /// The negative decimal logarithm of the probability that a live host is silent for this long.
    pub fn phi(&self, at: Mono) -> f64 {
        let (mean, deviation) = self.expected();
        let beyond = (self.silence(at).as_seconds() - mean) / deviation;
        // The tail of the normal distribution, approximated by a logistic curve that is exact to 1 % where it
        // matters.
        let odds = (-beyond * (1.5976 + 0.070_566 * beyond * beyond)).exp();
        -(odds / (1.0 + odds)).log10()
    }

    /// Whether the silence is longer than chance explains. A host that has never sent a beat is not expected to.
    pub fn is_suspect(&self, at: Mono) -> bool {
        let has_beaten = self.beat.is_some() || !self.intervals.is_empty();
        if !has_beaten || self.silence(at) < MIN_SILENCE {
            return false;
        }
        // Far beyond the mean the probability underflows.
        let phi = self.phi(at);
        phi.is_nan() || phi >= THRESHOLD || self.silence(at) >= MAX_SILENCE
    }

    /// Mean and standard deviation of the interval between two beats.
    fn expected(&self) -> (f64, f64) {
        if self.intervals.len() < MIN_INTERVALS {
            return EXPECTED;
        }
        let count = self.intervals.len() as f64;
        let mean = self.intervals.iter().sum::<f64>() / count;
        let variance = self.intervals.iter().map(|interval| (interval - mean).powi(2)).sum::<f64>() / count;
        (mean, variance.sqrt().max(LEAST_DEVIATION))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn beaten(intervals: &[u64]) -> (Suspicion, Mono) {
        let mut at = Mono(0);
        let mut suspicion = Suspicion::new(at);
        for interval in intervals {
            at = at.after(Span::millis(*interval));
            suspicion.beat(at);
        }
        (suspicion, at)
    }

    /// The silence after which it is suspected, in milliseconds.
    fn suspected_after(suspicion: &Suspicion, at: Mono) -> u64 {
        let after = (0..20_000).find(|millis| suspicion.is_suspect(at.after(Span::millis(*millis))));
        after.expect("every silence is suspected at some time")
    }

    #[test]
    fn a_regular_host_is_suspected_within_two_seconds_and_not_for_one_missed_beat() {
        let (suspicion, at) = beaten(&[500; 60]);
        let after = suspected_after(&suspicion, at);
        assert!((1100..2000).contains(&after), "{after}");
    }

    #[test]
    fn a_host_that_beats_irregularly_is_suspected_later() {
        let irregular: Vec<u64> = (0..60).map(|beat| if beat % 4 == 0 { 1400 } else { 200 }).collect();
        let (suspicion, at) = beaten(&irregular);
        let after = suspected_after(&suspicion, at);
        assert!((2500..6000).contains(&after), "{after}");
    }

    #[test]
    fn time_in_which_the_receiver_was_stalled_does_not_count() {
        let (mut suspicion, at) = beaten(&[500; 60]);
        let later = at.after(Span::seconds(30));
        suspicion.exclude(later, Span::seconds(30));
        assert!(!suspicion.is_suspect(later));
        let before = suspicion.intervals.clone();
        suspicion.beat(later);
        assert_eq!(suspicion.intervals, before, "30 s are no interval between beats");
    }

    proptest! {
        /// Suspicion grows with the silence. No history of beats prevents it forever.
        #[test]
        fn suspicion_grows_with_silence_and_ends_in_certainty(
            intervals in proptest::collection::vec(0u64..20_000, 1..100),
            first in 0u64..8_000,
            more in 0u64..8_000,
        ) {
            let (suspicion, at) = beaten(&intervals);
            let [sooner, later] = [first, first + more].map(|millis| at.after(Span::millis(millis)));
            prop_assert!(suspicion.phi(later) >= suspicion.phi(sooner) || suspicion.phi(later).is_nan());
            prop_assert!(suspicion.is_suspect(later) || !suspicion.is_suspect(sooner));
            prop_assert!(suspicion.is_suspect(at.after(MAX_SILENCE)));
        }
    }
}

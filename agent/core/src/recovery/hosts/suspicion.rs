//! How sure it is that a host which says nothing will say nothing more: the phi accrual failure detector of Hayashibara et al.
//! (2004) over the beats of a stream. It learns how regular the beats of each host are, so a link that is slow or loses packets
//! is suspected later than a good one. Suspicion alone is no verdict: see [`lost`](super::lost).

use std::collections::VecDeque;

use crate::base::time::{Mono, Span};

/// Intervals that are remembered: half a minute of beats.
const WINDOW: usize = 64;

/// Fewer intervals say too little; until then the next beat is expected as these say.
const ENOUGH: usize = 8;
const EXPECTED: (f64, f64) = (0.5, 0.25);

/// The scheduler of a busy host alone moves a beat by so much, in seconds.
const LEAST_DEVIATION: f64 = 0.2;

/// A silence of one in 10^8 is suspected.
const THRESHOLD: f64 = 8.0;

/// No silence below is suspected: with the least deviation it would be no surprise even of a host that beats without a pause.
const AT_LEAST: Span = Span::seconds(1);

/// A silence of that length is suspected on any link.
const AT_MOST: Span = Span::seconds(6);

/// What is known of the beats of one host.
#[derive(Clone, Debug, PartialEq)]
pub struct Suspicion {
    received: Mono,
    beat: Option<Mono>,
    /// In seconds, oldest first.
    intervals: VecDeque<f64>,
}

impl Suspicion {
    /// Of a host that was heard just now.
    pub fn new(at: Mono) -> Suspicion {
        Suspicion { received: at, beat: None, intervals: VecDeque::new() }
    }

    /// Anything arrived from it.
    pub fn received(&mut self, at: Mono) {
        self.received = self.received.max(at);
    }

    /// A beat arrived, which is sent regularly.
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

    /// Whoever listens did not for so long until now: nothing could be heard in that time.
    pub fn deaf_for(&mut self, at: Mono, span: Span) {
        self.received = self.received.after(span).min(at).max(self.received);
        // The interval to the next beat would say nothing of the host.
        self.beat = None;
    }

    /// It has a new connection: the interval between two connections is none between beats.
    pub fn connected(&mut self, at: Mono) {
        self.beat = None;
        self.received(at);
    }

    /// For how long nothing has been heard.
    pub fn silence(&self, at: Mono) -> Span {
        at.since(self.received)
    }

    /// The negative decimal logarithm of the probability that a host which lives is silent for so long.
    pub fn phi(&self, at: Mono) -> f64 {
        let (mean, deviation) = self.expected();
        let beyond = (self.silence(at).as_seconds() - mean) / deviation;
        // The tail of the normal distribution, by a logistic curve that is exact to 1 % where it matters.
        let odds = (-beyond * (1.5976 + 0.070_566 * beyond * beyond)).exp();
        -(odds / (1.0 + odds)).log10()
    }

    /// Whether the silence is longer than chance explains. One that has never beaten is not expected to.
    pub fn is_suspect(&self, at: Mono) -> bool {
        let has_beaten = self.beat.is_some() || !self.intervals.is_empty();
        if !has_beaten || self.silence(at) < AT_LEAST {
            return false;
        }
        // Far beyond the mean the probability is too small for a number.
        let phi = self.phi(at);
        phi.is_nan() || phi >= THRESHOLD || self.silence(at) >= AT_MOST
    }

    /// Mean and standard deviation of the interval between two beats.
    fn expected(&self) -> (f64, f64) {
        if self.intervals.len() < ENOUGH {
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

    /// After which silence it is suspected, in milliseconds.
    fn suspected_after(suspicion: &Suspicion, at: Mono) -> u64 {
        let after = (0..20_000).find(|millis| suspicion.is_suspect(at.after(Span::millis(*millis))));
        after.expect("every silence is suspected at some time")
    }

    #[test]
    fn a_regular_host_is_suspected_after_less_than_two_seconds_and_not_for_one_missed_beat() {
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
    fn time_in_which_no_one_listened_counts_for_nothing() {
        let (mut suspicion, at) = beaten(&[500; 60]);
        let later = at.after(Span::seconds(30));
        suspicion.deaf_for(later, Span::seconds(30));
        assert!(!suspicion.is_suspect(later));
        let before = suspicion.intervals.clone();
        suspicion.beat(later);
        assert_eq!(suspicion.intervals, before, "30 s are no interval between beats");
    }

    proptest! {
        /// The longer the silence the surer, and no beats whatever make it never suspected.
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
            prop_assert!(suspicion.is_suspect(at.after(AT_MOST)));
        }
    }
}

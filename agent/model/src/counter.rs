//! Growth of monotonic kernel counters, per reading and within a window. A counter that decreases was reset (its driver was reloaded)
//! or wrapped; its growth is then unknown and ignored.

use std::collections::VecDeque;

use crate::time::{Mono, Span};

/// The state of a counter.
#[derive(Clone, Debug, Default)]
pub struct Counter {
    last: Option<u64>,
    /// When it grew, and by how much.
    grew: VecDeque<(Mono, u64)>,
}

impl Counter {
    /// Records a reading and returns the growth since the last one: zero at the first and after a reset.
    pub fn step(&mut self, value: u64) -> u64 {
        let before = self.last.replace(value);
        before.map_or(0, |before| value.saturating_sub(before))
    }

    /// Adds growth to the window.
    pub fn count(&mut self, at: Mono, grown: u64) {
        if grown > 0 {
            self.grew.push_back((at, grown));
        }
    }

    /// The growth within `window` before `at`. Drops older growth.
    pub fn within(&mut self, at: Mono, window: Span) -> u64 {
        while self.grew.front().is_some_and(|(when, _)| at.since(*when) > window) {
            self.grew.pop_front();
        }
        self.grew.iter().fold(0, |sum, (_, grown)| sum.saturating_add(*grown))
    }

    /// The last reading.
    pub fn last(&self) -> Option<u64> {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_growth_counts() {
        let mut counter = Counter::default();
        let grown: Vec<u64> = [7, 7, 10, 2, 3, u64::MAX, 0].map(|value| counter.step(value)).into();
        assert_eq!(grown, [0, 0, 3, 0, 1, u64::MAX - 3, 0]);
        assert_eq!(counter.last(), Some(0));
    }

    #[test]
    fn a_window_forgets() {
        let mut counter = Counter::default();
        let at = |seconds: u64| Mono(seconds * 1_000_000_000);
        counter.count(at(10), 5);
        counter.count(at(20), u64::MAX);
        assert_eq!(counter.within(at(20), Span::seconds(10)), u64::MAX);
        assert_eq!(counter.within(at(31), Span::seconds(10)), 0);
    }
}

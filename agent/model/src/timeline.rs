//! A monotonic value with the times at which it was observed, such as the length of a file or the number of completed steps. Bounded:
//! old times are kept at a lower resolution than new ones.

use crate::time::{Mono, Span};

/// Maximum number of moments kept.
const MAX_MOMENTS: usize = 512;

/// The inverse of the initial resolution: moments closer together than 1/32 of their age are joined. The part is doubled until enough
/// are joined.
const FINEST: u64 = 32;

/// An observation of a new value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// The last observation of a smaller value.
    pub not_before: Mono,
    /// The time of the observation.
    pub at: Mono,
    /// The value observed.
    pub value: u64,
}

/// The moments of a value, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    moments: Vec<Moment>,
}

impl Timeline {
    /// Adds a moment. Ignores one that is earlier than the last, or whose value is not higher.
    pub fn push(&mut self, moment: Moment) {
        if self.moments.last().is_some_and(|last| moment.at < last.at || moment.value <= last.value) {
            return;
        }
        if self.moments.len() >= MAX_MOMENTS {
            self.thin_out();
        }
        self.moments.push(moment);
    }

    /// The first moment at which the value was at least `value`.
    pub fn reached(&self, value: u64) -> Option<Moment> {
        self.moments.get(self.moments.partition_point(|moment| moment.value < value)).copied()
    }

    /// The first moment at or after this time.
    pub fn since(&self, at: Mono) -> Option<Moment> {
        self.moments.get(self.moments.partition_point(|moment| moment.at < at)).copied()
    }

    /// The newest moment.
    pub fn last(&self) -> Option<Moment> {
        self.moments.last().copied()
    }

    /// Joins neighbours, more of them the older they are, until at most half are left. A joined moment keeps the last time and value
    /// and the first `not_before`, so that it stays correct.
    fn thin_out(&mut self) {
        let Some(now) = self.last().map(|last| last.at) else { return };
        let mut part = FINEST;
        while self.moments.len() > MAX_MOMENTS / 2 {
            self.join(now, part);
            // Joining all into one moment always suffices.
            part /= 2;
        }
    }

    fn join(&mut self, now: Mono, part: u64) {
        let mut kept: Vec<Moment> = Vec::with_capacity(MAX_MOMENTS);
        // Newest first: the age of a group's last moment limits the length of the group.
        for moment in self.moments.drain(..).rev() {
            match kept.last_mut() {
                Some(later) if is_close(*later, moment, now, part) => later.not_before = moment.not_before,
                _ => kept.push(moment),
            }
        }
        kept.reverse();
        self.moments = kept;
    }
}

fn is_close(later: Moment, moment: Moment, now: Mono, part: u64) -> bool {
    let age = now.since(later.at);
    part == 0 || later.at.since(moment.at) <= Span(age.0 / part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: u64 = 100_000_000;

    fn grown(looks: u64) -> Timeline {
        let mut timeline = Timeline::default();
        for look in 1..=looks {
            let at = Mono(look * EVERY);
            timeline.push(Moment { not_before: Mono((look - 1) * EVERY), at, value: look });
        }
        timeline
    }

    #[test]
    fn a_value_is_reached_at_its_first_observation() {
        let timeline = grown(10);
        let moment = timeline.reached(3).expect("reached");
        assert_eq!((moment.not_before, moment.at), (Mono(2 * EVERY), Mono(3 * EVERY)));
        assert_eq!(timeline.reached(11), None);
        assert_eq!(timeline.since(Mono(3 * EVERY + 1)).map(|moment| moment.value), Some(4));
        assert_eq!(timeline.since(Mono(10 * EVERY + 1)), None);
    }

    #[test]
    fn values_that_do_not_grow_are_ignored() {
        let mut timeline = grown(3);
        let before = timeline.clone();
        timeline.push(Moment { not_before: Mono(0), at: Mono(9 * EVERY), value: 3 });
        timeline.push(Moment { not_before: Mono(0), at: Mono(EVERY), value: 9 });
        assert_eq!(timeline, before);
    }

    #[test]
    fn memory_is_bounded_and_old_moments_stay_correct() {
        // A day of observations: recent ones are exact, and the error of older ones is bounded by a part of their age.
        let looks = 864_000;
        let timeline = grown(looks);
        assert!(timeline.moments.len() <= MAX_MOMENTS, "{}", timeline.moments.len());
        for look in [1, 2, 1000, looks / 2, looks - 36_000, looks - 600, looks - 5, looks] {
            let moment = timeline.reached(look).expect("reached");
            let exact = Mono(look * EVERY);
            assert!(moment.not_before < exact && exact <= moment.at, "{look}: {moment:?}");
            let (late, age) = (moment.at.since(exact).0, (looks - look) * EVERY);
            assert!(late <= age / 2, "{look}: {late} of {age}");
        }
        assert_eq!(timeline.reached(looks - 5).map(|moment| moment.at), Some(Mono((looks - 5) * EVERY)));
    }
}

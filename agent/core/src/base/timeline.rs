//! A value that only grows, with the times at which it was seen: how long a file was, how many steps were done. Bounded:
//! of old times fewer are kept than of new ones.

use crate::base::time::{Mono, Span};

/// At most so many moments are kept.
const MOST: usize = 512;

/// Of a moment's age, so large a part may lie between it and the next: one in so many. Doubled until enough have gone.
const FINEST: u64 = 32;

/// A look that found a new value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// The last look that had found less than what is new here.
    pub not_before: Mono,
    /// The look.
    pub at: Mono,
    /// What it found.
    pub value: u64,
}

/// The moments of one value, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    moments: Vec<Moment>,
}

impl Timeline {
    /// Adds a moment. One that is no later or no higher than the last is left out.
    pub fn push(&mut self, moment: Moment) {
        if self.moments.last().is_some_and(|last| moment.at < last.at || moment.value <= last.value) {
            return;
        }
        if self.moments.len() >= MOST {
            self.thin_out();
        }
        self.moments.push(moment);
    }

    /// The first moment at which the value was at least this.
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

    /// Joins neighbours, the more the older they are, until at most half is left. What is joined keeps its last time and value
    /// and the first `not_before`, so that it stays true.
    fn thin_out(&mut self) {
        let Some(now) = self.last().map(|last| last.at) else { return };
        let mut part = FINEST;
        while self.moments.len() > MOST / 2 {
            self.join(now, part);
            // One moment of all is always few enough.
            part /= 2;
        }
    }

    fn join(&mut self, now: Mono, part: u64) {
        let mut kept: Vec<Moment> = Vec::with_capacity(MOST);
        // From the newest on, for the age of a group's last moment decides how long the group may be.
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
    fn a_value_was_reached_at_the_first_look_that_found_it() {
        let timeline = grown(10);
        let moment = timeline.reached(3).expect("reached");
        assert_eq!((moment.not_before, moment.at), (Mono(2 * EVERY), Mono(3 * EVERY)));
        assert_eq!(timeline.reached(11), None);
        assert_eq!(timeline.since(Mono(3 * EVERY + 1)).map(|moment| moment.value), Some(4));
        assert_eq!(timeline.since(Mono(10 * EVERY + 1)), None);
    }

    #[test]
    fn what_does_not_grow_is_left_out() {
        let mut timeline = grown(3);
        let before = timeline.clone();
        timeline.push(Moment { not_before: Mono(0), at: Mono(9 * EVERY), value: 3 });
        timeline.push(Moment { not_before: Mono(0), at: Mono(EVERY), value: 9 });
        assert_eq!(timeline, before);
    }

    #[test]
    fn days_take_no_more_room_than_minutes_and_stay_true() {
        // A day of looks; the last seconds stay as they are, and what is older is known to a part of its age.
        let looks = 864_000;
        let timeline = grown(looks);
        assert!(timeline.moments.len() <= MOST, "{}", timeline.moments.len());
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

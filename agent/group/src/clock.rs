//! Converts times between a follower's clock and the leader's. Both clocks are monotonic and count from the boot of
//! their host, so only the difference between them matters. A round trip measures it with an uncertainty of half its
//! length.

use mainstay_model::entry::Fact;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::Event;

/// The number of round trips that are kept; the shortest one counts. Clocks drift by some microseconds per second, so
/// old ones expire.
const MAX_SAMPLES: usize = 32;

/// The leader's clock, as measured by round trips.
#[derive(Clone, Debug, Default)]
pub struct Mapping {
    trips: std::collections::VecDeque<Trip>,
}

#[derive(Clone, Copy, Debug)]
struct Trip {
    /// Leader's clock minus ours, in nanoseconds.
    offset: i128,
    length: Span,
}

impl Mapping {
    /// Records a round trip: the local time of the request, the leader's time, and the local time of the answer.
    pub fn round_trip(&mut self, sent: Mono, leader: Mono, received: Mono) {
        if received < sent {
            return;
        }
        let middle = i128::from(sent.0) + i128::from(received.since(sent).0 / 2);
        if self.trips.len() == MAX_SAMPLES {
            self.trips.pop_front();
        }
        self.trips.push_back(Trip { offset: i128::from(leader.0) - middle, length: received.since(sent) });
    }

    fn best(&self) -> Option<&Trip> {
        self.trips.iter().min_by_key(|trip| trip.length)
    }

    /// The uncertainty of a converted time. `None` before the first round trip.
    pub fn uncertainty(&self) -> Option<Span> {
        self.best().map(|trip| Span(trip.length.0.div_ceil(2)))
    }

    /// Converts a local time to the leader's clock.
    pub fn to_leader(&self, at: Mono) -> Mono {
        shifted(at, self.best().map_or(0, |trip| trip.offset))
    }

    /// Converts a leader's time to the local clock.
    pub fn from_leader(&self, at: Mono) -> Mono {
        shifted(at, self.best().map_or(0, |trip| -trip.offset))
    }

    /// Converts all times of an event to the leader's clock.
    pub fn event(&self, event: Event) -> Event {
        match event {
            Event::Fact(fact) => Event::Fact(times(fact, &|at| self.to_leader(at))),
            Event::Steps { attempt, mut ranks } => {
                for step in ranks.iter_mut().flat_map(|(_, done)| done) {
                    (step.start, step.end) = (self.to_leader(step.start), self.to_leader(step.end));
                }
                Event::Steps { attempt, ranks }
            }
            other => other,
        }
    }
}

/// 0 means "no time" in many places, and so does [`Mono::NEVER`].
fn shifted(at: Mono, offset: i128) -> Mono {
    if at == Mono(0) || at == Mono::NEVER {
        return at;
    }
    let moved = (i128::from(at.0) + offset).clamp(1, i128::from(u64::MAX - 1));
    Mono(u64::try_from(moved).unwrap_or(1))
}

/// The fact with each of its times replaced.
pub fn times(fact: Fact, at: &dyn Fn(Mono) -> Mono) -> Fact {
    match fact {
        Fact::RankRaised { attempt, rank, pid, mut note, data } => {
            note.at = at(note.at);
            Fact::RankRaised { attempt, rank, pid, note, data }
        }
        Fact::RanksHung { attempt, mut hang, acts } => {
            hang.since = at(hang.since);
            hang.confirmed = at(hang.confirmed);
            Fact::RanksHung { attempt, hang, acts }
        }
        Fact::RankExited {
            attempt,
            rank,
            pid,
            status,
            step,
            data,
            after_stop,
            stderr_tail,
            stdout_tail,
            mut stderr_times,
            mut stdout_times,
        } => {
            stderr_times.iter_mut().chain(&mut stdout_times).for_each(|line| line.at = at(line.at));
            Fact::RankExited {
                attempt,
                rank,
                pid,
                status,
                step,
                data,
                after_stop,
                stderr_tail,
                stdout_tail,
                stderr_times,
                stdout_times,
            }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// For any offset and any asymmetry of the two ways, the truth is within the stated uncertainty.
        #[test]
        fn the_truth_is_within_the_stated_uncertainty(
            offset in -1_000_000_000_000i64..1_000_000_000_000,
            ways in proptest::collection::vec((0u64..50_000_000, 0u64..50_000_000), 1..40),
        ) {
            let mut mapping = Mapping::default();
            let mut now = 2_000_000_000_000u64;
            let leader = |at: u64| u64::try_from(i128::from(at) + i128::from(offset)).expect("in range");
            for (there, back) in ways {
                mapping.round_trip(Mono(now), Mono(leader(now + there)), Mono(now + there + back));
                now += there + back + 1_000;
            }
            let (stated, truth) = (mapping.to_leader(Mono(now)).0, leader(now));
            let uncertainty = mapping.uncertainty().expect("there were round trips").0;
            prop_assert!(stated.abs_diff(truth) <= uncertainty + 1, "{stated} {truth} {uncertainty}");
            prop_assert!(mapping.from_leader(mapping.to_leader(Mono(now))).0.abs_diff(now) <= 1);
        }
    }

    #[test]
    fn a_time_that_means_none_is_not_converted() {
        let mut mapping = Mapping::default();
        mapping.round_trip(Mono(10), Mono(1_000), Mono(20));
        assert_eq!((mapping.to_leader(Mono(0)), mapping.to_leader(Mono::NEVER)), (Mono(0), Mono::NEVER));
    }
}

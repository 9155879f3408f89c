//! Hysteresis: one reading beyond a limit is not a verdict yet, and one good reading does not clear a verdict.

use crate::state::Hysteresis;
use mainstay_model::health::HealthState;

/// The severity of a reading: by the limits, and by the stricter limits for recovery.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Level {
    pub(super) raw: HealthState,
    pub(super) eased: HealthState,
}

/// The state of one check.
#[derive(Clone, Debug)]
pub(super) struct Latch {
    state: HealthState,
    /// Readings in a row that were worse than the state, and the least severe of them.
    worse: Option<(u32, HealthState)>,
    /// Readings in a row that were better than the state, and the most severe of them.
    better: Option<(u32, HealthState)>,
}

impl Default for Latch {
    fn default() -> Latch {
        Latch { state: HealthState::Healthy, worse: None, better: None }
    }
}

impl Latch {
    /// Processes a reading and returns the new state.
    pub(super) fn step(&mut self, level: Level, patience: Hysteresis) -> HealthState {
        if level.raw > self.state {
            self.better = None;
            let (count, mildest) =
                self.worse.map_or((1, level.raw), |(n, state)| (n + 1, state.min(level.raw)));
            self.worse = Some((count, mildest));
            if count >= patience.worsen_after {
                *self = Latch { state: mildest, worse: None, better: None };
            }
        } else if level.eased < self.state {
            self.worse = None;
            let (count, heaviest) =
                self.better.map_or((1, level.eased), |(n, state)| (n + 1, state.max(level.eased)));
            self.better = Some((count, heaviest));
            if count >= patience.recover_after {
                *self = Latch { state: heaviest, worse: None, better: None };
            }
        } else {
            (self.worse, self.better) = (None, None);
        }
        self.state
    }
}

/// Whether a required reading is available, and has been for long enough to count again.
#[derive(Clone, Debug, Default)]
pub(super) struct Presence {
    to_go: u32,
}

impl Presence {
    /// Notes whether a reading is available. Returns how many more are needed; 0 if it counts.
    pub(super) fn step(&mut self, there: bool, patience: Hysteresis) -> u32 {
        self.to_go = if there { self.to_go.saturating_sub(1) } else { patience.recover_after };
        self.to_go
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use HealthState::{Degraded, Healthy, Unhealthy};

    const PATIENCE: Hysteresis = Hysteresis { worsen_after: 3, recover_after: 2 };

    /// H, D and U are readings with the same state by both limits; d is within the margin below D.
    fn check(readings: &str, states: &str) {
        let mut latch = Latch::default();
        let seen: String = readings
            .chars()
            .map(|reading| match reading {
                'H' => Level { raw: Healthy, eased: Healthy },
                'd' => Level { raw: Healthy, eased: Degraded },
                'D' => Level { raw: Degraded, eased: Degraded },
                _ => Level { raw: Unhealthy, eased: Unhealthy },
            })
            .map(|level| match latch.step(level, PATIENCE) {
                Healthy => 'H',
                Degraded => 'D',
                _ => 'U',
            })
            .collect();
        assert_eq!(seen, states, "after {readings}");
    }

    #[test]
    fn changes_take_several_readings_in_a_row() {
        check("HDDH", "HHHH");
        check("DDD", "HHD");
        check("DDHDD", "HHHHH");
        check("DDDHDH", "HHDDDD");
        check("DDDHH", "HHDDH");
    }

    #[test]
    fn a_streak_counts_as_its_mildest_reading() {
        check("UDU", "HHD");
        check("UDUUUU", "HHDDDU");
        check("UUUDHH", "HHUUDD");
    }

    #[test]
    fn within_the_margin_nothing_gets_better() {
        check("DDDdddddd", "HHDDDDDDD");
        check("ddddddddd", "HHHHHHHHH");
    }
}

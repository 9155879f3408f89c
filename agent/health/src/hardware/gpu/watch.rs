//! Hysteresis: a reading beyond a limit counts after several readings in a row and is cleared after several healthy
//! ones. A value that was not read changes nothing.

use std::collections::VecDeque;

use crate::state::Hysteresis;
use mainstay_model::health::{Evidence, HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};

/// One problem.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Problem {
    pub(super) state: HealthState,
    pub(super) reason: String,
    pub(super) action: RecommendedAction,
    pub(super) evidence: Vec<Evidence>,
    /// Confidence from 0 to 1: 1 if hardware or driver report the problem themselves.
    pub(super) confidence: f64,
}

impl Problem {
    pub(super) fn new(state: HealthState, reason: impl Into<String>, action: RecommendedAction) -> Problem {
        Problem { state, reason: reason.into(), action, evidence: Vec::new(), confidence: 1.0 }
    }

    /// With the confidence of an inference.
    pub(super) fn sure(self, confidence: f64) -> Problem {
        Problem { confidence, ..self }
    }

    /// With the reading that it is based on.
    pub(super) fn by(mut self, source: &str, reading: impl ToString, limit: impl ToString) -> Problem {
        self.evidence.push(Evidence::new(source, reading).limit(limit));
        self
    }

    /// With the previous reading of its last evidence.
    pub(super) fn was(mut self, before: Option<impl ToString>) -> Problem {
        if let Some(last) = self.evidence.pop() {
            self.evidence.push(last.before(before));
        }
        self
    }

    /// Keeps the reading from before the problem started: later readings of the same problem do not change.
    fn keeps_what_was_before(mut self, earlier: &Problem) -> Problem {
        for evidence in self.evidence.iter_mut().filter(|evidence| evidence.before.is_none()) {
            let same = earlier.evidence.iter().find(|old| old.source == evidence.source);
            evidence.before =
                same.and_then(|old| old.before.clone()).filter(|before| *before != evidence.reading);
        }
        self
    }

    /// With the increase of a counter.
    pub(super) fn gained(self, source: &str, grown: &Grown, limit: impl ToString) -> Problem {
        let mut problem = self.by(source, format!("{} within {}", grown.to, grown.within), limit);
        if let Some(evidence) = problem.evidence.last_mut() {
            evidence.before = Some(grown.from.to_string());
        }
        problem
    }
}

/// The result of one check of one reading.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum CheckResult {
    /// Healthy.
    Healthy,
    /// Faulty.
    Faulty(Problem),
    /// Healthy, but too near the limit to clear a finding.
    NearLimit,
    /// Not read, or cannot be judged now.
    Unread,
    /// Nothing to judge: an earlier finding no longer applies.
    NotApplicable,
}

impl CheckResult {
    /// Healthy if there is no problem.
    pub(super) fn from_problem(problem: Option<Problem>) -> CheckResult {
        problem.map_or(CheckResult::Healthy, CheckResult::Faulty)
    }

    /// A healthy value near its limit: a value that swings around the limit is reported once.
    pub(super) fn unless_near(self, near: bool) -> CheckResult {
        if near && self == CheckResult::Healthy { CheckResult::NearLimit } else { self }
    }
}

/// How a check changed at a reading.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Change {
    None,
    Began(Problem),
    Ended(Problem),
}

/// One check over time.
#[derive(Clone, Debug, Default)]
pub(super) struct Watch {
    bad_readings: u32,
    well: u32,
    problem: Option<Problem>,
    /// The last problem, whether it counts yet or not.
    last: Option<Problem>,
    /// The finding is not cleared before this time.
    until: Mono,
}

impl Watch {
    pub(super) fn problem(&self) -> Option<&Problem> {
        self.problem.as_ref()
    }

    /// Restores a finding from before a restart: it lasts until readings clear it.
    pub(super) fn hold(&mut self, problem: Problem, until: Mono) {
        self.last = Some(problem.clone());
        self.problem = Some(problem);
        self.until = until;
    }

    /// Like `step` at a time: a finding that counts for a fixed time is not cleared before.
    pub(super) fn step_at(&mut self, at: Mono, look: CheckResult, patience: Hysteresis) -> Change {
        let stands = look == CheckResult::Healthy && self.problem.is_some() && at < self.until;
        self.step(if stands { CheckResult::Unread } else { look }, patience)
    }

    pub(super) fn step(&mut self, look: CheckResult, patience: Hysteresis) -> Change {
        match look {
            CheckResult::Unread => Change::None,
            CheckResult::NearLimit => {
                (self.bad_readings, self.well) = (0, 0);
                if self.problem.is_none() {
                    self.last = None;
                }
                Change::None
            }
            CheckResult::NotApplicable => {
                let held = std::mem::take(self).problem;
                held.map_or(Change::None, Change::Ended)
            }
            CheckResult::Healthy => {
                self.bad_readings = 0;
                self.well = self.well.saturating_add(1);
                let over = self.problem.take_if(|_| self.well >= patience.recover_after);
                if self.problem.is_none() {
                    self.last = None;
                }
                match over {
                    Some(over) => Change::Ended(over),
                    None => Change::None,
                }
            }
            CheckResult::Faulty(problem) => {
                self.well = 0;
                self.bad_readings = self.bad_readings.saturating_add(1);
                let problem = match &self.last {
                    Some(earlier) => problem.keeps_what_was_before(earlier),
                    None => problem,
                };
                self.last = Some(problem.clone());
                if self.problem.is_none() && self.bad_readings < patience.worsen_after {
                    return Change::None;
                }
                let began = self.problem.is_none();
                self.problem = Some(problem.clone());
                if began { Change::Began(problem) } else { Change::None }
            }
        }
    }
}

/// The increase of a counter within a window. A counter that falls has restarted.
#[derive(Clone, Debug, Default)]
pub(super) struct Growth {
    /// Times and counts, oldest first.
    points: VecDeque<(Mono, u64)>,
}

/// How a counter changed within a window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Grown {
    pub(super) by: u64,
    /// First and last count.
    pub(super) from: u64,
    pub(super) to: u64,
    /// The largest increase between two readings: a single jump is a past event.
    pub(super) jump: u64,
    pub(super) within: Span,
}

impl Grown {
    pub(super) fn per_minute(&self) -> f64 {
        // Less than a minute is not enough for a rate per minute.
        self.by as f64 / (self.within.as_seconds() / 60.0).max(1.0)
    }

    /// Whether the increase continues, rather than being a single jump.
    pub(super) fn goes_on(&self) -> bool {
        let beside = self.by.saturating_sub(self.jump);
        beside > 0 && beside >= self.jump / 4
    }
}

impl Growth {
    pub(super) fn step(&mut self, at: Mono, count: u64, window: Span) -> Grown {
        if self.points.back().is_some_and(|(_, before)| count < *before) {
            self.points.clear();
        }
        self.points.push_back((at, count));
        // The oldest point is the newest one that is at least a window old.
        while self.points.get(1).is_some_and(|(second, _)| at.since(*second) >= window) {
            self.points.pop_front();
        }
        let Some((since, from)) = self.points.front().copied() else { return Grown::default() };
        let pairs = self.points.iter().zip(self.points.iter().skip(1));
        let jump = pairs.map(|(before, after)| after.1.saturating_sub(before.1)).max().unwrap_or(0);
        Grown { by: count - from, from, to: count, jump, within: at.since(since) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Hysteresis = Hysteresis { worsen_after: 2, recover_after: 2 };

    /// i: faulty, w: healthy, n: healthy and near the limit, u: unread, a: absent; X: held.
    fn check(readings: &str, held: &str) {
        let mut watch = Watch::default();
        let seen: String = readings
            .chars()
            .map(|reading| {
                let bad_readings = Problem::new(HealthState::Degraded, "it", RecommendedAction::None);
                watch.step(
                    match reading {
                        'i' => CheckResult::Faulty(bad_readings),
                        'w' => CheckResult::Healthy,
                        'n' => CheckResult::Healthy.unless_near(true),
                        'a' => CheckResult::NotApplicable,
                        _ => CheckResult::Unread,
                    },
                    PATIENCE,
                );
                if watch.problem().is_some() { 'X' } else { '-' }
            })
            .collect();
        assert_eq!(seen, held, "after {readings}");
    }

    #[test]
    fn findings_start_and_end_after_several_readings_and_unread_values_change_nothing() {
        check("iwiwiw", "------");
        check("iiwiww", "-XXXX-");
        check("iuiuuuwuw", "--XXXXXX-");
        check("iia", "-X-");
    }

    #[test]
    fn a_value_that_swings_around_its_limit_is_reported_once() {
        check("iinninnwnwnww", "-XXXXXXXXXXX-");
        check("ininin", "------");
    }

    #[test]
    fn growth_is_counted_within_the_window_and_a_single_jump_does_not_go_on() {
        let minute = Span::seconds(60);
        let mut growth = Growth::default();
        assert_eq!(growth.step(Mono(0), 500, minute).by, 0);
        let jump = growth.step(Mono(30_000_000_000), 900, minute);
        assert_eq!((jump.by, jump.goes_on(), jump.per_minute()), (400, false, 400.0));
        let more = growth.step(Mono(60_000_000_000), 901, minute);
        assert_eq!((more.by, more.goes_on()), (401, false), "a jump over what is usual");
        let again = growth.clone().step(Mono(75_000_000_000), 1101, minute);
        assert_eq!((again.by, again.goes_on()), (601, true));
        assert_eq!(growth.step(Mono(120_000_000_000), 901, minute).by, 0);
        assert_eq!(growth.step(Mono(130_000_000_000), 3, minute).by, 0, "it began anew");
    }
}

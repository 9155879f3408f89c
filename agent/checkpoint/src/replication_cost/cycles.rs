//! Measures the cost of replication that runs most of the time: compares cycles from one save to the next, with and
//! without replication.
//!
//! Steps soon after a save take longer by themselves, because the save is checked and written, and replication runs at
//! the same time. So steps with replication are not comparable with the other steps of the same cycle. Instead, a
//! replica is left out from time to time, and its cycle is compared with the ones just before and after it. That also
//! cancels drift in the speed of the machine.

use std::collections::VecDeque;

use super::{StepTime, median};
use mainstay_model::time::{Mono, Span};

/// Number of remembered cycles, however long they took: drift of the machine's speed does not affect the comparison.
const MAX_CYCLES: usize = 640;

/// A cycle is without replication if its share of replication is below the first limit, and with it above the second.
const MAX_SHARE_WITHOUT: f64 = 0.05;
const MIN_SHARE_WITH: f64 = 0.3;

/// Maximum distance of two cycles that are compared.
const MAX_CYCLE_DISTANCE: usize = 4;

/// A cost needs this many comparisons.
const MIN_COMPARISONS: usize = 6;

/// One replica in this many is left out, while there are too few comparisons and after that: at least 95 % of the saves
/// should be replicated.
const SKIP_EVERY_FIRST: u64 = 4;
const SKIP_EVERY: u64 = 32;

/// Maximum number of replicas in a row that are left out until a cycle is without replication: an earlier transfer may
/// extend into a cycle, and steps are reported up to a second late.
const MAX_SKIPPED_IN_A_ROW: u32 = 6;

/// Allowance for late reports of steps. A replica that was left out is sent if the job does not save again within this
/// time plus twice the time between its last two saves.
const MAX_REPORT_DELAY: Span = Span::seconds(2);

/// The cycles of a job.
#[derive(Clone, Debug, Default)]
pub(super) struct Cycles {
    /// The current one.
    now: Option<Cycle>,
    /// The earlier ones, the newest last.
    before: VecDeque<Cycle>,
    /// Number of cycles since the last one without replication, and how many in a row were without it then.
    since: u64,
    without: u64,
    /// Number of cycles in a row for which the replica was left out.
    left_out: u32,
}

/// The steps from one save to the next, without the steps that save.
#[derive(Clone, Copy, Debug, Default)]
struct Cycle {
    end: Mono,
    steps: f64,
    took_s: f64,
    replicating_s: f64,
}

impl Cycle {
    fn step_s(&self) -> f64 {
        self.took_s / self.steps
    }

    fn share(&self) -> f64 {
        self.replicating_s / self.took_s
    }

    /// Whether it is with replication; `None` if its share is between the limits.
    fn is_with(&self) -> Option<bool> {
        match self.share() {
            share if share < MAX_SHARE_WITHOUT => Some(false),
            share if share > MIN_SHARE_WITH => Some(true),
            _ => None,
        }
    }
}

impl Cycles {
    /// Records a step during which this host replicated for `replicating`.
    pub(super) fn stepped(&mut self, step: StepTime, replicating: Span) {
        if step.saving > Span::default() {
            if let Some(cycle) = self.now.replace(Cycle::default()).filter(|cycle| cycle.took_s > 0.0) {
                self.ended(cycle);
            }
            return;
        }
        let usual = self.before.back().map_or(f64::INFINITY, Cycle::step_s);
        let Some(cycle) = &mut self.now else { return };
        // An evaluation or a pause is not a cost of replication.
        let took_s = step.end.since(step.start).as_seconds();
        let counted_s = took_s.min(2.0 * usual);
        if took_s > 0.0 {
            cycle.end = step.end;
            cycle.steps += 1.0;
            cycle.took_s += counted_s;
            cycle.replicating_s += replicating.as_seconds() * counted_s / took_s;
        }
    }

    fn ended(&mut self, cycle: Cycle) {
        if self.before.len() >= MAX_CYCLES {
            self.before.pop_front();
        }
        let is_without = cycle.is_with() == Some(false);
        self.before.push_back(cycle);
        (self.since, self.without) = match (is_without, self.since) {
            (false, since) => (since + 1, self.without),
            (true, 0) => (0, self.without + 1),
            (true, _) => (0, 1),
        };
        let goes_on = self.left_out > 0 && !is_without && self.left_out < MAX_SKIPPED_IN_A_ROW;
        let starts = self.left_out == 0 && self.since >= self.every() && self.is_dense();
        self.left_out = if goes_on || starts { self.left_out + 1 } else { 0 };
    }

    /// Whether the replica of this cycle is left out.
    pub(super) fn leaves_out(&self, now: Mono) -> bool {
        let mut newest = self.before.iter().rev().map(|cycle| cycle.end);
        let (Some(last), Some(one_before)) = (newest.next(), newest.next()) else { return false };
        let apart = last.since(one_before);
        self.left_out > 0 && now.since(last) < apart.plus(apart).plus(MAX_REPORT_DELAY)
    }

    /// Cycles from one measurement to the next. Varies, so that other work every N saves does not look like a cost.
    fn every(&self) -> u64 {
        let every =
            if self.comparisons().len() < 2 * MIN_COMPARISONS { SKIP_EVERY_FIRST } else { SKIP_EVERY };
        let newest = self.before.back().map_or(0, |cycle| cycle.end.0);
        let every = every * self.without.clamp(1, MAX_SKIPPED_IN_A_ROW.into());
        every - every / 4 + newest.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (every / 2)
    }

    /// Whether replication runs most of the time. If not, comparing the steps of one cycle is sufficient.
    fn is_dense(&self) -> bool {
        let newest = self.before.iter().rev().take(MAX_CYCLE_DISTANCE);
        newest.clone().count() == MAX_CYCLE_DISTANCE
            && newest.filter(|cycle| cycle.is_with() == Some(true)).count() > MAX_CYCLE_DISTANCE / 2
    }

    /// The cost of a second of replication, in seconds of training, and its standard error; `None` without enough data.
    pub(super) fn measured(&self) -> Option<(f64, f64)> {
        let all = self.comparisons();
        if all.len() < MIN_COMPARISONS {
            return None;
        }
        let count = all.len() as f64;
        let cost = median(all.clone());
        let deviation = 1.4826 * median(all.into_iter().map(|one| (one - cost).abs()).collect());
        // The standard error of a median.
        Some((cost, 1.2533 * deviation / count.sqrt()))
    }

    /// Compares each cycle of the rarer kind with the nearest ones of the other kind before and after it.
    fn comparisons(&self) -> Vec<f64> {
        let kinds: Vec<Option<bool>> = self.before.iter().map(Cycle::is_with).collect();
        let with = kinds.iter().filter(|kind| **kind == Some(true)).count();
        let without = kinds.iter().filter(|kind| **kind == Some(false)).count();
        let rarer = with < without;
        let of_rarer = kinds.iter().enumerate().filter(|(_, kind)| **kind == Some(rarer)).map(|(at, _)| at);
        let compared = of_rarer.filter_map(|at| {
            let is_other = |at: &usize| kinds.get(*at).copied().flatten() == Some(!rarer);
            let before = (at.saturating_sub(MAX_CYCLE_DISTANCE)..at).rev().find(is_other)?;
            let after = (at + 1..=at + MAX_CYCLE_DISTANCE).find(is_other)?;
            let (one, two, other) = (self.before.get(before)?, self.before.get(after)?, self.before.get(at)?);
            let beside = ((one.step_s() + two.step_s()) / 2.0, (one.share() + two.share()) / 2.0);
            let itself = (other.step_s(), other.share());
            let (with, without) = if rarer { (itself, beside) } else { (beside, itself) };
            Some((with.0 / without.0 - 1.0) / (with.1 - without.1))
        });
        compared.collect()
    }
}

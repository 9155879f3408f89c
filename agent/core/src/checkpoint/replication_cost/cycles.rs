//! The price of replicas where they go on most of the time: cycles from one save to the next, those with replicas against those without.
//!
//! Steps soon after a save take longer by themselves, for what was saved is checked and written, and replicas go at that time. So steps
//! with replicas cannot be compared with the others of the same cycle. Now and then a replica is left out, and its cycle is compared with
//! the ones just before and after it, which also takes off what a machine is faster or slower in one minute than in the next.

use std::collections::VecDeque;

use super::{StepTime, median};
use crate::base::time::{Mono, Span};

/// Cycles that are remembered, however long they took: what a machine is slower or faster meanwhile does not count.
const MOST: usize = 640;

/// A cycle of which less than the one share went by with replicas is without, of which more than the other is with them.
const WITHOUT: f64 = 0.05;
const WITH: f64 = 0.3;

/// Cycles are compared that are no further apart.
const APART: usize = 4;

/// So many comparisons tell a price.
const ENOUGH: usize = 6;

/// One replica in so many is left out, while there are too few comparisons and after that: at least 95 % of the saves are to be copied.
const LEFT_OUT_FIRST: u64 = 4;
const LEFT_OUT: u64 = 32;

/// A replica of before may reach into a cycle, and steps are told of up to a second later: so many cycles may pass until one is without.
const MOST_AT_A_TIME: u32 = 6;

/// A job that does not save again within twice the time between its last two saves, and what steps may be told of later, gets its replica.
const REPORTED_LATE: Span = Span::seconds(2);

/// The cycles of a job.
#[derive(Clone, Debug, Default)]
pub(super) struct Cycles {
    /// The one that goes on.
    now: Option<Cycle>,
    /// Those before, the newest last.
    before: VecDeque<Cycle>,
    /// How many came since one was without a replica, and how many were so at that time.
    since: u64,
    without: u64,
    /// For how many a replica has been left out.
    left_out: u32,
}

/// The steps from one save to the next; those that save are none of it.
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

    /// Whether it is with replicas; none if it is neither with nor without.
    fn is_with(&self) -> Option<bool> {
        match self.share() {
            share if share < WITHOUT => Some(false),
            share if share > WITH => Some(true),
            _ => None,
        }
    }
}

impl Cycles {
    /// Sees a step that went by with `replicating` of its time spent on replicas.
    pub(super) fn stepped(&mut self, step: StepTime, replicating: Span) {
        if step.saving > Span::default() {
            if let Some(cycle) = self.now.replace(Cycle::default()).filter(|cycle| cycle.took_s > 0.0) {
                self.ended(cycle);
            }
            return;
        }
        let usual = self.before.back().map_or(f64::INFINITY, Cycle::step_s);
        let Some(cycle) = &mut self.now else { return };
        // An evaluation or a pause is no price of replicas.
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
        if self.before.len() >= MOST {
            self.before.pop_front();
        }
        let is_without = cycle.is_with() == Some(false);
        self.before.push_back(cycle);
        (self.since, self.without) = match (is_without, self.since) {
            (false, since) => (since + 1, self.without),
            (true, 0) => (0, self.without + 1),
            (true, _) => (0, 1),
        };
        let goes_on = self.left_out > 0 && !is_without && self.left_out < MOST_AT_A_TIME;
        let starts = self.left_out == 0 && self.since >= self.every() && self.is_dense();
        self.left_out = if goes_on || starts { self.left_out + 1 } else { 0 };
    }

    /// Whether the replica of this cycle is left out.
    pub(super) fn leaves_out(&self, now: Mono) -> bool {
        let mut newest = self.before.iter().rev().map(|cycle| cycle.end);
        let (Some(last), Some(one_before)) = (newest.next(), newest.next()) else { return false };
        let apart = last.since(one_before);
        self.left_out > 0 && now.since(last) < apart.plus(apart).plus(REPORTED_LATE)
    }

    /// Not always the same number: whatever else a job does at each so many saves must not look like a price.
    fn every(&self) -> u64 {
        let every = if self.comparisons().len() < 2 * ENOUGH { LEFT_OUT_FIRST } else { LEFT_OUT };
        let newest = self.before.back().map_or(0, |cycle| cycle.end.0);
        let every = every * self.without.clamp(1, MOST_AT_A_TIME.into());
        every - every / 4 + newest.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (every / 2)
    }

    /// Whether replicas go on most of the time. Where they do not, the steps of one cycle tell enough.
    fn is_dense(&self) -> bool {
        let newest = self.before.iter().rev().take(APART);
        newest.clone().count() == APART
            && newest.filter(|cycle| cycle.is_with() == Some(true)).count() > APART / 2
    }

    /// What a second of replicating costs, in seconds of training, and the standard error of that; none where too little is known.
    pub(super) fn measured(&self) -> Option<(f64, f64)> {
        let all = self.comparisons();
        if all.len() < ENOUGH {
            return None;
        }
        let count = all.len() as f64;
        let price = median(all.clone());
        let deviation = 1.4826 * median(all.into_iter().map(|one| (one - price).abs()).collect());
        // The error of a median.
        Some((price, 1.2533 * deviation / count.sqrt()))
    }

    /// Each cycle of the kind of which there are fewer, against the nearest of the other kind before and after it.
    fn comparisons(&self) -> Vec<f64> {
        let kinds: Vec<Option<bool>> = self.before.iter().map(Cycle::is_with).collect();
        let with = kinds.iter().filter(|kind| **kind == Some(true)).count();
        let without = kinds.iter().filter(|kind| **kind == Some(false)).count();
        let rarer = with < without;
        let of_rarer = kinds.iter().enumerate().filter(|(_, kind)| **kind == Some(rarer)).map(|(at, _)| at);
        let compared = of_rarer.filter_map(|at| {
            let is_other = |at: &usize| kinds.get(*at).copied().flatten() == Some(!rarer);
            let before = (at.saturating_sub(APART)..at).rev().find(is_other)?;
            let after = (at + 1..=at + APART).find(is_other)?;
            let (one, two, other) = (self.before.get(before)?, self.before.get(after)?, self.before.get(at)?);
            let beside = ((one.step_s() + two.step_s()) / 2.0, (one.share() + two.share()) / 2.0);
            let itself = (other.step_s(), other.share());
            let (with, without) = if rarer { (itself, beside) } else { (beside, itself) };
            Some((with.0 / without.0 - 1.0) / (with.1 - without.1))
        });
        compared.collect()
    }
}

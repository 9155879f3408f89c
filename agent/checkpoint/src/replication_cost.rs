//! Measures what replication costs training and limits it to the allowed share.
//!
//! If replication runs most of the time, whole cycles from save to save are compared ([`cycles`]). Otherwise, steps
//! during which this host replicates are compared with steps during which it does not. The cost is the additional step
//! time per second of replication. It counts only as far as it exceeds the noise, so that a host with varying steps and
//! replicas that cost nothing delays no replica.
//!
//! A budget grows with each step and is spent at that cost. On average, training loses no more than the allowed share,
//! and transfers still run at full speed. A newer step replaces a replica that waits. All ranks of a job wait for each
//! other, so the steps of this host also show the cost of replication on other hosts.

mod cycles;

use std::collections::VecDeque;

use self::cycles::Cycles;
use mainstay_model::time::{Mono, Span};

/// Number of remembered steps of each kind, without and with replication.
const MAX_QUIET_STEPS: usize = 128;
const MAX_REPLICATING_STEPS: usize = 256;

/// A cost needs this many steps without and with replication.
const MIN_STEPS: usize = 8;

/// After this many steps with replication and too few without, replication pauses until there are enough to compare...
const PAUSE_AFTER_STEPS: usize = 64;

/// ...but for at most this long, and not again for ten times as long.
const MAX_PAUSE: Span = Span::seconds(30);
const PAUSE_INTERVAL: Span = Span::seconds(330);

/// Limits of the additional time of a step, as a share of the usual step time: evaluations and pauses are not a cost of
/// replication.
const MAX_COST: f64 = 1.0;
const MIN_COST: f64 = -0.5;

/// Older steps are dropped: the time of a step changes.
const STEP_WINDOW: Span = Span::seconds(300);

/// Limit of the budget: the allowed share of this many seconds. It bounds the burst after a pause.
const SAVED_UP_S: f64 = 60.0;

/// Training has stopped or ended if no step completed for this time plus three times the duration of the last one:
/// steps are reported once a second.
const STOPPED_AFTER: Span = Span::seconds(3);

/// Maximum wait of a replica, however high the cost: an old replica is better than none, and the measurement may be
/// wrong.
const MAX_WAIT: Span = Span::seconds(600);

/// A step of a rank of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTime {
    /// When it started.
    pub start: Mono,
    /// When it was complete.
    pub end: Mono,
    /// The part of it that was spent saving.
    pub saving: Span,
}

/// Why a replica waits, the more important reason first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DelayReason {
    /// The budget is spent.
    Spent,
    /// The measurement needs steps without replication to compare with.
    Measurement,
}

/// The cost of replication, and the rest of the budget.
#[derive(Clone, Debug)]
pub struct ReplicationCost {
    /// The share of training time that replication may cost; 0: no limit.
    allowed: f64,
    /// Steps that save nothing, and steps that save: they are not comparable.
    kinds: [Kind; 2],
    /// The same steps, grouped into cycles from one save to the next.
    cycles: Cycles,
    /// The budget: seconds of training that may be spent.
    left_s: f64,
    held_since: Option<Mono>,
    /// When the newest step was complete, and its duration.
    newest: Option<(Mono, Span)>,
    rest_since: Option<Mono>,
}

#[derive(Clone, Debug, Default)]
struct Kind {
    /// When each was complete, and its duration in seconds.
    quiet: VecDeque<(Mono, f64)>,
    /// When each was complete, its additional time over a quiet step, and its time with replication, in seconds.
    beside: VecDeque<(Mono, f64, f64)>,
}

impl ReplicationCost {
    /// Replication may cost the share `allowed` of training time, 0.01 for 1 %; 0: no limit.
    pub fn new(allowed: f64) -> ReplicationCost {
        let kinds = Default::default();
        let cycles = Cycles::default();
        ReplicationCost {
            allowed,
            kinds,
            cycles,
            left_s: 0.0,
            held_since: None,
            newest: None,
            rest_since: None,
        }
    }

    /// Records a step during which this host replicated for `replicating`.
    pub fn record_step(&mut self, step: StepTime, replicating: Span) {
        self.earn(step);
        self.cycles.stepped(step, replicating);
        let saving = step.saving.as_seconds();
        let took = step.end.since(step.start).as_seconds() - saving;
        if took <= 0.0 {
            return;
        }
        let kind = &mut self.kinds[usize::from(saving > 0.0)];
        kind.forget(step.end);
        if replicating == Span::default() {
            push(&mut kind.quiet, (step.end, took), MAX_QUIET_STEPS);
        } else if let Some(usual) = kind.usual() {
            let longer = (took - usual).clamp(MIN_COST * usual, MAX_COST * usual);
            // A step that is long by chance overlaps more replication: that must not look like a cost.
            let active = usual * (replicating.as_seconds() / took).min(1.0);
            push(&mut kind.beside, (step.end, longer, active), MAX_REPLICATING_STEPS);
        } else {
            // Nothing to compare it with yet. It only counts towards a pause of replication.
            push(&mut kind.beside, (step.end, 0.0, 0.0), MAX_REPLICATING_STEPS);
        }
    }

    /// Records that shards were sent or received for `took`, until `now`. Returns the known cost, seconds of training.
    pub fn replicated(&mut self, took: Span, now: Mono) -> f64 {
        // A job that completes no steps is not slowed.
        let cost_s = if self.stands_still(now) { 0.0 } else { self.believed() * took.as_seconds() };
        self.left_s -= cost_s;
        cost_s
    }

    /// Why a replica has to wait now; `None` if it may be sent.
    pub fn holds(&mut self, now: Mono) -> Option<DelayReason> {
        if self.allowed <= 0.0 {
            return None;
        }
        let measures = self.cycles.leaves_out(now) || self.is_paused(now);
        let hold = match self.left_s {
            ..0.0 => Some(DelayReason::Spent),
            _ => measures.then_some(DelayReason::Measurement),
        };
        if hold.is_none() || self.stands_still(now) {
            self.held_since = None;
            return None;
        }
        let since = *self.held_since.get_or_insert(now);
        if now.since(since) < MAX_WAIT {
            return hold;
        }
        (self.left_s, self.held_since) = (0.0, None);
        None
    }

    /// The best estimate of the cost of a second of replication, in seconds of training, if known. May be negative.
    pub fn per_second(&self) -> Option<f64> {
        self.cycles.measured().or_else(|| self.measured()).map(|(cost, _)| cost)
    }

    /// The cost as far as it exceeds the noise, from 0 to 1.
    fn believed(&self) -> f64 {
        // A cost beyond three standard errors counts in full. Otherwise one standard error is subtracted.
        let certain = |(cost, error): (f64, f64)| if cost > 3.0 * error { cost } else { cost - error };
        let by_cycles = self.cycles.measured().map(certain);
        let by_steps = || self.measured().map(|(cost, error)| cost - 2.0 * error);
        by_cycles.or_else(by_steps).unwrap_or(0.0).clamp(0.0, 1.0)
    }

    /// The cost and its standard error: least squares through zero over steps of both kinds.
    fn measured(&self) -> Option<(f64, f64)> {
        let (mut products, mut squares, mut noise) = (0.0, 0.0, 0.0);
        for kind in self.kinds.iter().filter(|kind| kind.is_enough()) {
            let of_kind: f64 = kind.beside.iter().map(|(_, _, active)| active * active).sum();
            let actives: f64 = kind.beside.iter().map(|(_, _, active)| active).sum();
            let spread = kind.spread();
            products += kind.beside.iter().map(|(_, longer, active)| longer * active).sum::<f64>();
            squares += of_kind;
            // The usual time has an error itself, the same for all steps: the standard error of a median.
            let usual_error = 1.25 * spread / (kind.quiet.len() as f64).sqrt();
            noise += spread * spread * of_kind + (usual_error * actives).powi(2);
        }
        (squares > 0.0).then(|| (products / squares, noise.sqrt() / squares))
    }

    /// Adds to the budget for the time of steps only, and only once for steps of several ranks at the same time.
    fn earn(&mut self, step: StepTime) {
        let known = self.newest.map_or(step.start, |(end, _)| end.max(step.start));
        self.left_s =
            (self.left_s + self.allowed * step.end.since(known).as_seconds()).min(self.allowed * SAVED_UP_S);
        if self.newest.is_none_or(|(end, _)| step.end >= end) {
            self.newest = Some((step.end, step.end.since(step.start)));
        }
    }

    /// Whether a step is overdue. Then replication slows no one, and the last save must leave the host before the host
    /// is lost.
    fn stands_still(&self, now: Mono) -> bool {
        self.newest
            .is_some_and(|(end, took)| now.since(end) > STOPPED_AFTER.plus(Span(took.0.saturating_mul(3))))
    }

    /// Whether the measurement needs steps without replication first.
    fn is_paused(&mut self, now: Mono) -> bool {
        let [plain, _] = &mut self.kinds;
        plain.forget(now);
        let wanted = plain.beside.len() >= PAUSE_AFTER_STEPS && plain.quiet.len() < MIN_STEPS;
        match self.rest_since {
            Some(since) if now.since(since) < MAX_PAUSE => wanted,
            Some(since) if now.since(since) < PAUSE_INTERVAL => false,
            _ => {
                self.rest_since = wanted.then_some(now);
                wanted
            }
        }
    }
}

impl Kind {
    fn forget(&mut self, now: Mono) {
        while self.quiet.front().is_some_and(|(end, _)| now.since(*end) > STEP_WINDOW) {
            self.quiet.pop_front();
        }
        while self.beside.front().is_some_and(|(end, ..)| now.since(*end) > STEP_WINDOW) {
            self.beside.pop_front();
        }
    }

    fn is_enough(&self) -> bool {
        self.quiet.len() >= MIN_STEPS
            && self.beside.iter().filter(|(_, _, active)| *active > 0.0).count() >= MIN_STEPS
    }

    /// The usual time of a step without replication, seconds.
    fn usual(&self) -> Option<f64> {
        (self.quiet.len() >= MIN_STEPS).then(|| median(self.quiet.iter().map(|(_, took)| *took).collect()))
    }

    /// The standard deviation of steps without replication, seconds, from their median absolute deviation.
    fn spread(&self) -> f64 {
        let usual = median(self.quiet.iter().map(|(_, took)| *took).collect());
        1.4826 * median(self.quiet.iter().map(|(_, took)| (took - usual).abs()).collect())
    }
}

fn push<T>(queue: &mut VecDeque<T>, value: T, most: usize) {
    if queue.len() >= most {
        queue.pop_front();
    }
    queue.push_back(value);
}

/// The median; zero if there are no values.
fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    if values.is_empty() {
        return 0.0;
    }
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests;

//! What training pays for replicas, and whether it has been asked for enough.
//!
//! Where replicas go on most of the time, whole cycles from save to save are compared ([`cycles`]). Else steps during which this host
//! replicates are held against steps during which it does not. What they take longer, for each second of replicating, is the price; it is
//! believed only as far as it stands out of the noise, so that a host whose steps vary and whose replicas cost nothing holds nothing back.
//! An allowance grows with each step and is spent at that price: on the average training pays no more than the share that was allowed, and
//! replicas still go as fast as they can when they go. One that is held back is overtaken by the next step. All ranks of a job wait for each
//! other, so the steps here also tell what replicas cost on other hosts.

mod cycles;

use std::collections::VecDeque;

use self::cycles::Cycles;
use crate::base::time::{Mono, Span};

/// Steps of a kind that are remembered with nothing beside them, and with replicas.
const QUIET: usize = 128;
const BESIDE: usize = 256;

/// So many of both tell a price.
const ENOUGH: usize = 8;

/// After so many with replicas and too few without, replicas rest until there are enough to compare with...
const REST_AFTER: usize = 64;

/// ...but not for longer than that, and not again for ten times as long.
const REST: Span = Span::seconds(30);
const REST_AGAIN: Span = Span::seconds(330);

/// What a step took longer counts up to once what steps take, and what it took shorter up to half of that: evaluations and pauses are
/// no price of replicas.
const LONGEST: f64 = 1.0;
const SHORTEST: f64 = -0.5;

/// Steps are forgotten then: what a step takes changes.
const REMEMBERED: Span = Span::seconds(300);

/// So much of the allowance may be saved up: what comes in at most at once after a rest, in seconds of the allowed share.
const SAVED_UP_S: f64 = 60.0;

/// Training stands still, or is over, when no step came for so long and three times the last one's time: steps are told once a second.
const STILL: Span = Span::seconds(3);

/// However high the price, something is sent after that: an old replica is better than none, and the measurement may be wrong.
const MOST_HELD: Span = Span::seconds(600);

/// A step of a rank of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTime {
    /// When it began.
    pub start: Mono,
    /// When it was complete.
    pub end: Mono,
    /// How much of that was saving.
    pub saving: Span,
}

/// Why a replica waits; the first counts for more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hold {
    /// The allowance is spent.
    Spent,
    /// There must be steps without replicas to compare with.
    Measurement,
}

/// The price, and what is left of the allowance.
#[derive(Clone, Debug)]
pub struct ReplicationCost {
    /// The share of training's time that replicas may cost; 0 for any.
    allowed: f64,
    /// Steps that save nothing, and steps that save: the one is no measure for the other.
    kinds: [Kind; 2],
    /// The same steps, from one save to the next.
    cycles: Cycles,
    /// Seconds of training that may be spent.
    left_s: f64,
    held_since: Option<Mono>,
    /// When the newest step was complete, and what it took.
    newest: Option<(Mono, Span)>,
    rest_since: Option<Mono>,
}

#[derive(Clone, Debug, Default)]
struct Kind {
    /// When each was complete, and what it took, seconds.
    quiet: VecDeque<(Mono, f64)>,
    /// When each was complete, what it took longer than a quiet one, and how much of it went by with replicas, seconds.
    beside: VecDeque<(Mono, f64, f64)>,
}

impl ReplicationCost {
    /// Replicas may cost training the share `allowed` of its time, 0.01 for 1 %; 0 for any.
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

    /// Sees a step that went by with `replicating` of its time spent on replicas.
    pub fn stepped(&mut self, step: StepTime, replicating: Span) {
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
            push(&mut kind.quiet, (step.end, took), QUIET);
        } else if let Some(usual) = kind.usual() {
            let longer = (took - usual).clamp(SHORTEST * usual, LONGEST * usual);
            // Of a step that happened to be long more went by with replicas: that must not look like a price.
            let active = usual * (replicating.as_seconds() / took).min(1.0);
            push(&mut kind.beside, (step.end, longer, active), BESIDE);
        } else {
            // Nothing to hold it against yet; that it went by is a reason to rest.
            push(&mut kind.beside, (step.end, 0.0, 0.0), BESIDE);
        }
    }

    /// Replicas were sent or taken for so long, until `now`. Seconds of training that it cost, as far as is known.
    pub fn replicated(&mut self, took: Span, now: Mono) -> f64 {
        // A job that makes no steps is not slowed.
        let cost_s = if self.stands_still(now) { 0.0 } else { self.believed() * took.as_seconds() };
        self.left_s -= cost_s;
        cost_s
    }

    /// What a replica has to wait for now; none if it may be sent.
    pub fn holds(&mut self, now: Mono) -> Option<Hold> {
        if self.allowed <= 0.0 {
            return None;
        }
        let measures = self.cycles.leaves_out(now) || self.rests(now);
        let hold = match self.left_s {
            ..0.0 => Some(Hold::Spent),
            _ => measures.then_some(Hold::Measurement),
        };
        if hold.is_none() || self.stands_still(now) {
            self.held_since = None;
            return None;
        }
        let since = *self.held_since.get_or_insert(now);
        if now.since(since) < MOST_HELD {
            return hold;
        }
        (self.left_s, self.held_since) = (0.0, None);
        None
    }

    /// What a second of replicating costs, in seconds of training, where it is known: the best guess, which may be below zero.
    pub fn per_second(&self) -> Option<f64> {
        self.cycles.measured().or_else(|| self.measured()).map(|(price, _)| price)
    }

    /// The price as far as it stands out of the noise, from 0 to 1.
    fn believed(&self) -> f64 {
        // One that is certain is paid in full, another one as far as it is.
        let certain = |(price, error): (f64, f64)| if price > 3.0 * error { price } else { price - error };
        let by_cycles = self.cycles.measured().map(certain);
        let by_steps = || self.measured().map(|(price, error)| price - 2.0 * error);
        by_cycles.or_else(by_steps).unwrap_or(0.0).clamp(0.0, 1.0)
    }

    /// The price and its standard error: least squares through zero over steps of both kinds.
    fn measured(&self) -> Option<(f64, f64)> {
        let (mut products, mut squares, mut noise) = (0.0, 0.0, 0.0);
        for kind in self.kinds.iter().filter(|kind| kind.is_enough()) {
            let of_kind: f64 = kind.beside.iter().map(|(_, _, active)| active * active).sum();
            let actives: f64 = kind.beside.iter().map(|(_, _, active)| active).sum();
            let spread = kind.spread();
            products += kind.beside.iter().map(|(_, longer, active)| longer * active).sum::<f64>();
            squares += of_kind;
            // What is usual is itself known only so well, and errs for all steps alike: the error of a median.
            let usual_error = 1.25 * spread / (kind.quiet.len() as f64).sqrt();
            noise += spread * spread * of_kind + (usual_error * actives).powi(2);
        }
        (squares > 0.0).then(|| (products / squares, noise.sqrt() / squares))
    }

    /// The allowance grows with the time of steps only, and once where ranks of this host step side by side.
    fn earn(&mut self, step: StepTime) {
        let known = self.newest.map_or(step.start, |(end, _)| end.max(step.start));
        self.left_s =
            (self.left_s + self.allowed * step.end.since(known).as_seconds()).min(self.allowed * SAVED_UP_S);
        if self.newest.is_none_or(|(end, _)| step.end >= end) {
            self.newest = Some((step.end, step.end.since(step.start)));
        }
    }

    /// Whether no step came when one was due: nobody is slowed then, and what was saved last must get away before the host does.
    fn stands_still(&self, now: Mono) -> bool {
        self.newest.is_some_and(|(end, took)| now.since(end) > STILL.plus(Span(took.0.saturating_mul(3))))
    }

    /// Whether there must be steps without replicas first.
    fn rests(&mut self, now: Mono) -> bool {
        let [plain, _] = &mut self.kinds;
        plain.forget(now);
        let wanted = plain.beside.len() >= REST_AFTER && plain.quiet.len() < ENOUGH;
        match self.rest_since {
            Some(since) if now.since(since) < REST => wanted,
            Some(since) if now.since(since) < REST_AGAIN => false,
            _ => {
                self.rest_since = wanted.then_some(now);
                wanted
            }
        }
    }
}

impl Kind {
    fn forget(&mut self, now: Mono) {
        while self.quiet.front().is_some_and(|(end, _)| now.since(*end) > REMEMBERED) {
            self.quiet.pop_front();
        }
        while self.beside.front().is_some_and(|(end, ..)| now.since(*end) > REMEMBERED) {
            self.beside.pop_front();
        }
    }

    fn is_enough(&self) -> bool {
        self.quiet.len() >= ENOUGH
            && self.beside.iter().filter(|(_, _, active)| *active > 0.0).count() >= ENOUGH
    }

    /// What a step without replicas takes, seconds.
    fn usual(&self) -> Option<f64> {
        (self.quiet.len() >= ENOUGH).then(|| median(self.quiet.iter().map(|(_, took)| *took).collect()))
    }

    /// How much steps without replicas vary, seconds: the standard deviation by the median of what they are off.
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

/// The value in the middle; zero of none.
fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    if values.is_empty() {
        return 0.0;
    }
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests;

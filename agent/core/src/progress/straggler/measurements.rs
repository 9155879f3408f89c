//! What has been measured of the ranks so far: scores, their noise, and which of them are known to be slow.

use std::collections::{BTreeMap, BTreeSet};

use super::carried::Carried;
use super::found::Slow;
use super::history::{History, ROWS};
use super::paces::Paces;
use super::peers::Peers;
use super::regime::Regime;
use super::score::{Scratch, median, score, spread};

/// Below this, noise is not told from rounding.
const QUIETEST: f32 = 0.001;

/// The noise of earlier runs counts as that of so many steps.
const RECALLED_STEPS: usize = 8;

/// So many ranks are very few. Who tell so little are believed sooner: one false alarm in 10^7 looks.
const VERY_FEW: usize = 4;
const SURE_OF_VERY_FEW: f32 = 5.2;
/// But where more than a little of the noise is carried from step to step: how much it scatters by is known from few moods, and badly.
/// So many deviations more are asked for each whole share that is carried beyond it.
const SURER_WHERE_CARRIED: f32 = 3.0;
const LITTLE_CARRIED: f32 = 0.15;

/// Where ranks are too few for a spread between them, scores are compared over so many steps.
const MOVES_OVER: usize = 4;

/// From when on something is told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// A rank that is slower by less than this share is left alone, however sure it is.
    pub rank: f32,
    /// A rank must have become slower by this much to be told for that alone, where peers differ for good.
    pub change: f32,
    /// Stages, and the slowest rank of each step, may differ by this much.
    pub imbalance: f32,
    /// Standard deviations; 6.7 is one false alarm in 10^11 looks.
    pub sure: f32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { rank: 0.03, change: 0.10, imbalance: 0.10, sure: 6.7 }
    }
}

/// One step of all ranks, by index; NaN where nothing was reported.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The step's number.
    pub step: u64,
    /// Seconds that each rank spent on its own work.
    pub self_times: &'a [f32],
    /// Seconds that each rank waited for others; empty if that is not known.
    pub waits: &'a [f32],
    /// Seconds that the step took; NaN if that is not known.
    pub took: f32,
}

/// What is known of all ranks.
#[derive(Clone, Debug)]
pub(super) struct Measurements {
    limits: Limits,
    peers: Peers,
    history: History,
    recent: Recent,
    carried: Carried,
    regime: Regime,
    paces: Paces,
    /// What is slow at present.
    slow: BTreeSet<Slow>,
    /// When a rank was last found to be no longer slow, in steps seen: what was before is settled.
    settled: BTreeMap<u32, usize>,
    scratch: Scratch,
    scores: Vec<f32>,
    /// The typical time of each stage in the last step.
    medians: Vec<f32>,
}

/// What is remembered of the last steps as a whole.
#[derive(Clone, Debug, Default)]
pub(super) struct Recent {
    noise: Ring<f32>,
    took: Ring<f32>,
    /// Who waited least.
    least_wait: Ring<u32>,
}

/// The last [`ROWS`] values.
#[derive(Clone, Debug, Default)]
pub(super) struct Ring<T> {
    values: Vec<T>,
    next: usize,
}

impl<T: Copy> Ring<T> {
    pub(super) fn push(&mut self, value: T) {
        if self.values.len() < ROWS {
            self.values.push(value);
        } else {
            self.values[self.next] = value;
        }
        self.next = (self.next + 1) % ROWS;
    }

    /// In no particular order.
    pub(super) fn values(&self) -> &[T] {
        &self.values
    }
}

impl Recent {
    /// The noise of a score: the typical one of the last steps.
    pub(super) fn noise(&self) -> f32 {
        typical(&self.noise).max(QUIETEST)
    }

    /// The share of `seconds` in a step; none if the steps' length is not known.
    pub(super) fn share_of_step(&self, seconds: f32) -> Option<f32> {
        let took = typical(&self.took);
        (took > 0.0).then(|| (seconds / took).clamp(0.0, 1.0))
    }

    /// In which share of the last steps this rank waited least.
    pub(super) fn waited_least(&self, rank: u32) -> Option<f32> {
        let least = self.least_wait.values();
        (!least.is_empty())
            .then(|| least.iter().filter(|least| **least == rank).count() as f32 / least.len() as f32)
    }
}

fn typical(ring: &Ring<f32>) -> f32 {
    let mut known: Vec<f32> = ring.values().iter().copied().filter(|value| !value.is_nan()).collect();
    median(&mut known)
}

impl Measurements {
    /// Of these ranks nothing has been seen.
    pub(super) fn new(peers: Peers, limits: Limits) -> Measurements {
        let ranks = peers.len();
        Measurements {
            limits,
            history: History::new(ranks),
            recent: Recent::default(),
            carried: Carried::new(ranks),
            regime: Regime::default(),
            paces: Paces::new(ranks),
            slow: BTreeSet::new(),
            settled: BTreeMap::new(),
            scratch: Scratch::default(),
            scores: vec![f32::NAN; ranks],
            medians: vec![f32::NAN; peers.stages().len()],
            peers,
        }
    }

    /// Takes in how noisy earlier runs of the job were: it counts as much as a few steps, until this one knows.
    ///
    /// Not so of very few ranks: how noisy they are depends on what else their host does at the time, and each is compared
    /// with next to nobody. Who is slow among them is judged by noise that was measured in this job.
    pub(super) fn recall_noise(&mut self, noise: f32) {
        if self.peers.len() <= VERY_FEW {
            return;
        }
        for _ in 0..RECALLED_STEPS {
            self.recent.noise.push(noise);
        }
        self.carried.recall(noise);
    }

    /// The noise of a score, once it is known.
    pub(super) fn noise(&self) -> Option<f32> {
        (self.history.seen() >= ROWS).then(|| self.recent.noise())
    }

    /// Takes in a step of all ranks.
    pub(super) fn remember(&mut self, row: Row<'_>) {
        score(&self.peers, row.self_times, &mut self.scratch, &mut self.scores, &mut self.medians);
        let noise = if self.peers.len() > 3 {
            spread(&self.scores, &mut self.scratch)
        } else {
            // In a pair each is the other's mirror; how a score moves from step to step is noise all the same.
            self.movement()
        };
        self.recent.noise.push(noise);
        self.recent.took.push(row.took);
        self.paces.push(row.step, row.self_times, row.took);
        let waits = row.waits.iter().enumerate().filter(|(_, wait)| wait.is_finite());
        if let Some((rank, _)) = waits.min_by(|(_, a), (_, b)| a.total_cmp(b)) {
            self.recent.least_wait.push(rank as u32);
        }
        self.history.push(row.step, &self.scores, self.recent.noise());
        if self.peers.len() <= VERY_FEW
            && let Some(steps) = self.regime.push(row.self_times)
        {
            self.carried.doubt(self.history.seen() - steps);
        }
        self.carried.push(&self.history, self.recent.noise());
    }

    /// How scores move over a few steps, as the deviation of one. Neighbours may depend on each other and move less.
    fn movement(&mut self) -> f32 {
        let moved: Vec<f32> = (0..self.peers.len() as u32)
            .filter_map(|rank| {
                let (_, before) = self.history.last(rank, MOVES_OVER).next()?;
                Some((self.scores[rank as usize] - before) / std::f32::consts::SQRT_2)
            })
            .collect();
        spread(&moved, &mut self.scratch)
    }

    /// This is slow from now on.
    pub(super) fn became_slow(&mut self, slow: Slow) {
        self.slow.insert(slow);
    }

    /// This is not slow any more.
    pub(super) fn is_over(&mut self, slow: Slow) {
        self.slow.remove(&slow);
    }

    /// What was before does not count any more for a rank, or for those of a host.
    pub(super) fn settle(&mut self, slow: Slow) {
        let seen = self.history.seen();
        match slow {
            Slow::Rank(rank) => drop(self.settled.insert(rank, seen)),
            Slow::Host(host) => {
                self.settled.extend(self.peers.on_host(host).iter().map(|rank| (*rank, seen)));
            }
            Slow::Stage(_) | Slow::Rotating => {}
        }
    }

    /// Whether this rank is known to be slow, by itself or with its host.
    pub(super) fn is_known(&self, rank: u32) -> bool {
        self.slow.contains(&Slow::Rank(rank))
            || self.peers.role(rank).host.is_some_and(|host| self.slow.contains(&Slow::Host(host)))
    }

    /// The oldest step that is remembered.
    pub(super) fn oldest_step(&self) -> u64 {
        self.history.oldest_step()
    }

    /// Whether something about the rank was settled within the last `steps` steps.
    pub(super) fn was_settled_within(&self, rank: u32, steps: usize) -> bool {
        self.settled.get(&rank).is_some_and(|at| at + steps > self.history.seen())
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    /// How many standard deviations make sure, as far as the noise is known. The limit holds for a hundred thousand ranks, of which
    /// one is always far out; among few there is no such one.
    pub(super) fn sure(&self) -> f32 {
        let very_few = self.peers.len() <= VERY_FEW;
        if !very_few {
            return self.carried.sure(self.limits.sure);
        }
        let more = SURER_WHERE_CARRIED * (self.carried.carried_over() - LITTLE_CARRIED).max(0.0);
        self.carried.sure(self.limits.sure.min(SURE_OF_VERY_FEW) + more)
    }

    /// The standard deviation of the mean of so many scores of a rank, by chance.
    pub(super) fn scatter(&self, steps: usize) -> f32 {
        self.carried.of_mean(steps)
    }

    /// By how many times noise is more at present than it was.
    pub(super) fn wilder(&self) -> f32 {
        self.carried.wilder(&self.history, self.peers.len())
    }

    /// The ranks and their roles.
    pub(super) fn peers(&self) -> &Peers {
        &self.peers
    }

    pub(super) fn history(&self) -> &History {
        &self.history
    }

    pub(super) fn recent(&self) -> &Recent {
        &self.recent
    }

    /// The last steps, from which follows what slowness costs.
    pub(super) fn paces(&self) -> &Paces {
        &self.paces
    }

    /// The score of each rank in the last step.
    pub(super) fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// The typical time of each stage in the last step.
    pub(super) fn medians(&self) -> &[f32] {
        &self.medians
    }

    /// Bytes that are held for all ranks together.
    pub(super) fn bytes(&self) -> usize {
        self.history.bytes() + self.paces.bytes() + self.peers.len() * (4 + 4 + 20) // scores, scratch, roles with their order
    }
}

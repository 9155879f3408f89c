//! The measurements of the ranks so far: scores, their noise, and which ranks are known to be slow.

use std::collections::{BTreeMap, BTreeSet};

use super::autocorrelation::NoiseModel;
use super::history::{History, ROWS};
use super::paces::Paces;
use super::peers::Peers;
use super::regime::Regime;
use super::score::{Scratch, median, score, spread};
use super::slowness::Slow;

/// Smaller noise cannot be distinguished from rounding.
const QUIETEST: f32 = 0.001;

/// The noise of earlier runs has the weight of this many steps.
const RECALLED_STEPS: usize = 8;

/// At most this many ranks are very few. With so few comparisons a lower limit is enough: one false alarm in 10^7
/// looks.
const MAX_VERY_FEW_RANKS: usize = 4;
const SURE_OF_VERY_FEW: f32 = 5.2;
/// If more than a little of the noise is carried from step to step, its scatter is known from few independent values.
/// This many more deviations are required for each whole share above that.
const SURER_WHERE_CARRIED: f32 = 3.0;
const LITTLE_CARRIED: f32 = 0.15;

/// With too few ranks for a spread between them, scores are compared over this many steps.
const MOVES_OVER: usize = 4;

/// The limits for findings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// A rank that is slower by less than this share is ignored, at any certainty.
    pub rank: f32,
    /// If peers differ permanently, a rank must have become slower by this much for a finding.
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

/// One step of all ranks, by index; NaN if not reported.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The step's number.
    pub step: u64,
    /// Seconds that each rank spent on its own work.
    pub self_times: &'a [f32],
    /// Seconds that each rank waited for others; empty if unknown.
    pub waits: &'a [f32],
    /// Seconds that the step took; NaN if unknown.
    pub took: f32,
}

/// The measurements of all ranks.
#[derive(Clone, Debug)]
pub(super) struct Measurements {
    limits: Limits,
    peers: Peers,
    history: History,
    recent: Recent,
    carried: NoiseModel,
    regime: Regime,
    paces: Paces,
    /// What is currently slow.
    slow: BTreeSet<Slow>,
    /// When a rank was last found to be no longer slow, in steps seen. Steps before that do not count.
    settled: BTreeMap<u32, usize>,
    scratch: Scratch,
    scores: Vec<f32>,
    /// The typical time of each stage in the last step.
    medians: Vec<f32>,
}

/// Values of the last steps as a whole.
#[derive(Clone, Debug, Default)]
pub(super) struct Recent {
    noise: Ring<f32>,
    took: Ring<f32>,
    /// The rank that waited least.
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

    /// The values, in no particular order.
    pub(super) fn values(&self) -> &[T] {
        &self.values
    }
}

impl Recent {
    /// The noise of a score: the typical noise of the last steps.
    pub(super) fn noise(&self) -> f32 {
        typical(&self.noise).max(QUIETEST)
    }

    /// `seconds` as a share of a step. `None` if the steps' length is unknown.
    pub(super) fn share_of_step(&self, seconds: f32) -> Option<f32> {
        let took = typical(&self.took);
        (took > 0.0).then(|| (seconds / took).clamp(0.0, 1.0))
    }

    /// The share of the last steps in which this rank waited least.
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
    /// Measurements of ranks without any steps.
    pub(super) fn new(peers: Peers, limits: Limits) -> Measurements {
        let ranks = peers.len();
        Measurements {
            limits,
            history: History::new(ranks),
            recent: Recent::default(),
            carried: NoiseModel::new(ranks),
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

    /// Sets the noise of earlier runs of the job. It counts as much as a few steps, until this run has learned its
    /// own.
    ///
    /// Ignored for very few ranks: their noise depends on the present load of their host, and each has almost no
    /// peers. They are judged only by noise that was measured in this run.
    pub(super) fn recall_noise(&mut self, noise: f32) {
        if self.peers.len() <= MAX_VERY_FEW_RANKS {
            return;
        }
        for _ in 0..RECALLED_STEPS {
            self.recent.noise.push(noise);
        }
        self.carried.recall(noise);
    }

    /// The noise of a score, once known.
    pub(super) fn noise(&self) -> Option<f32> {
        (self.history.seen() >= ROWS).then(|| self.recent.noise())
    }

    /// Adds a step of all ranks.
    pub(super) fn remember(&mut self, row: Row<'_>) {
        score(&self.peers, row.self_times, &mut self.scratch, &mut self.scores, &mut self.medians);
        let noise = if self.peers.len() > 3 {
            spread(&self.scores, &mut self.scratch)
        } else {
            // In a pair each is the other's mirror, but the change of a score from step to step is noise.
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
        if self.peers.len() <= MAX_VERY_FEW_RANKS
            && let Some(steps) = self.regime.push(row.self_times)
        {
            self.carried.doubt(self.history.seen() - steps);
        }
        self.carried.push(&self.history, self.recent.noise());
    }

    /// The change of scores over a few steps, as a standard deviation. Neighboring steps may be correlated and change
    /// less.
    fn movement(&mut self) -> f32 {
        let moved: Vec<f32> = (0..self.peers.len() as u32)
            .filter_map(|rank| {
                let (_, before) = self.history.last(rank, MOVES_OVER).next()?;
                Some((self.scores[rank as usize] - before) / std::f32::consts::SQRT_2)
            })
            .collect();
        spread(&moved, &mut self.scratch)
    }

    /// Marks this as slow.
    pub(super) fn became_slow(&mut self, slow: Slow) {
        self.slow.insert(slow);
    }

    /// Marks this as no longer slow.
    pub(super) fn is_over(&mut self, slow: Slow) {
        self.slow.remove(&slow);
    }

    /// Steps so far no longer count for a rank, or for those of a host.
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

    /// Whether this rank is known to be slow, itself or with its host.
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

    /// The required number of standard deviations, given what is known about the noise. The limit is for a hundred
    /// thousand ranks, of which one is always an outlier; among few there is none.
    pub(super) fn sure(&self) -> f32 {
        let very_few = self.peers.len() <= MAX_VERY_FEW_RANKS;
        if !very_few {
            return self.carried.sure(self.limits.sure);
        }
        let more = SURER_WHERE_CARRIED * (self.carried.carried_over() - LITTLE_CARRIED).max(0.0);
        self.carried.sure(self.limits.sure.min(SURE_OF_VERY_FEW) + more)
    }

    /// The standard deviation of the mean of `steps` scores of a rank, by chance.
    pub(super) fn scatter(&self, steps: usize) -> f32 {
        self.carried.of_mean(steps)
    }

    /// The factor by which the present noise exceeds the earlier noise.
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

    /// The last steps, from which the cost of slowness is computed.
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

    /// The memory used for all ranks together, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.history.bytes() + self.paces.bytes() + self.peers.len() * (4 + 4 + 20) // scores, scratch, roles with their order
    }
}

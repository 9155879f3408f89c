//! Finds uneven work that varies between steps: another rank is the slowest each time.

use super::history::ROWS;
use super::measurements::Measurements;
use super::score::median;
use super::slowness::{Slow, Straggler};

/// Fewer steps are not sufficient.
const MIN_STEPS: usize = 20;

/// With fewer ranks a rotation means nothing.
const MIN_RANKS: usize = 4;

/// A rank that is the slowest in this share of steps or more is a finding about that rank.
const ONE_RANK: f32 = 0.5;

/// In most steps this share of ranks must be slow: single outliers among many are the tails of noise.
const SLOW_RANKS: f32 = 0.04;

/// The share of steps that counts as most: hiccups in every second step do not come from the work.
const MAX_STEP_SHARE: f32 = 0.7;

/// With more ranks than this, they are sampled.
const SAMPLE: usize = 4096;

/// The slowest ranks of the last steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct RotationSample {
    /// ln(self time / peers') of the slowest rank in a typical step, without permanent differences between ranks.
    excess: f32,
    /// The share of steps in which the same rank was the slowest.
    same: f32,
    /// The share of ranks that were slow in most steps.
    share: f32,
    /// The excess of the slowest rank that most steps reach.
    most: f32,
    steps: usize,
}

/// Analyzes the last steps. `None` if there are too few.
pub(super) fn look(measured: &Measurements) -> Option<RotationSample> {
    let (history, ranks) = (measured.history(), measured.peers().len());
    let steps = history.seen().min(ROWS);
    if steps < MIN_STEPS || ranks < MIN_RANKS {
        return None;
    }
    let slow = measured.limits().imbalance.ln_1p();
    // By step: the highest score and its rank, how many ranks were slow, how many were seen.
    let mut rows = vec![(f32::NEG_INFINITY, 0_u32, 0_u32, 0_u32); steps];
    let mut scores = Vec::with_capacity(ROWS);
    for rank in (0..ranks as u32).step_by(ranks / SAMPLE + 1).filter(|rank| !measured.is_known(*rank)) {
        scores.clear();
        scores.extend(history.last_rows(rank));
        let usual = median(&mut scores.iter().map(|(_, score)| *score).collect::<Vec<_>>());
        for (row, score) in &scores {
            let (highest, whose, slow_ranks, seen) = &mut rows[*row];
            let excess = score - usual;
            *seen += 1;
            if excess > slow {
                *slow_ranks += 1;
            }
            if excess > *highest {
                (*highest, *whose) = (excess, rank);
            }
        }
    }
    rows.retain(|(_, _, _, seen)| *seen > 0);
    if rows.len() < MIN_STEPS {
        return None;
    }
    let mut turns: Vec<u32> = rows.iter().map(|(_, whose, ..)| *whose).collect();
    turns.sort_unstable();
    let most = turns.chunk_by(|a, b| a == b).map(<[u32]>::len).max().unwrap_or(0);
    let mut shares: Vec<f32> = rows.iter().map(|(_, _, slow, seen)| *slow as f32 / *seen as f32).collect();
    let mut highest: Vec<f32> = rows.iter().map(|(highest, ..)| *highest).collect();
    shares.sort_unstable_by(f32::total_cmp);
    highest.sort_unstable_by(f32::total_cmp);
    // The value that all but the lowest steps reach.
    let in_most = ((1.0 - MAX_STEP_SHARE) * rows.len() as f32) as usize;
    Some(RotationSample {
        most: highest.get(in_most).copied()?,
        excess: median(&mut highest),
        same: most as f32 / rows.len() as f32,
        share: shares.get(in_most).copied()?,
        steps: rows.len(),
    })
}

impl RotationSample {
    /// Whether the work is uneven.
    pub(super) fn is_uneven(&self, imbalance: f32) -> bool {
        self.most > imbalance.ln_1p() && self.same < ONE_RANK && self.share >= SLOW_RANKS
    }

    /// The finding. `stages` are the times of all stages, by number.
    pub(super) fn straggler(&self, step: u64, measured: &Measurements, stages: Vec<(u32, f32)>) -> Straggler {
        let recent = measured.recent();
        Straggler {
            slow: Slow::Rotating,
            ratio: self.excess.exp(),
            since: measured.oldest_step(),
            onset_seen: false,
            reported: step,
            steps: self.steps as u32,
            cost: measured.paces().if_even(measured.peers(), |rank| measured.is_known(rank)),
            z: self.excess / recent.noise(),
            noise: recent.noise(),
            waited_least: None,
            peers: measured.peers().len() as u32 - 1,
            stages,
            confidence: 0.9,
            usual: 0.0,
        }
    }
}

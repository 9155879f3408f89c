//! Finds pipeline stages that have more work than others.

use super::measurements::{Measurements, Ring};
use super::peers::Peers;
use super::score::median;
use super::slowness::{Slow, Straggler};

/// Fewer steps are not sufficient.
const MIN_STEPS: usize = 20;

/// In this share of steps the same stage must be the slowest.
const SAME: f32 = 0.8;

/// The stages' medians over the last steps.
#[derive(Clone, Debug, Default)]
pub(super) struct Stages {
    /// The stage of each group.
    of_group: Vec<Option<u32>>,
    /// By stage, in order: its number and its last medians.
    rings: Vec<(u32, Ring<f32>)>,
}

/// The comparison of the stages.
#[derive(Clone, Debug)]
pub(super) struct Compared {
    slowest: u32,
    /// Its time relative to the others' median.
    ratio: f32,
    /// The share of steps in which it was the slowest.
    same: f32,
    steps: u32,
    /// Typical self time of each stage.
    times: Vec<(u32, f32)>,
}

impl Stages {
    pub(super) fn new(peers: &Peers) -> Stages {
        let mut numbers: Vec<u32> = peers.stages().iter().flatten().copied().collect();
        numbers.sort_unstable();
        numbers.dedup();
        Stages {
            of_group: peers.stages().to_vec(),
            rings: numbers.into_iter().map(|stage| (stage, Ring::default())).collect(),
        }
    }

    /// Adds the groups' medians of a step.
    pub(super) fn push(&mut self, medians: &[f32]) {
        for (stage, ring) in &mut self.rings {
            let of_stage = self.of_group.iter().zip(medians);
            let mut known: Vec<f32> = of_stage
                .filter(|(other, median)| **other == Some(*stage) && !median.is_nan())
                .map(|(_, median)| *median)
                .collect();
            ring.push(median(&mut known));
        }
    }

    /// Typical self times of the stages.
    pub(super) fn times(&self) -> Vec<(u32, f32)> {
        let typical = |ring: &Ring<f32>| {
            median(&mut ring.values().iter().copied().filter(|value| !value.is_nan()).collect::<Vec<_>>())
        };
        self.rings.iter().map(|(stage, ring)| (*stage, typical(ring))).collect()
    }

    /// Compares the stages. `None` if there are none, or too few steps.
    pub(super) fn look(&self) -> Option<Compared> {
        let steps = self.rings.iter().map(|(_, ring)| ring.values().len()).min()?;
        if self.rings.len() < 2 || steps < MIN_STEPS {
            return None;
        }
        let times = self.times();
        let (slowest, time) = times
            .iter()
            .filter(|(_, time)| !time.is_nan())
            .max_by(|(_, a), (_, b)| a.total_cmp(b))
            .copied()?;
        let mut others: Vec<f32> = times
            .iter()
            .filter(|(stage, time)| *stage != slowest && !time.is_nan())
            .map(|(_, time)| *time)
            .collect();
        let ratio = time / median(&mut others);
        let is_slowest = |step: &usize| {
            let value = |ring: &Ring<f32>| ring.values()[*step];
            let own = self
                .rings
                .iter()
                .find(|(stage, _)| *stage == slowest)
                .map_or(f32::NAN, |(_, ring)| value(ring));
            // An unknown median is not higher.
            let higher = |ring: &Ring<f32>| value(ring) > own;
            !self.rings.iter().any(|(stage, ring)| *stage != slowest && higher(ring))
        };
        let same = (0..steps).filter(is_slowest).count() as f32 / steps as f32;
        Some(Compared { slowest, ratio, same, steps: steps as u32, times })
    }
}

impl Compared {
    /// The finding, if the stage is slow and its ranks agree on it.
    pub(super) fn straggler(&self, step: u64, measured: &Measurements) -> Option<Straggler> {
        let excess = self.ratio.ln();
        let recent = measured.recent();
        let flat = recent.noise() < excess / 2.0;
        let slow = self.ratio > 1.0 + measured.limits().imbalance;
        if !slow || self.same < SAME || !flat {
            return None;
        }
        let known: Vec<f32> =
            self.times.iter().map(|(_, time)| *time).filter(|time| !time.is_nan()).collect();
        let mean = known.iter().sum::<f32>() / known.len().max(1) as f32;
        let slowest = known.iter().copied().fold(f32::MIN, f32::max);
        Some(Straggler {
            slow: Slow::Stage(self.slowest),
            ratio: self.ratio,
            since: measured.oldest_step(),
            onset_seen: false,
            reported: step,
            steps: self.steps,
            cost: recent.share_of_step(slowest - mean),
            z: excess / recent.noise(),
            noise: recent.noise(),
            waited_least: None,
            peers: self.times.len() as u32 - 1,
            stages: self.times.clone(),
            confidence: 0.95,
            usual: 0.0,
        })
    }
}

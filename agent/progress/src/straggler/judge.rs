//! Judges one step after the other: scores, findings, and changes.

use std::collections::BTreeMap;

use super::history::ROWS;
use super::measurements::{Limits, Measurements, Row};
use super::peers::Peers;
use super::ranks::{self, RankState};
use super::rotating;
use super::slowness::{Change, Slow, Straggler};
use super::stages::Stages;

/// Imbalance changes slowly and is checked this often, in steps.
const IMBALANCE_EVERY: usize = 4;

/// The judge of one job's stragglers.
#[derive(Clone, Debug)]
pub struct Judge {
    measured: Measurements,
    stages: Stages,
    /// What is currently slow.
    open: BTreeMap<Slow, RankState>,
}

impl Judge {
    /// A judge of these ranks without any steps.
    pub fn new(peers: Peers, limits: Limits) -> Judge {
        let stages = Stages::new(&peers);
        Judge { measured: Measurements::new(peers, limits), stages, open: BTreeMap::new() }
    }

    /// Sets the noise of earlier runs of the job. It counts as much as a few steps, until this run has learned its
    /// own. Ignored for very few ranks, which are judged only by noise of this run.
    pub fn recall_noise(&mut self, noise: f32) {
        self.measured.recall_noise(noise);
    }

    /// The noise of a score, once known.
    pub fn noise(&self) -> Option<f32> {
        self.measured.noise()
    }

    /// Adds the next step. Appends changes to `out`. A row with another number of ranks is ignored.
    pub fn step(&mut self, row: Row<'_>, out: &mut Vec<Change>) {
        if row.self_times.len() != self.measured.peers().len() {
            return;
        }
        self.measured.remember(row);
        self.stages.push(self.measured.medians());
        self.close(row.step, out);
        for straggler in ranks::find(&self.measured) {
            self.open(straggler, out);
        }
        if self.measured.history().seen().is_multiple_of(IMBALANCE_EVERY) {
            self.imbalance(row.step, out);
        }
    }

    fn open(&mut self, straggler: Straggler, out: &mut Vec<Change>) {
        self.open.insert(straggler.slow, RankState::from_finding(&straggler, &self.measured));
        self.measured.became_slow(straggler.slow);
        out.push(Change::Found(straggler));
    }

    /// Reports what is no longer slow.
    fn close(&mut self, step: u64, out: &mut Vec<Change>) {
        let over: Vec<(Slow, u64)> = self
            .open
            .iter()
            .filter_map(|(slow, standing)| Some((*slow, standing.over_since(*slow, &self.measured)?)))
            .collect();
        for (slow, since) in over {
            self.open.remove(&slow);
            self.measured.is_over(slow);
            self.measured.settle(slow);
            out.push(Change::Over { slow, since, reported: step });
        }
    }

    /// Checks what concerns no single rank: the spread of work over steps and over stages.
    fn imbalance(&mut self, step: u64, out: &mut Vec<Change>) {
        let limits = self.measured.limits();
        let rotating = rotating::look(&self.measured);
        let stage = self.stages.look();
        let uneven = rotating.as_ref().is_some_and(|seen| seen.is_uneven(limits.imbalance));
        // Unevenness in a small part of a step costs nothing. Other processes on the host cause it too.
        let matters = |straggler: &Straggler| straggler.cost.is_none_or(|cost| cost >= limits.rank);
        let straggler = rotating
            .filter(|_| uneven)
            .map(|seen| seen.straggler(step, &self.measured, self.stages.times()))
            .filter(matters);
        self.settle(Slow::Rotating, straggler, step, out);
        // If the work differs between ranks and steps, the ranks of a stage do not agree on its share.
        let slow_stage = stage.filter(|_| !uneven && !self.open.contains_key(&Slow::Rotating));
        let straggler = slow_stage.and_then(|seen| seen.straggler(step, &self.measured));
        let before = self.open.keys().find(|slow| matches!(slow, Slow::Stage(_))).copied();
        if let Some(before) =
            before.filter(|before| straggler.as_ref().map(|straggler| straggler.slow) != Some(*before))
        {
            self.settle(before, None, step, out);
        }
        if let Some(straggler) = straggler {
            self.settle(straggler.slow, Some(straggler), step, out);
        }
    }

    /// Opens what was found and is not open. Closes what was not found for long enough.
    fn settle(&mut self, slow: Slow, straggler: Option<Straggler>, step: u64, out: &mut Vec<Change>) {
        match (straggler, self.open.get_mut(&slow)) {
            (Some(straggler), None) => self.open(straggler, out),
            (Some(_), Some(standing)) => standing.missed = 0,
            (None, Some(standing)) => {
                standing.missed += 1;
                if standing.missed >= ROWS / IMBALANCE_EVERY {
                    self.open.remove(&slow);
                    self.measured.is_over(slow);
                    out.push(Change::Over { slow, since: step, reported: step });
                }
            }
            (None, None) => {}
        }
    }

    /// The ranks and their roles.
    pub fn peers(&self) -> &Peers {
        self.measured.peers()
    }

    /// The score of each rank in the last step: ln(self time / peers').
    pub fn scores(&self) -> &[f32] {
        self.measured.scores()
    }

    /// The last `steps` known scores of a rank.
    pub fn last_scores(&self, rank: u32, steps: usize) -> Vec<f32> {
        self.measured.history().last(rank, steps).map(|(_, score)| score).collect()
    }

    /// Whether nothing is currently slow.
    pub fn is_quiet(&self) -> bool {
        self.open.is_empty()
    }

    /// The memory used for all ranks together, in bytes.
    pub fn bytes(&self) -> usize {
        self.measured.bytes()
    }
}

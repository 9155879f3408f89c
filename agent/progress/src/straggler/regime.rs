//! Detects that the whole job changes its pace: sequences become longer, batches larger, devices warm up. Its noise
//! may change too, and then the known noise counts little.
//!
//! The pace is that of the quickest rank, which a rank that becomes slow does not affect.

use std::collections::VecDeque;

use super::score::{median, spread_around_median};

/// How many of the last steps must differ from those before, how many of those are kept, and how many are enough.
const LAST: usize = 3;
const BASELINE_STEPS: usize = 16;
const MIN_NEW_STEPS: usize = 4;

/// The least change that counts, as a share, and the factor by which it must exceed the usual scatter of steps.
const MIN_CHANGE: f32 = 0.05;
const BEYOND: f32 = 3.0;

/// The pace of the last steps: ln of the time of the quickest rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Regime {
    paces: VecDeque<f32>,
}

impl Regime {
    /// Adds the time of each rank in a step. If the job has changed its pace, returns for how many steps already.
    pub(super) fn push(&mut self, self_times: &[f32]) -> Option<usize> {
        let known = self_times.iter().copied().filter(|time| *time > 0.0 && time.is_finite());
        self.paces.push_back(known.min_by(f32::total_cmp)?.ln());
        if self.paces.len() < LAST + MIN_NEW_STEPS {
            return None;
        }
        if self.paces.len() > LAST + BASELINE_STEPS {
            self.paces.pop_front();
        }
        let ago = self.paces.len() - LAST;
        let (before, last) = self.paces.make_contiguous().split_at(ago);
        let usual = median(&mut before.to_vec());
        let bar = MIN_CHANGE.max(BEYOND * stray(before));
        let changed =
            last.iter().all(|pace| *pace > usual + bar) || last.iter().all(|pace| *pace < usual - bar);
        if !changed {
            return None;
        }
        // From here on these are the usual steps.
        self.paces.drain(..ago);
        Some(LAST)
    }
}

/// The scatter of paces from step to step. A job that gradually becomes quicker has none because of that.
fn stray(paces: &[f32]) -> f32 {
    let mut moves: Vec<f32> = paces.windows(2).map(|pair| pair[1] - pair[0]).collect();
    spread_around_median(&mut moves) / std::f32::consts::SQRT_2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps at which the job changes, given the times of its two ranks.
    fn changes(steps: impl IntoIterator<Item = [f32; 2]>) -> Vec<usize> {
        let mut regime = Regime::default();
        let steps = steps.into_iter().enumerate();
        steps.filter_map(|(step, times)| regime.push(&times).map(|_| step)).collect()
    }

    fn wobble(step: usize) -> f32 {
        1.0 + (step * 31 % 11) as f32 / 11.0 * 0.02
    }

    #[test]
    fn a_job_that_becomes_slower_or_quicker_changes_once() {
        let pace = |step: usize| if (40..80).contains(&step) { 1.5 } else { 1.0 };
        let both = |step: usize| [pace(step) * wobble(step), pace(step) * wobble(step + 3)];
        assert_eq!(changes((0..120).map(both)), [42, 82]);
    }

    #[test]
    fn slow_ranks_hiccups_and_uneven_work_do_not_change_the_job() {
        let slow = |step: usize| [wobble(step), wobble(step + 3) * if step < 40 { 1.0 } else { 1.5 }];
        assert!(changes((0..120).map(slow)).is_empty());
        let hiccups = |step: usize| [if (step + 10) % 20 < 2 { 1.9 } else { 1.0 }; 2];
        assert!(changes((0..120).map(hiccups)).is_empty());
        let uneven = |step: usize| [1.0 + (step * 17 % 13) as f32 / 26.0; 2];
        assert!(changes((0..120).map(uneven)).is_empty());
    }

    #[test]
    fn a_job_that_warms_up_changes() {
        let warms_up = |step: usize| [1.0 + 0.5 * (-(step as f32) / 4.0).exp(); 2];
        assert!(!changes((0..40).map(warms_up)).is_empty());
    }
}

//! The pace of each rank's last steps, for users who look at a running job: its own time, its ratio to its peers',
//! and the share of a step in which it waits.

use crate::straggler::median;
use mainstay_model::time::Span;

/// The number of last steps that count: enough that a single long step does not show.
pub const LAST: usize = 16;

/// The pace of a rank's last steps. Fields that its sections do not provide are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// The median time of its own work in a step.
    pub self_time: Option<Span>,
    /// Its ratio to the median of its peers: 1.1 is 10 % slower.
    pub against_peers: Option<f64>,
    /// The share of a step in which it waits for other ranks, from 0 to 1.
    pub wait_share: Option<f64>,
}

/// The last steps of all ranks.
#[derive(Clone, Debug, Default)]
pub(super) struct Paces {
    /// By rank: own time in seconds, and share of waiting; NaN if unknown.
    last: Vec<[(f32, f32); LAST]>,
    next: usize,
}

impl Paces {
    pub(super) fn new(ranks: usize) -> Paces {
        Paces { last: vec![[(f32::NAN, f32::NAN); LAST]; ranks], next: 0 }
    }

    /// Records a step: for each rank its own time, its waiting and the step's length, in seconds.
    pub(super) fn push(&mut self, step: impl Iterator<Item = (f32, f32, f32)>) {
        let at = self.next % LAST;
        for (last, (own, wait, took)) in self.last.iter_mut().zip(step) {
            // A job without waiting sections does not mean that no rank waits.
            let share = if wait > 0.0 && took > 0.0 { (wait / took).min(1.0) } else { f32::NAN };
            last[at] = (own, share);
        }
        self.next = self.next.wrapping_add(1);
    }

    /// The pace of a rank whose last scores, ln(own time / peers'), are `scores`.
    pub(super) fn pace(&self, rank: usize, mut scores: Vec<f32>) -> Pace {
        let Some(last) = self.last.get(rank) else { return Pace::default() };
        let middle = |values: &mut dyn Iterator<Item = f32>| {
            let mut known: Vec<f32> = values.filter(|value| !value.is_nan()).collect();
            Some(median(&mut known)).filter(|middle| !middle.is_nan())
        };
        let own = middle(&mut last.iter().map(|(own, _)| *own));
        Pace {
            self_time: own.map(|seconds| Span((f64::from(seconds) * 1e9) as u64)),
            against_peers: Some(f64::from(median(&mut scores).exp())).filter(|ratio| ratio.is_finite()),
            wait_share: middle(&mut last.iter().map(|(_, share)| *share)).map(f64::from),
        }
    }
}

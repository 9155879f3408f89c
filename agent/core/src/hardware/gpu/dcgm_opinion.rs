//! What another one who watches the same GPUs (DCGM) says of one of them: a second opinion on the same component.
//!
//! NVML is read beside it, and one fault is told once:
//!
//! - What we read ourselves and find in order, the other one only says: it is shown as evidence. It may remember what a
//!   reset has healed long ago.
//! - What we hold against the GPU already gains evidence, and nothing is added.
//! - What we cannot read, or do not look at, counts on its word.

use std::collections::BTreeSet;

use super::watch::Problem;
use crate::model::health::HealthState;

/// How sure a second opinion is that nothing of our own confirms.
const SECOND_HAND: f64 = 0.7;

/// One thing that is said of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Opinion {
    /// What it makes of the GPU at most.
    pub state: HealthState,
    /// Why.
    pub reason: String,
    /// What is recommended.
    pub action: crate::model::health::RecommendedAction,
    /// Who said it and in which words.
    pub evidence: crate::model::health::Evidence,
    /// Checks of our own that look at the same thing.
    pub checks: BTreeSet<String>,
}

/// What one of our own checks has to say of the same thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    /// It was read and is in order.
    Well,
    /// It is held against the GPU.
    Held,
    /// It is not read.
    Unread,
}

impl Opinion {
    /// What of it counts beside our own checks, where the GPU is in `state` by what we know ourselves.
    pub(super) fn counts(&self, state: HealthState, own: impl Fn(&str) -> Own) -> Option<Problem> {
        let ours: Vec<Own> = self.checks.iter().map(|check| own(check)).collect();
        let known =
            ours.contains(&Own::Held) || (!ours.is_empty() && ours.iter().all(|own| *own == Own::Well));
        let adds = self.state > HealthState::Healthy && self.state > state && !known;
        adds.then(|| Problem::new(self.state, self.reason.clone(), self.action).sure(SECOND_HAND))
    }
}

//! What another monitor of the same GPUs (DCGM) reports: a second opinion on the same component.
//!
//! NVML is read as well, and each fault is reported once:
//!
//! - If our own check covers it and is healthy, the opinion is only evidence. DCGM may remember what a reset has
//!   healed.
//! - If our own check has found the same, the opinion is added as evidence only.
//! - If we cannot read it or have no such check, the opinion counts.

use std::collections::BTreeSet;

use super::watch::Problem;
use mainstay_model::health::HealthState;

/// Confidence in a second opinion that no check of our own confirms.
const SECOND_HAND: f64 = 0.7;

/// One opinion on a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Opinion {
    /// The GPU's state, at most.
    pub state: HealthState,
    /// Why.
    pub reason: String,
    /// What is recommended.
    pub action: mainstay_model::health::RecommendedAction,
    /// Its source and message.
    pub evidence: mainstay_model::health::Evidence,
    /// Our own checks that cover the same thing.
    pub checks: BTreeSet<String>,
}

/// The result of one of our own checks on the same thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    /// It was read and is healthy.
    Well,
    /// It has found a problem.
    Held,
    /// It was not read.
    Unread,
}

impl Opinion {
    /// The problem that the opinion adds to our own checks, given that the GPU is in `state` by our own checks.
    pub(super) fn counts(&self, state: HealthState, own: impl Fn(&str) -> Own) -> Option<Problem> {
        let ours: Vec<Own> = self.checks.iter().map(|check| own(check)).collect();
        let known =
            ours.contains(&Own::Held) || (!ours.is_empty() && ours.iter().all(|own| *own == Own::Well));
        let adds = self.state > HealthState::Healthy && self.state > state && !known;
        adds.then(|| Problem::new(self.state, self.reason.clone(), self.action).sure(SECOND_HAND))
    }
}

//! What the checks of a GPU use in addition to its readings, and how one reading is judged.

use super::limits::{DeviceLimits, ExpectedGpus};
use super::read::Sampled;
use super::watch::{CheckResult, Problem};
use crate::state::Hysteresis;

/// What a check uses in addition to the readings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    pub(super) limits: &'a DeviceLimits,
    pub(super) expected: &'a ExpectedGpus,
    /// Number of GPUs that the driver lists.
    pub(super) gpus: usize,
}

impl Rules<'_> {
    /// For what the driver reports explicitly.
    pub(super) fn at_once(&self) -> Hysteresis {
        Hysteresis { worsen_after: 1, recover_after: self.limits.recover_after }
    }

    /// For readings beyond a limit.
    pub(super) fn patient(&self) -> Hysteresis {
        Hysteresis { worsen_after: self.limits.worsen_after, recover_after: self.limits.recover_after }
    }
}

/// The check of the power supply's brake, which affects all GPUs at once.
pub(super) const POWER_BRAKE: &str = "power_brake";

/// Confidence in a judgement based on samples or on an empirical limit.
pub(super) const SAMPLED: f64 = 0.9;

/// Judges a value if it was read.
pub(super) fn check_sample<T>(read: &Sampled<T>, judge: impl FnOnce(&T) -> Option<Problem>) -> CheckResult {
    match read {
        Sampled::Value(value) => CheckResult::from_problem(judge(value)),
        Sampled::NotOffered => CheckResult::Healthy,
        Sampled::Failed(_) => CheckResult::Unread,
    }
}

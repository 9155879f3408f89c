//! What each judgement of a GPU rests on beside the readings, and how one reading is judged.

use super::limits::{DeviceLimits, ExpectedGpus};
use super::read::Read;
use super::watch::{Look, Patience, Problem};

/// What a judgement rests on beside the readings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    pub(super) limits: &'a DeviceLimits,
    pub(super) expected: &'a ExpectedGpus,
    /// GPUs that the driver counts.
    pub(super) gpus: usize,
}

impl Rules<'_> {
    /// Where a rate has to be for a finding to be taken back that began at `limit`.
    pub(super) fn taken_back(&self, limit: f64) -> f64 {
        self.limits.taken_back(limit)
    }

    /// For what the driver says in so many words.
    pub(super) fn at_once(&self) -> Patience {
        Patience { worsen_after: 1, recover_after: self.limits.recover_after }
    }

    /// For what is beyond a limit.
    pub(super) fn patient(&self) -> Patience {
        Patience { worsen_after: self.limits.worsen_after, recover_after: self.limits.recover_after }
    }
}

/// The check of what the power supply does to all GPUs at once.
pub(super) const POWER_BRAKE: &str = "power_brake";

/// How sure a judgement is that rests on samples, or on a limit that is a matter of experience.
pub(super) const SAMPLED: f64 = 0.9;

/// What a reading says, where it was read and where there is such a thing.
pub(super) fn look<T>(read: &Read<T>, judge: impl FnOnce(&T) -> Option<Problem>) -> Look {
    match read {
        Read::Value(value) => Look::of(judge(value)),
        Read::NotOffered => Look::Well,
        Read::Failed(_) => Look::Unread,
    }
}

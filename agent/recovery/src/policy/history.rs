//! Earlier decisions in this job and their outcomes.

use serde::{Deserialize, Serialize};

use crate::policy::Rung;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::Cause;

/// A failure of this job with an earlier decision, and its outcome.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PastFailure {
    /// When it was decided.
    pub decided_at: Mono,
    /// Its cause.
    pub cause: Cause,
    /// The step of the culprit.
    pub step: Option<u64>,
    /// The position of the culprit in its data, if reported.
    pub data: Option<u64>,
    /// How long the attempt had lived.
    pub lived: Span,
    /// The action.
    pub rung: Rung,
    /// The newest step that the job had reached in any attempt when it failed. `None` without heartbeats, or before
    /// the first step.
    pub reached: Option<u64>,
    /// The newest step that restarts were known to return to by then
    /// ([`JobState::committed`](super::JobState::committed)).
    pub committed: Option<u64>,
    /// Whether the culprit sent heartbeats: only then does no step mean no progress.
    pub heartbeats: bool,
    /// From the fault to the first step that all ranks completed after the restart. `None` if there was none, or none
    /// yet.
    pub back_after: Option<Span>,
}

/// Ranks that run longer than this without a step are assumed never to report any.
const COMPARABLE_WITHIN: Span = Span::seconds(600);

/// How far an attempt brought the job, if that can be known.
#[derive(Clone, Copy, Debug)]
pub struct Reached {
    /// The newest step that was reached in any attempt.
    pub step: Option<u64>,
    /// The newest step that restarts are known to return to.
    pub committed: Option<u64>,
    /// Whether the culprit sent heartbeats.
    pub heartbeats: bool,
    /// How long the attempt lived.
    pub lived: Span,
}

impl Reached {
    fn is_comparable(self) -> bool {
        self.heartbeats && (self.step.is_some() || self.lived < COMPARABLE_WITHIN)
    }

    /// Whether this is further than `before`. Steps that are in no checkpoint are lost with the attempt: if it is
    /// known what restarts return to, that counts, otherwise each completed step.
    fn is_beyond(self, before: Reached) -> bool {
        match (self.committed, before.committed) {
            (Some(now), Some(then)) => now > then,
            _ => self.step > before.step,
        }
    }
}

/// How many restarts in a row, up to `now`, did not bring the job further than before. Counting stops where that is
/// unknown.
pub fn without_progress(past: &[PastFailure], now: Reached) -> u32 {
    let mut count = 0;
    let mut later = now;
    for failure in past.iter().rev() {
        let PastFailure { reached: step, committed, heartbeats, lived, .. } = *failure;
        let before = Reached { step, committed, heartbeats, lived };
        if !later.is_comparable() || !before.is_comparable() || later.is_beyond(before) {
            break;
        }
        count += 1;
        later = before;
    }
    count
}

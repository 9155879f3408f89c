//! What was tried before in this job and what came of it.

use serde::{Deserialize, Serialize};

use crate::base::time::{Mono, Span};
use crate::model::verdict::Cause;
use crate::recovery::policy::Rung;

/// A failure of this job that was decided on before, and what came of the decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PastFailure {
    /// When it was decided.
    pub decided_at: Mono,
    /// What it was.
    pub cause: Cause,
    /// The step at which the culprit stood.
    pub step: Option<u64>,
    /// Where in its data the culprit read, if it told.
    pub data: Option<u64>,
    /// How long the attempt had lived.
    pub lived: Span,
    /// What was done about it.
    pub rung: Rung,
    /// The newest step that the job had reached in any attempt when it failed; none without heartbeats, or before the
    /// first.
    pub reached: Option<u64>,
    /// The newest step to which restarts were known to go back by then ([`JobState::committed`](super::JobState::committed)).
    pub committed: Option<u64>,
    /// Whether the culprit sent heartbeats: only then does no step mean no progress.
    pub heartbeats: bool,
    /// From the fault to the first step that all ranks completed after the restart; none if there was none yet, or
    /// none at all.
    pub back_after: Option<Span>,
}

/// Ranks that live longer than this and tell of no step are of those that never do.
const TELLS_WITHIN: Span = Span::seconds(600);

/// How far an attempt brought the job, where that can be told.
#[derive(Clone, Copy, Debug)]
pub struct Reached {
    /// The newest step that was reached in any attempt.
    pub step: Option<u64>,
    /// The newest one to which restarts are known to go back.
    pub committed: Option<u64>,
    /// Whether the culprit sent heartbeats.
    pub heartbeats: bool,
    /// How long the attempt lived.
    pub lived: Span,
}

impl Reached {
    fn can_be_told(self) -> bool {
        self.heartbeats && (self.step.is_some() || self.lived < TELLS_WITHIN)
    }

    /// Whether this is further than `before`. What is in no checkpoint is lost with the attempt: where it is known what restarts
    /// go back to, that counts, and else each step that was completed.
    fn is_beyond(self, before: Reached) -> bool {
        match (self.committed, before.committed) {
            (Some(now), Some(then)) => now > then,
            _ => self.step > before.step,
        }
    }
}

/// How many restarts in a row, up to `now`, did not bring the job further than it had been before. Nothing is counted
/// where it cannot be told.
pub fn without_progress(past: &[PastFailure], now: Reached) -> u32 {
    let mut count = 0;
    let mut later = now;
    for failure in past.iter().rev() {
        let PastFailure { reached: step, committed, heartbeats, lived, .. } = *failure;
        let before = Reached { step, committed, heartbeats, lived };
        if !later.can_be_told() || !before.can_be_told() || later.is_beyond(before) {
            break;
        }
        count += 1;
        later = before;
    }
    count
}

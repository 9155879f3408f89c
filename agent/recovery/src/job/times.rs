//! The summary of a job.

use serde::{Deserialize, Serialize};

use mainstay_checkpoint::advice::Advised;
use mainstay_model::id::Incident;
use mainstay_model::time::Mono;
use mainstay_progress::goodput::TimeAccounting;

/// The times of one failure, for users: all on the host's monotonic clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IncidentTimes {
    /// The failure.
    pub incident: Incident,
    /// Its headline.
    pub headline: String,
    /// The decision, as a sentence.
    pub decision: String,
    /// When it happened.
    pub fault_at: Mono,
    /// When the launcher noticed it.
    pub detected_at: Mono,
    /// When the last process of the failed attempt had ended.
    pub stopped_at: Option<Mono>,
    /// When the action was decided.
    pub decided_at: Option<Mono>,
    /// When the new ranks' processes were created.
    pub started_at: Option<Mono>,
    /// When the last of the new ranks' heartbeat clients connected.
    pub connected_at: Option<Mono>,
    /// When all ranks had completed a step again.
    pub first_step_at: Option<Mono>,
    /// The newest step reached before.
    pub reached_before: Option<u64>,
    /// The first step completed after.
    pub first_step: Option<u64>,
}

/// The summary of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The exit status of the launcher.
    pub exit: i32,
    /// The reason, as a sentence.
    pub reason: String,
    /// How often the ranks were started.
    pub attempts: u32,
    /// The time accounting.
    #[serde(rename = "books")]
    pub accounting: TimeAccounting,
    /// Its failures.
    pub incidents: Vec<IncidentTimes>,
    /// The advised save interval. `None` before it has saved a few times.
    #[serde(default)]
    pub saving: Option<Advised>,
}

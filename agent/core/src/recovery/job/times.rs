//! How a job went.

use serde::{Deserialize, Serialize};

use crate::base::id::Incident;
use crate::base::time::Mono;
use crate::checkpoint::advice::Advised;
use crate::progress::goodput::TimeAccounting;

/// The times of one failure, for people: all on the host's monotonic clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IncidentTimes {
    /// Which failure.
    pub incident: Incident,
    /// What it was, in one line.
    pub headline: String,
    /// What was decided, in plain words.
    pub decision: String,
    /// When it happened.
    pub fault_at: Mono,
    /// When the launcher knew.
    pub detected_at: Mono,
    /// When no process of the failed attempt was left.
    pub stopped_at: Option<Mono>,
    /// When it was decided what to do.
    pub decided_at: Option<Mono>,
    /// When the new ranks' processes were there.
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

/// How a job went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The status with which the launcher exits.
    pub exit: i32,
    /// Why, in plain words.
    pub reason: String,
    /// How often the ranks were started.
    pub attempts: u32,
    /// Where the time went.
    pub books: TimeAccounting,
    /// Its failures.
    pub incidents: Vec<IncidentTimes>,
    /// How often it had better save; none before it has saved a few times.
    #[serde(default)]
    pub saving: Option<Advised>,
}

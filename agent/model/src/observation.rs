//! An event that a sensor of the agent observed on a component: the common form for port flaps, maintenance notices and
//! so on, so that a new sensor needs no new kind of fact.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The component of reports about the hosts of a job.
pub const HOSTS: &str = "hosts";
/// The event for stopping running ranks so that more hosts take part. The job acts on its entry in the journal.
pub const WORLD_GROWS: &str = "world_grows";
/// The event for a lost leader that another host replaces.
pub const LEADER_REPLACED: &str = "leader_replaced";
/// Its value that says whether the host of this journal is the new leader.
pub const LEADS_HERE: &str = "leads_here";

/// An event on a component. The component itself holds the state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observation {
    /// The component: `fabric.mlx5_0/1`.
    pub component: String,
    /// A fixed identifier of the event, whose meaning never changes: `port_down`.
    pub event: String,
    /// Its severity.
    pub weight: Weight,
    /// A description in one sentence.
    pub detail: String,
    /// The readings by name, before and after if both are known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, String>,
}

/// The severity of an observation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    /// Normal operation.
    #[default]
    Info,
    /// Something is wrong.
    Warning,
    /// Something failed.
    Error,
}

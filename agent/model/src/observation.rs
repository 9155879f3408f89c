//! An event that a sensor of the agent observed on a component: the common form for port flaps, maintenance notices and
//! so on, so that a new sensor needs no new kind of fact.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The component of reports about the hosts of a job.
pub const HOSTS: &str = "hosts";
/// The value of [`HostsEvent::LeaderReplaced`] that says whether the host of this journal is the new leader.
pub const LEADS_HERE: &str = "leads_here";

/// An event on the hosts of a job: the [`event`](Observation::event) of observations on [`HOSTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostsEvent {
    /// A start waits for lost hosts.
    HostAwaited,
    /// A launcher took the seat of a lost host.
    HostJoined,
    /// A host that failures implicated has no ranks while another one is free; with `host`, `implicated` and, if it is
    /// known, the host `instead` of it.
    HostAvoided,
    /// Running ranks are stopped so that more hosts take part. The job acts on its entry in the journal.
    WorldGrows,
    /// Hosts that could take part do not.
    WorldStays,
    /// Another host replaces a lost leader.
    LeaderReplaced,
    /// The step from which all ranks go on; with `step` and `attempt`.
    CheckpointChosen,
    /// A host cannot get its shards of a step; with `step`.
    CheckpointNotRestored,
    /// A step of another number of ranks is newer; with `step`.
    CheckpointOfOtherRanks,
    /// The links between the hosts were measured before ranks started; with `hosts` and `links`.
    LinksMeasured,
    /// A host, or the link between two, is slow; with the names in `hosts`.
    LinkSlow,
}

impl HostsEvent {
    /// Its identifier in the journal.
    pub fn as_str(self) -> &'static str {
        match self {
            HostsEvent::HostAwaited => "host_awaited",
            HostsEvent::HostJoined => "host_joined",
            HostsEvent::HostAvoided => "host_avoided",
            HostsEvent::WorldGrows => "world_grows",
            HostsEvent::WorldStays => "world_stays",
            HostsEvent::LeaderReplaced => "leader_replaced",
            HostsEvent::CheckpointChosen => "checkpoint_chosen",
            HostsEvent::CheckpointNotRestored => "checkpoint_not_restored",
            HostsEvent::CheckpointOfOtherRanks => "checkpoint_of_other_ranks",
            HostsEvent::LinksMeasured => "links_measured",
            HostsEvent::LinkSlow => "link_slow",
        }
    }

    /// Whether an observation is of this event.
    pub fn is(self, seen: &Observation) -> bool {
        seen.component == HOSTS && seen.event == self.as_str()
    }

    /// An observation of this event.
    pub fn observed(self, detail: String, values: &[(&str, String)]) -> Observation {
        let weight = match self {
            HostsEvent::HostJoined
            | HostsEvent::WorldGrows
            | HostsEvent::CheckpointChosen
            | HostsEvent::LinksMeasured => Weight::Info,
            HostsEvent::HostAwaited
            | HostsEvent::HostAvoided
            | HostsEvent::WorldStays
            | HostsEvent::LeaderReplaced
            | HostsEvent::CheckpointNotRestored
            | HostsEvent::CheckpointOfOtherRanks
            | HostsEvent::LinkSlow => Weight::Warning,
        };
        Observation {
            component: HOSTS.to_owned(),
            event: self.as_str().to_owned(),
            weight,
            detail,
            values: values.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
        }
    }
}

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

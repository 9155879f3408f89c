//! What a room of the agent saw of a component it watches: the one form in which port flaps, maintenance notices and
//! the like come into the journal, so that a new room needs no new kind of fact.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Something that happened to a component. That it is in some state is the component's to tell; this is what was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observation {
    /// The component that it is about: `fabric.mlx5_0/1`.
    pub component: String,
    /// What happened, in a fixed word that never changes its meaning: `port_down`.
    pub event: String,
    /// How much it matters.
    pub weight: Weight,
    /// What was seen, in one sentence for a person.
    pub detail: String,
    /// The readings by name, before and after where both are known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, String>,
}

/// How much an observation matters to a person.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    /// The normal course of things.
    #[default]
    Info,
    /// Something is not as it should be.
    Warning,
    /// Something failed.
    Error,
}

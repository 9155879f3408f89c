//! Conditions around a job's ranks on a host that may explain why one of them is slow. `host::contention` collects
//! them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::finding::Hint;
use crate::id::Rank;

/// Conditions around a job's ranks on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowdownHints {
    /// The component of the GPU that each rank computes on, if the driver reports it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub devices: BTreeMap<Rank, String>,
    /// Conditions that may slow ranks down.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hints: Vec<Hint>,
    /// Whether a rank's GPUs were busy in the last reading; absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub at_work: BTreeMap<Rank, bool>,
}

impl SlowdownHints {
    /// Whether this adds nothing to `before`: changed readings are not news.
    pub fn is_as(&self, before: &SlowdownHints) -> bool {
        let keys = |of: &SlowdownHints| -> Vec<(Option<String>, String)> {
            of.hints.iter().map(|hint| (hint.device.clone(), hint.about.clone())).collect()
        };
        self.devices == before.devices && self.at_work == before.at_work && keys(self) == keys(before)
    }
}

//! What is known around the ranks of a job on a host that may explain why one of them is slow. `host::contention` makes it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::base::id::Rank;
use crate::model::finding::Hint;

/// What surrounds the ranks of a job on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowdownHints {
    /// The GPU that a rank computes on, as its component is named, where the driver tells.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub devices: BTreeMap<Rank, String>,
    /// What may hold ranks back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hints: Vec<Hint>,
    /// Whether the GPUs that a rank computes on had work when they were last looked at; absent where the driver does not tell.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub at_work: BTreeMap<Rank, bool>,
}

impl SlowdownHints {
    /// Whether this says nothing that `before` did not: readings that moved on are no news.
    pub fn is_as(&self, before: &SlowdownHints) -> bool {
        let keys = |of: &SlowdownHints| -> Vec<(Option<String>, String)> {
            of.hints.iter().map(|hint| (hint.device.clone(), hint.about.clone())).collect()
        };
        self.devices == before.devices && self.at_work == before.at_work && keys(self) == keys(before)
    }
}

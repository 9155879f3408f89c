//! What a host reports to its peers for the placement of replicas: whether it is excluded, and the pipeline stages of
//! its ranks.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// The eligibility of a host as a holder of replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementEligibility {
    /// The reason why it is excluded; `None` if it is eligible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excluded: Option<String>,
    /// The pipeline stages of its ranks, by run id.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub stages: BTreeMap<String, BTreeSet<u32>>,
}

impl PlacementEligibility {
    /// Whether ranks of the other host are in a pipeline stage next to its own, in the same run.
    pub fn is_beside(&self, other: &PlacementEligibility) -> bool {
        let are_beside = |(run, own): (&String, &BTreeSet<u32>)| {
            let theirs = other.stages.get(run);
            own.iter().any(|stage| {
                theirs.is_some_and(|theirs| theirs.iter().any(|other| other.abs_diff(*stage) == 1))
            })
        };
        self.stages.iter().any(are_beside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(run: &str, stages: &[u32]) -> PlacementEligibility {
        PlacementEligibility {
            stages: BTreeMap::from([(run.to_owned(), stages.iter().copied().collect())]),
            ..PlacementEligibility::default()
        }
    }

    #[test]
    fn neighbours_are_hosts_of_an_adjacent_stage_in_the_same_run() {
        let own = stages("run", &[1]);
        assert!(own.is_beside(&stages("run", &[0])) && own.is_beside(&stages("run", &[2, 3])));
        assert!(!own.is_beside(&stages("run", &[1])), "the same stage is not a neighbour");
        assert!(!own.is_beside(&stages("run", &[3])) && !own.is_beside(&stages("another", &[0])));
        assert!(
            !own.is_beside(&PlacementEligibility::default())
                && !PlacementEligibility::default().is_beside(&own)
        );
    }
}

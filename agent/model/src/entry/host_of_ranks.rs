//! The hosts of the ranks of an attempt.

use serde::{Deserialize, Serialize};

use crate::id::Rank;

/// A host of the job with its ranks in an attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostOfRanks {
    /// Its name.
    pub host: String,
    /// Its node rank.
    pub node_rank: u32,
    /// Its first rank.
    pub first_rank: Rank,
    /// The number of its ranks.
    pub ranks: u32,
}

impl HostOfRanks {
    /// Whether this rank ran on the host.
    pub fn has(&self, rank: Rank) -> bool {
        (self.first_rank.0..self.first_rank.0.saturating_add(self.ranks)).contains(&rank.0)
    }

    /// The host of a rank.
    pub fn find(hosts: &[HostOfRanks], rank: Rank) -> Option<&HostOfRanks> {
        // They are in the order of their ranks, and there may be thousands.
        let after = hosts.partition_point(|host| host.first_rank <= rank);
        hosts.get(after.checked_sub(1)?).filter(|host| host.has(rank))
    }
}

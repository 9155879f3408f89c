//! The messages that are not chunks or manifests, as JSON. Fields that a later version adds are passed over.

use mainstay_core::checkpoint::eligibility::PlacementEligibility;
use mainstay_core::checkpoint::inventory::{Medium, Shard};
use mainstay_core::failure::repeats::RemoteFailure;
use serde::{Deserialize, Serialize};

use super::withdrawal::WithdrawalKey;

/// What is missing of a shard that is offered.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Wanted {
    /// Numbers of chunks.
    pub(crate) chunks: Vec<u32>,
    /// Chunks that may be on their way at once on one connection.
    pub(crate) credits: u32,
}

/// A shard is asked for, or a part of it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Get {
    pub(crate) root: String,
    /// The first chunk.
    pub(crate) from: u32,
    /// The chunk after the last; without it, all that follow.
    pub(crate) to: Option<u32>,
}

/// What an agent tells of itself and of what it has.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Inventory {
    /// Its version of Mainstay.
    pub software: String,
    /// What fails together with it.
    pub domain: String,
    /// Bytes of replicas that it holds.
    pub used: u64,
    /// Bytes that it may hold.
    pub quota: u64,
    /// What lies there.
    pub copies: Vec<Held>,
    /// How it stands where others choose who keeps their replicas.
    #[serde(default)]
    pub standing: PlacementEligibility,
    /// How jobs failed there lately.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<RemoteFailure>,
}

impl Inventory {
    /// Why it is no place for replicas; none where it is one.
    pub(super) fn excluded(&self) -> Option<&str> {
        self.standing.excluded.as_deref()
    }
}

/// One copy that an agent has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Held {
    /// Of what.
    pub shard: Shard,
    /// Where it lies.
    pub medium: Medium,
    /// Whether ranks of its own host made it.
    pub own: bool,
    /// Whether its bytes are known to be right.
    pub verified: bool,
    /// Who should have saved the same: the name of their group, and the root over what this rank saved of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alike: Option<(String, String)>,
}

/// To which step does a job go back?
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Decide {
    /// The job, by its run id.
    pub(crate) run: String,
    /// Who asks.
    pub(crate) asker: String,
    /// Copies that the asker found to be bad, by holder and root.
    pub(crate) distrusted: Vec<(String, String)>,
}

/// Replicas are not needed any more.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Withdrawal {
    pub(crate) roots: Vec<String>,
    /// The secrets to their locks, one for each root.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) secrets: Vec<String>,
    /// A person wants the step gone: what ranks of that host have written of it themselves goes too.
    #[serde(default)]
    pub(crate) everything: bool,
}

impl Withdrawal {
    /// Replicas that this agent has put there, or a part of which; its key has the secrets.
    pub(crate) fn of<'s>(shards: impl IntoIterator<Item = &'s Shard>, key: &WithdrawalKey) -> Withdrawal {
        let both = shards.into_iter().map(|shard| (shard.root.clone(), key.secret(shard.whole())));
        let (roots, secrets) = both.unzip();
        Withdrawal { roots, secrets, everything: false }
    }
}

/// How many of them were there.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Dropped {
    pub(crate) count: usize,
    /// How many stay, for another host has put them there.
    #[serde(default)]
    pub(crate) refused: usize,
}

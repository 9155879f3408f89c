//! The messages other than chunks and manifests, as JSON. Unknown fields of later versions are ignored.

use mainstay_checkpoint::eligibility::PlacementEligibility;
use mainstay_checkpoint::inventory::{Medium, Shard};
use mainstay_diagnosis::repeats::RemoteFailure;
use serde::{Deserialize, Serialize};

use super::withdrawal::WithdrawalKey;

/// The missing chunks of an offered shard.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct MissingChunks {
    pub(crate) chunks: Vec<u32>,
    /// Maximum number of chunks in flight on one connection.
    pub(crate) credits: u32,
}

/// Requests a shard or a part of it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Get {
    pub(crate) root: String,
    /// The first chunk.
    pub(crate) from: u32,
    /// The chunk after the last; none: up to the end.
    pub(crate) to: Option<u32>,
}

/// An agent's report about itself and its copies.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Inventory {
    /// Its version of Mainstay.
    pub software: String,
    /// Its failure domain.
    pub domain: String,
    /// Bytes of replicas that it holds.
    pub used: u64,
    /// Limit for the bytes of replicas.
    pub quota: u64,
    /// The copies that it has.
    pub copies: Vec<StoredCopy>,
    /// Its eligibility as a holder of replicas.
    #[serde(default)]
    pub standing: PlacementEligibility,
    /// Recent failures of jobs on it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<RemoteFailure>,
}

impl Inventory {
    /// Why it is excluded as a holder of replicas; none if it is not excluded.
    pub(super) fn excluded(&self) -> Option<&str> {
        self.standing.excluded.as_deref()
    }
}

/// One copy that an agent has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StoredCopy {
    /// The shard.
    pub shard: Shard,
    /// The medium.
    pub medium: Medium,
    /// Whether a rank of its own host saved it.
    pub own: bool,
    /// Whether its bytes are verified.
    pub verified: bool,
    /// Ranks that should have saved the same: the name of their group, and the root over what this rank saved of it.
    #[serde(default, rename = "alike", skip_serializing_if = "Option::is_none")]
    pub shared_content: Option<(String, String)>,
}

/// Asks to which step a job goes back.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Decide {
    /// The run id of the job.
    pub(crate) run: String,
    /// The asking host.
    pub(crate) asker: String,
    /// Copies that the asking host found damaged, by holder and root.
    pub(crate) distrusted: Vec<(String, String)>,
}

/// Withdraws replicas.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Withdrawal {
    pub(crate) roots: Vec<String>,
    /// The secrets for their locks, one for each root.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) secrets: Vec<String>,
    /// A user deletes the step: shards that ranks of that host have written are deleted too.
    #[serde(default)]
    pub(crate) everything: bool,
}

impl Withdrawal {
    /// Withdraws replicas that this agent has sent, completely or partly; its key has the secrets.
    pub(crate) fn new<'s>(shards: impl IntoIterator<Item = &'s Shard>, key: &WithdrawalKey) -> Withdrawal {
        let both = shards.into_iter().map(|shard| (shard.root.clone(), key.secret(shard.whole())));
        let (roots, secrets) = both.unzip();
        Withdrawal { roots, secrets, everything: false }
    }
}

/// The result of a withdrawal.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Dropped {
    pub(crate) count: usize,
    /// Number of replicas that stay because another host has sent them.
    #[serde(default)]
    pub(crate) refused: usize,
}

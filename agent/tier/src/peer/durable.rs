//! Interface to storage that outlives the hosts. The implementation is outside this crate because
//! it may need a runtime, which the tier does not have.

use std::fmt::Debug;
use std::time::Duration;

use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey};

use crate::peer::client::Target;
use crate::peer::error::PeerError;

/// Transfers from this host since the start of its agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurableFigures {
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Failed tries.
    pub failures: u64,
    /// Time that the upload of this host's shards of the last step took.
    pub last_step_took: Option<Duration>,
}

/// Storage for steps that the hosts may no longer have. Calls may block.
pub trait Durable: Debug + Send + Sync {
    /// The name of the storage: the holder of its copies.
    fn name(&self) -> String;

    /// The shards of all whole steps, as of the last listing.
    fn shards(&self) -> Vec<Shard>;

    /// Transfers from this host.
    fn figures(&self) -> DurableFigures;

    /// Lists the shards of a run.
    ///
    /// # Errors
    /// The storage does not answer; the previous listing stays.
    fn refresh(&self, run_id: &str) -> Result<(), PeerError>;

    /// Fetches a shard and verifies all bytes with its manifest. Returns the number of bytes.
    fn get(&self, shard: &Shard, target: &mut dyn Target) -> Result<u64, PeerError>;

    /// Deletes a step. Returns the number of its shards.
    ///
    /// # Errors
    /// It exists and cannot be deleted.
    fn remove(&self, key: &StepKey) -> Result<usize, PeerError>;
}

/// The stored shards, as copies that any host may fetch.
pub(crate) fn copies_in(durable: &dyn Durable) -> impl Iterator<Item = Copy> {
    let holder = durable.name();
    durable.shards().into_iter().map(move |shard| Copy {
        holder: holder.as_str().into(),
        medium: Medium::Durable,
        own: false,
        verified: true,
        shard,
    })
}

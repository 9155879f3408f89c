//! Storage that outlives the hosts, as the service among peers sees it. What it is made of is not the tier's business: it may need
//! a runtime, which the tier does not have.

use std::fmt::Debug;
use std::time::Duration;

use mainstay_core::checkpoint::inventory::{Copy, Medium, Shard, StepKey};

use super::client::Target;
use super::error::PeerError;

/// What went there from this host since its agent's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Bytes.
    pub bytes_sent: u64,
    /// Tries that failed.
    pub failures: u64,
    /// How long this host's shards of the last step took to come there.
    pub last_step_took: Option<Duration>,
}

/// Where steps lie that no host may have any more. Calls may block.
pub trait Durable: Debug + Send + Sync {
    /// What it is called: the holder of its copies.
    fn name(&self) -> String;

    /// The shards of all whole steps, as they were when it was last looked.
    fn shards(&self) -> Vec<Shard>;

    /// What went there.
    fn figures(&self) -> Figures;

    /// Looks what lies there of a run.
    ///
    /// # Errors
    /// It does not answer; what was known of it still is.
    fn refresh(&self, run_id: &str) -> Result<(), PeerError>;

    /// Brings a shard; its bytes, all of which were compared with its manifest.
    ///
    /// # Errors
    /// It cannot be had, or is not what was sealed.
    fn get(&self, shard: &Shard, target: &mut dyn Target) -> Result<u64, PeerError>;

    /// Deletes a step; how many shards there were.
    ///
    /// # Errors
    /// It is there and cannot be deleted.
    fn remove(&self, key: &StepKey) -> Result<usize, PeerError>;
}

/// What lies there, as copies that any host may take.
pub(crate) fn copies(durable: &dyn Durable) -> impl Iterator<Item = Copy> {
    let holder = durable.name();
    durable.shards().into_iter().map(move |shard| Copy {
        holder: holder.as_str().into(),
        medium: Medium::Durable,
        own: false,
        verified: true,
        shard,
    })
}

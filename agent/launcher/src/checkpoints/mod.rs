//! Checkpoints of the ranks of this host: the memory for them, copies on other hosts, and the trainer's own files.

mod bring;
mod copied_step;
pub(crate) mod doubtful;
pub mod lineage;
pub(crate) mod moving;
pub mod replicas;
mod reseat;
pub mod sealing;

use mainstay_model::id::Attempt;
use mainstay_tier::pool::PoolOwner;

use moving::Moving;
use replicas::Replicas;
use sealing::{Sealing, Starting};

/// Checkpoints of the ranks of this host.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    /// Keeps the checkpoints that ranks copy to memory.
    pub(crate) pool_owner: Option<PoolOwner>,
    /// Copies of checkpoints on the job's other hosts; none for a job of one host.
    pub(crate) replicas: Option<Replicas>,
    /// The trainer's own checkpoints; none where none are watched.
    pub(crate) sealing: Option<Sealing>,
    /// The start that waits for a decision about them.
    pub(crate) starting: Option<Starting>,
    /// The memory for checkpoints, while this host gets other ranks.
    pub(crate) moving: Option<Moving>,
    /// The attempt in which a silent file system of the checkpoints was reported.
    pub(crate) silence_reported: Option<Attempt>,
}

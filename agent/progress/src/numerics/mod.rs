//! The judge of a job's numbers: losses, gradient norms and digests of parameters, step by step.
//!
//! - **Spikes** ([`spike`]): robust, against the job's own last steps.
//! - **Not a number**: on all ranks the cause is the training's numerics; on one of several ranks that rank is
//!   suspicious.
//! - **Silent corruption** ([`replicas`]): replicas of the same parameters must have the same digest. The majority
//!   names the rank; with two replicas the faulty one is unknown. Checkpoints after the last step at which they
//!   agreed are doubtful.
//! - **Checkpoints that differ** ([`shards`]): the same for what was saved, if ranks have always saved the same.
//!
//! NaN checks alone would find about one in a hundred silent corruptions: hence digests.

mod judge;
mod replicas;
mod shards;
mod spike;

pub use judge::{Anomaly, Judge, Numbers};

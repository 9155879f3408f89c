//! The judge of a job's numbers: losses, gradient norms and digests of parameters, step by step.
//!
//! - **Spikes** ([`spike`]): robust, against the job's own last steps.
//! - **Not a number**: on all ranks it is the training's numerics; on one of several ranks it is that rank that is suspicious.
//! - **Silent corruption** ([`replicas`]): replicas of the same parameters must have the same digest. The majority names the rank;
//!   of two replicas neither can be believed. Checkpoints after the last step at which they agreed are doubtful.
//! - **Checkpoints that differ** ([`shards`]): the same of what was saved, where ranks have always saved the same.
//!
//! NaN checks alone would see about one in a hundred of silent corruptions: hence digests.

mod judge;
mod replicas;
mod shards;
mod spike;

pub use judge::{Judge, Numbers, Sick};

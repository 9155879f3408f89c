//! Checkpoints in storage that outlives the hosts: object stores and directories, by one URL.
//!
//! [`bucket`] opens it and defines the errors; [`parts`] is an upload in parts that can resume after a kill; [`upload`]
//! uploads one shard and completes a step of shards, [`listing`] lists runs and steps, [`fetch`] fetches a shard;
//! [`tier`] does all that in the background of an agent, [`direct`] with blocking calls.
//!
//! Three rules, as everywhere in the tier: a step exists when its record does, which is written last; bytes that do not match
//! their manifest are never used; no rule deletes the newest whole step.
//!
//! It is a separate crate because an object store needs a runtime, and the tier has none. Its interface to the tier is not `async`.

pub mod bucket;
pub mod direct;
pub mod fetch;
pub mod listing;
pub mod parts;
pub mod tier;
pub mod upload;

pub use bucket::{Bucket, DurableError};
pub use tier::{Settings, Status, Tier};

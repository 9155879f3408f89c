//! Checkpoints in storage that outlives the hosts: object stores and directories, by one URL.
//!
//! [`bucket`] opens it and says what may go wrong; [`parts`] is an upload in parts that is gone on with after a kill; [`upload`]
//! brings one shard there and makes a step of shards, [`listing`] tells what lies there, [`fetch`] gets a shard back;
//! [`tier`] does all that behind an agent's back, [`direct`] for somebody who waits.
//!
//! Three rules, as everywhere in the tier: a step is there when its record is, which is written last; nothing is believed that
//! is not what its manifest says; the newest whole step is deleted by no rule.
//!
//! It is a crate of its own because an object store needs a runtime, and the tier has none. Nothing here is `async` to others.

pub mod bucket;
pub mod direct;
pub mod fetch;
pub mod listing;
pub mod parts;
pub mod tier;
pub mod upload;

pub use bucket::{Bucket, DurableError};
pub use tier::{Settings, Status, Tier};

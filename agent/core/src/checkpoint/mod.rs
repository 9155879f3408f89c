//! Decisions about checkpoints: where replicas go, which step is whole, what is restored from where, what may be deleted, how often
//! is saved.
//!
//! Everything here is computed from what holders tell of their copies; every agent that knows the same copies comes to
//! the same answers.

pub mod advice;
pub mod archive;
pub mod backoff;
pub mod cache;
pub mod copied;
pub mod copies;
pub mod decision;
pub mod divergence;
pub mod durable;
pub mod eligibility;
pub mod files;
pub mod interval;
pub mod inventory;
pub mod lag;
pub mod lineage;
pub mod owner;
pub mod parity;
pub mod placement;
pub mod plan;
pub mod prepared_memory;
pub mod replication_cost;
pub mod replicator;
pub mod retention;
pub mod tiers;

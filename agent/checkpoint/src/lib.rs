//! Decisions about checkpoints: where replicas go, which steps are whole, what is restored from where, what may be
//! deleted, how often to save.
//!
//! Everything here is computed from the copies that holders report. Agents that know the same copies get the same
//! results.
#![forbid(unsafe_code)]

pub mod advice;
pub mod archive;
pub mod backoff;
pub mod cache;
pub mod choice;
pub mod copied_step;
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
pub mod spares;
pub mod tiers;

//! Decisions about checkpoints: where replicas go, which step is whole, what is restored from where, what may be deleted, how often
//! is saved.
//!
//! Everything here is computed from what holders tell of their copies; every agent that knows the same copies comes to
//! the same answers.

pub mod decision;
pub mod durable;
pub mod interval;
pub mod inventory;
pub mod placement;
pub mod plan;
pub mod retention;
pub mod tiers;

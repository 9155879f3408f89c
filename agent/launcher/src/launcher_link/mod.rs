//! The link between launcher and agent.

mod absence;
pub mod agent;
pub mod checkpoint;
pub mod handover;
pub mod lent_files;
pub mod trust;
pub mod wire;

//! The link between launcher and agent.

mod absence;
pub mod checkpoint;
mod exchange;
pub mod handover;
pub mod lent_files;
pub mod stream;
pub mod trust;
pub mod wire;

pub(crate) use exchange::AgentLink;

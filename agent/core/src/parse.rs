//! Text to facts. Total over every input: what is not understood is no fact, and no text makes it fail.

pub mod bucket;
pub mod host;
pub mod kmsg;
pub mod log;
pub mod nvidia;
pub mod sysfs;

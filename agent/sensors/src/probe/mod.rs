//! Code that runs in a child process because it may hang or crash: calls into vendors' libraries, requests to
//! network file systems. The parent (`source::device`, `source::host`) waits for a line on a pipe, with a deadline, and can
//! abandon the child.

pub mod dcgm;
pub mod deep;
pub mod mount;
pub mod nvml;

/// The hidden subcommand with which the agent starts it.
pub const SUBCOMMAND: &str = "probe";

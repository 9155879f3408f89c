//! What the agent and the launcher read: `source` reads heartbeat pages, host, network, kernel log, devices; `probe` makes
//! calls that may hang or crash, in a child process.

pub mod probe;
pub mod source;

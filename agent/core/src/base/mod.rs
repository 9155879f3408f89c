//! Time, identifiers, units, counters and text escaping. No domain knowledge.

pub mod counter;
pub mod escape;
pub mod id;
pub mod pci;
pub mod redact;
pub mod time;
pub mod timeline;
pub mod units;

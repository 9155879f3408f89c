//! Parsers from text to facts. They accept any input: unknown text yields no fact and never an error.

pub mod bucket;
pub mod error_file;
mod header;
pub mod host;
pub mod hostlist;
pub mod ipmi;
pub mod journal;
pub mod kmsg;
pub mod log;
pub mod mounts;
pub mod nvidia;
pub mod pci_config;
mod prefilter;
pub mod proc;
pub mod prometheus;
mod record;
pub mod sysfs;
pub mod systemd;
pub mod tcp;

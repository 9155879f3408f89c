//! Text to facts. Total over every input: what is not understood is no fact, and no text makes it fail.

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
pub mod proc;
pub mod prometheus;
mod record;
mod sieve;
pub mod sysfs;
pub mod systemd;

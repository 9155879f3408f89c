//! The host without its accelerators: operating system, network, cloud notices, kernel reports, preflight.

pub mod cloud;
pub mod contention;
pub mod fabric;
pub mod kernel_reports;
pub mod os;
pub mod preflight;

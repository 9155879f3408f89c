//! The crate as its callers use it.
//!
//! One executable for all tests: each module is a subject.
#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "tests read files, and a panic in a test is its report"
)]

mod group_of_one;
mod hosts_checkpoints;
mod hosts_lost;
mod hosts_resize;
mod hosts_seats;
mod job_of_hosts;
mod support;

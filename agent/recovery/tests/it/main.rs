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

mod job;
mod job_hangs;
mod job_in_process;
mod job_late;
mod job_orders;
mod job_policy;
mod job_progress;
mod ladder;
mod lost_peer;
mod support;

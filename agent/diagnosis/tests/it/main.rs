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

mod attribution_cases;
mod attribution_catalog;
mod attribution_lines;
mod attribution_robust;
mod client_modules;
mod consequences;
mod healthy_reports;
mod healthy_runs;
mod labelled;

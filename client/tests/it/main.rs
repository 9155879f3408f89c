//! The heartbeat client on real pages.
//!
//! One executable for all of them: each module is a subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

mod c_abi;
mod device_time;
mod no_system_calls;
mod opening;
mod quiet;
mod support;
mod threads;

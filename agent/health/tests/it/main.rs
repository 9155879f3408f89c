//! Readings and lines in, states of components out.
//!
//! One executable for all tests: each module is a subject.
#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "tests read files, and a panic in a test is its report"
)]

mod catalog;
mod cloud;
mod dcgm;
mod device;
mod device_beside;
mod device_events;
mod device_presence;
mod device_readings;
mod device_restarts;
mod fabric;
mod fabric_errors;
mod healthy_day;
mod healthy_day_devices;
mod healthy_host;
mod host;
mod host_system;
mod hostile;
mod kernel_drivers;
mod kernel_field;
mod kernel_hosts;
mod kernel_lines;
mod kernel_log;
mod kernel_unseen;
mod kernel_wild;
mod preflight;
mod support;
mod tpu;
mod xid_codes;

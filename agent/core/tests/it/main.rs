//! The core as its callers use it: facts in, verdicts and decisions out.
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
mod catalog;
mod checkpoint;
mod checkpoint_parity;
mod client_modules;
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
mod flight;
mod hang;
mod hang_healthy;
mod healthy_day;
mod healthy_day_devices;
mod healthy_host;
mod healthy_runs;
mod host;
mod host_system;
mod hostile;
mod hosts_checkpoints;
mod hosts_lost;
mod hosts_resize;
mod hosts_seats;
mod job;
mod job_hangs;
mod job_in_process;
mod job_late;
mod job_of_hosts;
mod job_orders;
mod job_progress;
mod kernel_drivers;
mod kernel_field;
mod kernel_hosts;
mod kernel_lines;
mod kernel_log;
mod kernel_unseen;
mod kernel_wild;
mod labelled;
mod ladder;
mod lost_peer;
mod nccl_ras;
mod nvrx;
mod preflight;
mod running;
mod support;
mod tpu;
mod xid_codes;

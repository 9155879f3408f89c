//! The agent's parts with real processes, files and sockets, and the built program as people run it.
//!
//! One executable for all of them: each module has one subject.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a panic in a test is its report")]

mod acceptance;
mod api;
mod attribute;
mod certs;
mod check;
mod cli;
mod cloud;
mod config;
mod cuda;
mod dcgm;
mod devices;
mod fabric;
mod goodput;
mod gpu_drill;
mod gpu_reset;
mod hooks;
mod host_source;
mod host_system;
mod hostile_texts;
mod hosts_etcd;
mod hosts_strangers;
mod hosts_streams;
mod hosts_upgrade;
mod journal;
mod journal_crash;
mod journal_document;
mod journal_roundtrip;
mod journald;
mod journald_real;
mod kernel_log;
mod nccl_ras;
mod nvrx;
mod operators;
mod readiness;
mod silent_mounts;
mod snapshots;
mod support;
mod tpu;
mod two_users;
mod unread;

//! The API from the caller's side: a real server on real sockets, real clients, real snapshots.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

mod checkpoints;
mod events;
mod explain;
mod grpc_health;
mod health;
mod http;
mod json;
mod metrics;
mod preflight;
mod prometheus;
mod reflection;
pub(crate) mod server;
mod socket;

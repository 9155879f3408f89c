//! GPUs by way of the real probe, the real NVML wrapper and a library of our own in place of NVIDIA's.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

mod agent;
mod foreign;
mod hanging;
mod host;
mod libraries;
mod odd;
mod readings;
mod trouble;

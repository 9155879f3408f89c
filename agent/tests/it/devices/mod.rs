//! GPUs with the real probe, the real NVML wrapper and a fake library.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

mod agent;
mod foreign;
mod hanging;
mod host;
mod libraries;
mod odd;
mod readings;
mod trouble;

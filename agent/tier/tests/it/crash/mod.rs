//! Power cuts: every operation on the disk is recorded, and the disk is then put into a state that a cut at any point may leave. What was
//! not synced may be there, be torn, or be missing, in any combination; what was synced is there. In every state, each offered step
//! is exactly what was saved, and no acknowledged step is lost.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use crate::common;
mod cut;
mod replicas;
mod steps;

/// Number of cuts per scene, each with another choice of what reached the disk: more than a hundred thousand over all scenes in a release
/// build (`cargo test --release -p mainstay-tier --test it crash`); fewer in debug builds, where checksums are not optimized.
const CUTS_PER_SCENE: usize = if cfg!(debug_assertions) { 1_000 } else { 21_000 };

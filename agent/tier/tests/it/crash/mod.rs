//! Power cuts: every operation on the disk is recorded, and the disk is then made as a cut at any point may leave it. What was not
//! synced may be there, be torn, or be missing, in any combination; what was synced is there. Whatever is left, no step is offered that
//! is not exactly what was saved, and none that was acknowledged is lost.

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

/// Points of a cut, each with another choice of what reached the disk: more than a hundred thousand over all scenes in a release
/// build (`cargo test --release -p mainstay-tier --test it crash`), a share of them where checksums are not optimised.
const CUTS_PER_SCENE: usize = if cfg!(debug_assertions) { 1_000 } else { 21_000 };

//! Steps of a job: stragglers, numerical errors, goodput, and what is kept for the next run.
#![forbid(unsafe_code)]

pub mod goodput;
pub mod memory;
pub mod monitor;
pub mod numerics;
pub mod parallelism;
pub mod straggler;

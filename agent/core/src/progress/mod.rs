//! Steps of a job: stragglers, numbers that go wrong, goodput, and what is kept for the next run.

pub mod goodput;
pub mod memory;
pub mod monitor;
pub mod numerics;
pub mod parallelism;
pub mod straggler;

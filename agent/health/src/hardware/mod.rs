//! GPUs, TPUs, DCGM, and what their error codes mean.

pub mod catalog;
pub mod dcgm;
pub mod gpu;
pub mod tpu;

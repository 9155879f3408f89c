//! Simulated training jobs that test the judges of the core: meshes of up to 131,072 ranks with heavy-tailed noise,
//! lost reports and silent hosts. The crate has no I/O, no clock and no threads. The same seed gives the same job.
#![forbid(unsafe_code)]

pub mod course;
pub mod crowd;
pub mod hang;
pub mod mesh;
pub mod productive;
pub mod random;
pub mod silence;
pub mod slow;
pub mod trace;

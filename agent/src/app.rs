//! Floor 5. The wiring: start, supervise, drain in order.

mod job;

pub use job::{JobPlan, run_job};

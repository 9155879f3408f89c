//! Recovery of one job: its state machine, the policy, restarts in process.
#![forbid(unsafe_code)]

pub mod in_process;
pub mod job;
pub mod policy;
pub mod protocol;

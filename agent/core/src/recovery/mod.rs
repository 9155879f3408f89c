//! Recovery from failures: the job's state machine, the policy, in-process restarts.

pub mod hosts;
pub mod in_process;
pub mod job;
pub mod policy;

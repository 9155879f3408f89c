//! What is done about a failure: the job's state machine, the policy, restarts in process.

pub mod in_process;
pub mod job;
pub mod policy;

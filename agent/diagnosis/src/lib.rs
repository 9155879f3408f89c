//! Why an attempt failed: on which rank the failure started, whose fault it was, and with what confidence.
#![forbid(unsafe_code)]

pub mod attribution;
pub mod diagnose;
pub mod failure_rate;
pub mod fingerprint;
pub mod host_evidence;
pub mod line_times;
pub mod progress_rule;
pub mod repeats;
pub mod root_rank;
pub mod traceback_tail;
pub mod unrunnable;

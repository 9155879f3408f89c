//! Why an attempt failed: which rank began it, whose fault it was, and how sure that is.

pub mod attribution;
pub mod diagnose;
pub mod failure_rate;
pub mod fingerprint;
pub mod host_evidence;
pub mod line_times;
pub mod repeats;
pub mod root_rank;
pub mod traceback_tail;
pub mod unrunnable;

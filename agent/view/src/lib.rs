//! The read side: the state of a host and its jobs, the incident report, replays, summaries.
#![forbid(unsafe_code)]

pub mod convert;
pub mod explain;
pub mod goodput;
pub mod incident_report;
pub mod node;
pub mod otlp;
pub mod placement;
pub mod progress;
pub mod replay;
pub mod step_rate;
pub mod summary;

//! Identifiers, time, units, and the types of the journal: facts, findings, verdicts, health. Data only; nothing is
//! judged here.
#![forbid(unsafe_code)]

pub mod component_id;
pub mod counter;
pub mod entry;
pub mod escape;
pub mod fault_code;
pub mod finding;
pub mod hang;
pub mod health;
pub mod host_context;
pub mod id;
pub mod kernel;
pub mod observation;
pub mod operator;
pub mod pci;
pub mod policy;
pub mod redact;
pub mod repeats;
pub mod report;
pub mod rung;
pub mod slowdown_hints;
pub mod staleness;
pub mod state_since;
pub mod time;
pub mod timeline;
pub mod units;
pub mod verdict;

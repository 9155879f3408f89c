//! The types of the journal: facts, findings, verdicts, health. Data only; nothing is judged here.

pub mod component_id;
pub mod entry;
pub mod finding;
pub mod hang;
pub mod health;
pub mod host_context;
pub mod kernel;
pub mod messages;
pub mod observation;
pub mod operator;
pub mod policy;
pub mod repeats;
pub mod report;
pub mod rung;
pub mod slowdown_hints;
pub mod staleness;
pub mod state_since;
pub mod verdict;

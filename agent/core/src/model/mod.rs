//! The words of the journal: facts, findings, verdicts, health. Data only; nothing is judged here.

pub mod entry;
pub mod finding;
pub mod health;
pub mod host_context;
pub mod kernel;
pub mod messages;
pub mod observation;
pub mod operator;
pub mod report;
pub mod staleness;
pub mod state_since;
pub mod verdict;

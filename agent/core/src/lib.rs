//! The thinking of Mainstay: facts become verdicts, verdicts become decisions.
//!
//! Pure by construction: no I/O, no clock, no threads, no async. Time comes in as an argument, so that the same
//! code runs in the agent, in a replay of last night's incident and in a simulation of many thousand ranks.
//!
//! Modules in reading order; each uses only those above it.
#![forbid(unsafe_code)]

pub mod entry;
pub mod health;
pub mod host;
pub mod id;
pub mod settings;
pub mod time;
pub mod verdict;
pub mod view;

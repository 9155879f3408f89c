//! The driver of the end-to-end scenarios: functions to start real jobs of the built program, to follow their
//! journals, to inject faults and to check what is left.
//!
//! Nothing here sleeps to let time pass: it waits for events (a change of a journal or file, the end of a process),
//! and each wait has a deadline that fails with the story so far.

#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

mod agent;
pub mod documents;
mod end;
mod job;
pub mod journal;
mod plan;
pub mod processes;
mod program;
mod stage;
mod terminal;
mod waiting;

pub use agent::Agent;
pub use end::End;
pub use job::{Job, Started};
pub use plan::Plan;
pub use program::{
    as_unprivileged, has_client, has_torch, is_root, mainstay, python, python_with_frameworks, skipped,
};
pub use stage::Stage;
pub use terminal::Terminal;
pub use waiting::{DEADLINE, Waiting};

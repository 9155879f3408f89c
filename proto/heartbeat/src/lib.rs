//! The heartbeat page: one small shared file per rank, through which training reports its progress.
//!
//! The launcher makes a page with [`format()`] and publishes it as a file on tmpfs. The client in the rank
//! maps it and writes through a [`Writer`]; readers map it read-only and read through a [`Page`]. There is no other
//! channel: no socket, no reply, nothing that either side could wait for.
//!
//! What both sides may rely on:
//!
//! - A writer that dies between any two of its stores leaves the last complete beat readable.
//! - A reader never waits for the writer, never loops without bound, and survives arbitrary bytes.
//! - Words are atomic and little-endian. Time is `CLOCK_MONOTONIC` in nanoseconds and is passed as an argument.
//!
//! This crate makes no system call and reads no clock: the caller maps the file, rings the doorbell and reads the
//! clock. `docs/reference/heartbeat-page.md` has the layout, byte by byte.

mod beat;
mod collective;
mod data;
mod error;
mod format;
mod identity;
pub mod layout;
mod lifeline;
mod note;
mod page;
#[cfg(not(all(test, loom)))]
mod raw;
mod record;
mod role;
mod save;
mod section;
mod total_steps;
mod words;
mod writer;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod document_tests;
#[cfg(test)]
mod fresh;
#[cfg(test)]
mod loom_tests;

pub use beat::{Beat, OpenSection};
pub use collective::{Collective, Operation, OperationKind};
pub use error::LayoutError;
pub use format::{PageSpec, format};
pub use identity::{Claim, Claimant, Identity, Refusal, RefusalReason};
pub use layout::{MAJOR, MINOR, PAGE_BYTES};
pub use note::{ExitKind, ExitNote, Note};
pub use page::{Counters, Page};
pub use record::{Drained, SectionTime, StepRecord};
pub use role::Role;
pub use save::{SaveRequest, write_save_due};
pub use section::SectionId;
pub use words::PageWords;
pub use writer::{Claiming, Measures, Writer, Writing};

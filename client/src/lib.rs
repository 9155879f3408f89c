//! The heartbeat client that is linked into training.
//!
//! ```no_run
//! let client = mainstay_client::Client::from_env();
//! let forward = client.intern("forward");
//! for step in 0..1000 {
//!     client.enter(forward);
//!     // ...
//!     client.leave(forward);
//!     client.step(step);
//! }
//! client.close();
//! ```
//!
//! What training may rely on:
//!
//! - Without a page (no `MAINSTAY_PAGE`, or one that cannot be used) every call is a no-op, and nothing is printed.
//! - No call fails, panics, blocks or waits for another process: launcher and agent may be stopped or gone.
//! - A beat, a step, a section's start and end make no system call and no allocation.
//! - A forked child (a data loader's worker) never beats for its parent. Its copy of the client is a no-op; it may
//!   open another page.
//! - Any thread may call. If two call at the same instant, one beat may be dropped and counted.
//!
//! Sections belong to the process, not to a thread: they are one stack. Leaving a section also ends those entered after
//! it and not left; leaving one that is not open is ignored and counted.

mod attach;
mod client;
mod clock;
mod error;
pub mod ffi;
mod lifeline;
mod mapping;
mod process;
mod token;

pub use client::{Client, PAGE_VARIABLE, SectionGuard};
pub use error::OpenError;
pub use mainstay_heartbeat::{Collective, ExitKind, Measures, Note, Operation, OperationKind, SectionId};

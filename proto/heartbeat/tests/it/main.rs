//! The heartbeat page.
//!
//! One executable for all of them: each module is a subject.

mod hostile;
mod model;
mod support;

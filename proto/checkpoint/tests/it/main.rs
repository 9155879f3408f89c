//! The checkpoint formats.
//!
//! One executable for all of them: each module is a subject.

mod hostile;

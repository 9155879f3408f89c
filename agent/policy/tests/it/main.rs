//! Policies as users write them.
//!
//! One executable for all of them: each module is a subject.

mod default;
mod language;

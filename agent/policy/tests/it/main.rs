//! Policies as users write them.
//!
//! One executable for all tests, with one module per subject.

mod default;
mod language;

//! The gRPC API: what it consists of, and what documents tell of it.
//!
//! One executable for all of them: each module is a subject.

mod additive;
mod documented;

//! The gRPC API: its content and its documentation.
//!
//! One executable for all of them: each module is a subject.

mod additive;
mod documented;
mod lint;
mod openapi;

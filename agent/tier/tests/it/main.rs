//! The checkpoint tier on real files, in real memory, between hosts on loopback addresses.
//!
//! One executable for all of them: each module is a subject.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a panic in a test is its report")]

mod common;
mod crash;
mod damage;
mod disk;
mod faults;
mod from_memory;
mod peers;
mod pool;
mod shared_content;

//! What several tests of this crate use.
#![allow(dead_code, reason = "each test uses a part")]

pub mod hang;

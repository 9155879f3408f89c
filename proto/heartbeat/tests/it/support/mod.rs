//! Pages in memory, from bytes.
#![allow(dead_code, reason = "each test file uses what it needs")]
#![allow(clippy::unwrap_used, reason = "a panic here is the test's report")]

use std::sync::atomic::AtomicU64;

use mainstay_heartbeat::{Claiming, PageSpec, PageWords, format};

pub fn words(bytes: &[u8]) -> Box<PageWords> {
    let words: Box<[AtomicU64]> =
        bytes.as_chunks::<8>().0.iter().map(|bytes| AtomicU64::new(u64::from_ne_bytes(*bytes))).collect();
    words.try_into().unwrap()
}

pub fn spec() -> PageSpec<'static> {
    PageSpec {
        job: "char-lm",
        rank: 3,
        local_rank: 1,
        world_size: 8,
        attempt: 2,
        boot_id: *b"0123456789abcdef",
        creator_pid: 99,
        created_mono_ns: 5,
    }
}

pub fn fresh() -> Box<PageWords> {
    words(&format(&spec()))
}

pub fn process(pid: u32) -> Claiming<'static> {
    Claiming {
        pid,
        start_ticks: 1000 + u64::from(pid),
        pid_namespace: 4026531836,
        image: 42,
        version: "test 1.0",
        language: "rust",
    }
}

//! A page in memory as its creator makes it, for tests.

#[cfg(loom)]
use loom::sync::atomic::AtomicU64;
#[cfg(not(loom))]
use std::sync::atomic::AtomicU64;

use crate::{PageSpec, PageWords, format};

/// A page that no process has claimed.
pub(crate) fn fresh() -> Box<PageWords> {
    let bytes = format(&PageSpec {
        job: "test",
        rank: 0,
        local_rank: 0,
        world_size: 1,
        attempt: 0,
        boot_id: [0; 16],
        creator_pid: 1,
        created_mono_ns: 0,
    });
    let words = bytes.as_chunks::<8>().0;
    Box::new(std::array::from_fn(|index| {
        AtomicU64::new(words.get(index).map_or(0, |bytes| u64::from_ne_bytes(*bytes)))
    }))
}

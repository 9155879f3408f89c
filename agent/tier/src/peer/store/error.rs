//! Why a store does not take a shard.

use std::io;
use std::path::Path;

/// Why a shard is not taken.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no room.
    #[error("the store is full: {wanted} bytes are wanted and {free} of {quota} are free")]
    Full {
        /// Bytes of the shard.
        wanted: u64,
        /// Bytes that are free.
        free: u64,
        /// The quota.
        quota: u64,
    },
    /// There is no room, and this user has as much as others leave.
    #[error(
        "the store is full: {wanted} bytes are wanted and {free} of {quota} are free; {users} users share it, each has a part of \
         {part} bytes while it is full, and this one uses {of_user}"
    )]
    Part {
        /// Bytes of the shard.
        wanted: u64,
        /// Bytes that are free.
        free: u64,
        /// The quota.
        quota: u64,
        /// Bytes that the shard's user has.
        of_user: u64,
        /// Bytes of one part.
        part: u64,
        /// How many users there are.
        users: u64,
    },
    /// Chunks have not come.
    #[error("{0} chunk(s) have not come")]
    Missing(usize),
    /// The disk.
    #[error("{what}: {source}")]
    Disk {
        /// What was done.
        what: String,
        /// What came of it.
        source: io::Error,
    },
}

/// The error of an operation on a path.
pub(super) fn disk(what: &str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let what = format!("{what} {}", path.display());
    move |source| StoreError::Disk { what, source }
}

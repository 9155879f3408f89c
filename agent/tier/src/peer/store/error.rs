//! Why a store does not accept a shard.

use std::io;
use std::path::Path;

/// Why a shard is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no room.
    #[error("the store is full: {wanted} bytes are wanted and {free} of {quota} are free")]
    Full {
        /// Bytes of the shard.
        wanted: u64,
        /// Free bytes.
        free: u64,
        /// The quota.
        quota: u64,
    },
    /// There is no room, and this user already has its part.
    #[error(
        "the store is full: {wanted} bytes are wanted and {free} of {quota} are free; {users} users share it, each has a part of \
         {part} bytes while it is full, and this one uses {of_user}"
    )]
    Part {
        /// Bytes of the shard.
        wanted: u64,
        /// Free bytes.
        free: u64,
        /// The quota.
        quota: u64,
        /// Bytes that the shard's user has.
        of_user: u64,
        /// Bytes of one part.
        part: u64,
        /// Number of users.
        users: u64,
    },
    /// Chunks are missing.
    #[error("{0} chunk(s) have not come")]
    Missing(usize),
    /// An I/O error.
    #[error("{what}: {source}")]
    Disk {
        /// The operation.
        what: String,
        /// The error.
        source: io::Error,
    },
}

/// The error of an operation on a path.
pub(super) fn disk(what: &str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let what = format!("{what} {}", path.display());
    move |source| StoreError::Disk { what, source }
}

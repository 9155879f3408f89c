//! Erasure-coded shards: cuts shards into pieces and restores a shard from the remaining pieces.
//!
//! ```text
//! a piece    its lane: bytes index * lane … of the shard, padded with zeros; or parity over the lanes of data
//!            the manifest of the shard, which takes up the rest of the piece
//! ```
//!
//! A piece has its own manifest over both parts, and is sent between hosts like a shard. `code` is pure. `cut` verifies every byte
//! of the shard before it goes into a piece, and `join` verifies every restored byte before it is offered.

mod code;
mod cut;
mod join;

pub use code::{CodeError, Encoder, restore};
pub(crate) use cut::cut;
pub(crate) use join::{LocalPiece, join, whole_of};

/// Number of bytes of each lane that are computed at once.
const BLOCK_BYTES: usize = 256 << 10;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test reports")]
mod tests;

//! Shards in pieces: how they are cut, and how a shard is had back from what is left of them.
//!
//! ```text
//! a piece    its lane: bytes index * lane … of the shard, filled up with zeros; or parity over the lanes of data
//!            the manifest of the shard, whose length is what is left
//! ```
//!
//! A piece has a manifest of its own, over both, and goes from host to host as a shard does. `code` is pure; `cut` compares every byte
//! of the shard with what was sealed before it goes into a piece, and `join` every byte that was had back before anyone is offered it.

mod code;
mod cut;
mod join;

pub use code::{CodeError, Encoder, restore};
pub(crate) use cut::cut;
pub(crate) use join::{Given, join, whole_of};

/// Bytes of each lane that are computed at once.
const BLOCK: usize = 256 << 10;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test reports")]
mod tests;

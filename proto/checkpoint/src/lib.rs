//! The formats of the checkpoint tier, which the client in a rank, the launcher's keeper and the agents of other
//! hosts share:
//!
//! - a shard's bytes are one safetensors file ([`container`]), readable without Mainstay;
//! - a [`Manifest`] next to it has its identity and the checksum of every chunk;
//! - a [`bucket::StepRecord`] completes the shards of a step in durable storage;
//! - the [`control`] page is where a rank and the keeper of its memory agree on who may touch which slot.
//!
//! Nothing here does I/O. Input comes from outside and is not trusted: sizes are bounded before anything is
//! allocated, and no bytes make a function panic. `docs/reference/checkpoint.md` has the layouts.

pub mod bucket;
pub mod container;
pub mod control;
mod json;
mod manifest;
mod shared_content;

pub use manifest::{
    CHUNK_BYTES, Chunks, Identity, MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, ManifestError, SealedFile,
    chunk_sum, digits, hex,
};
pub use shared_content::{SHARED_CONTENT_KEY, SharedContent};

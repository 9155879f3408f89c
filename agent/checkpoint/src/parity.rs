//! Erasure coding instead of replicas: a shard is cut into pieces, and any [`Parity::parity`] of them can be lost.
//!
//! A piece has its own root, and a name that identifies its shard. In lists of shards the name is in the field for the
//! run: a version without pieces takes them for shards of a run that no one requests, and never for a whole shard.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use crate::copies::Copy;
pub use crate::copies::{NoParity, Parity, Piece};

/// The pieces of one shard that were cut in one way, by index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pieces<'a> {
    /// How it was cut.
    pub parity: Parity,
    /// The copies of each piece.
    pub copies: BTreeMap<u32, Vec<&'a Copy>>,
}

impl Pieces<'_> {
    /// Whether the shard can be restored from them.
    pub fn are_enough(&self) -> bool {
        self.copies.len() >= self.parity.data as usize
    }

    /// The minimum number of hosts whose loss makes the shard unrecoverable; 0 if it is unrecoverable now.
    pub fn hosts_to_lose(&self) -> usize {
        let mut by_host: BTreeMap<&str, usize> = BTreeMap::new();
        // Second copies of a piece are ignored: the result is then a lower bound.
        for copy in self.copies.values().filter_map(|copies| copies.first()) {
            *by_host.entry(copy.holder.as_str()).or_default() += 1;
        }
        let mut counts: Vec<usize> = by_host.into_values().collect();
        counts.sort_unstable();
        let (mut left, mut lost) = (self.copies.len(), 0);
        while left >= self.parity.data as usize {
            left -= counts.pop().unwrap_or(left);
            lost += 1;
        }
        lost
    }
}

/// Groups the pieces of one shard by how it was cut: pieces of different cuts cannot be combined.
pub fn by_way<C: Borrow<Copy>>(pieces: &[C]) -> Vec<Pieces<'_>> {
    let mut ways: BTreeMap<Parity, BTreeMap<u32, Vec<&Copy>>> = BTreeMap::new();
    for copy in pieces.iter().map(C::borrow) {
        let Some(piece) = &copy.shard.piece else { continue };
        ways.entry(piece.parity).or_default().entry(piece.index).or_default().push(copy);
    }
    ways.into_iter().map(|(parity, copies)| Pieces { parity, copies }).collect()
}

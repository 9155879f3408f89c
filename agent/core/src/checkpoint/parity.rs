//! Parity in place of mirrors: a shard is cut into pieces, any few of which may be lost.
//!
//! A piece has a root of its own and a name that tells what it is a piece of. Where shards are told of, the name stands in the place of
//! the run: a version that knows nothing of pieces takes them for those of a run that nobody asks for, and never for a shard.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use crate::checkpoint::copies::Copy;
pub use crate::checkpoint::copies::{NoParity, Parity, Piece};

/// The pieces of one shard that were cut in one way, by their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pieces<'a> {
    /// How it was cut.
    pub of: Parity,
    /// The copies of each piece.
    pub copies: BTreeMap<u32, Vec<&'a Copy>>,
}

impl Pieces<'_> {
    /// Whether the shard can be had back from them.
    pub fn are_enough(&self) -> bool {
        self.copies.len() >= self.of.data as usize
    }

    /// How many hosts must be lost at least until the shard cannot be had back from them; 0 where it cannot now.
    pub fn hosts_to_lose(&self) -> usize {
        let mut by_host: BTreeMap<&str, usize> = BTreeMap::new();
        // Second copies of a piece do not count: no less can be lost than without them.
        for copy in self.copies.values().filter_map(|copies| copies.first()) {
            *by_host.entry(copy.holder.as_str()).or_default() += 1;
        }
        let mut counts: Vec<usize> = by_host.into_values().collect();
        counts.sort_unstable();
        let (mut left, mut lost) = (self.copies.len(), 0);
        while left >= self.of.data as usize {
            left -= counts.pop().unwrap_or(left);
            lost += 1;
        }
        lost
    }
}

/// Sorts pieces of one shard by how it was cut: those of two ways are of no use to each other.
pub fn by_way<C: Borrow<Copy>>(pieces: &[C]) -> Vec<Pieces<'_>> {
    let mut ways: BTreeMap<Parity, BTreeMap<u32, Vec<&Copy>>> = BTreeMap::new();
    for copy in pieces.iter().map(C::borrow) {
        let Some(piece) = &copy.shard.piece else { continue };
        ways.entry(piece.of).or_default().entry(piece.index).or_default().push(copy);
    }
    ways.into_iter().map(|(of, copies)| Pieces { of, copies }).collect()
}

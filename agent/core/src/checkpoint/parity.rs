//! Parity in place of mirrors: a shard is cut into pieces, any few of which may be lost.
//!
//! A piece has a root of its own and a name that tells what it is a piece of. Where shards are told of, the name stands in the place of
//! the run: a version that knows nothing of pieces takes them for those of a run that nobody asks for, and never for a shard.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::checkpoint::inventory::{Copy, Shard, StepKey};

/// Into how many pieces a shard is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Parity {
    /// Pieces that together are the shard, 2 to 16; as many as are needed to have it back.
    pub data: u32,
    /// Pieces beside them, 1 to 4; as many as may be lost.
    pub parity: u32,
}

/// What is no [`Parity`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it must be like \"4+1\": 2 to 16 pieces of data and 1 to 4 of parity")]
pub struct NoParity;

impl Parity {
    /// Pieces of a shard, all together.
    pub fn pieces(self) -> u32 {
        self.data + self.parity
    }

    /// Bytes of what each piece has of a shard of so many: a multiple of 64, filled up with zeros.
    pub fn lane(self, bytes: u64) -> u64 {
        bytes.div_ceil(u64::from(self.data)).max(1).next_multiple_of(64)
    }
}

impl fmt::Display for Parity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.data, self.parity)
    }
}

impl FromStr for Parity {
    type Err = NoParity;

    fn from_str(text: &str) -> Result<Parity, NoParity> {
        let number = |digits: &str| digits.parse().map_err(|_| NoParity);
        let (data, parity) = text.split_once('+').ok_or(NoParity)?;
        let found = Parity { data: number(data)?, parity: number(parity)? };
        let makes_sense = (2..=16).contains(&found.data) && (1..=4).contains(&found.parity);
        // Only what is written as we write it: a name must have one form.
        if makes_sense && found.to_string() == text { Ok(found) } else { Err(NoParity) }
    }
}

/// Which piece of what.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    /// The root of the shard.
    pub root: String,
    /// The shard's size, bytes.
    pub bytes: u64,
    /// How it was cut.
    pub of: Parity,
    /// Which of the pieces, from 0; those of data come first.
    pub index: u32,
}

/// Ahead of the name of a piece.
const MARK: &str = "parity";

impl Piece {
    /// The name of a piece of a shard that this run saved.
    pub fn name(&self, run: &str) -> String {
        let Piece { root, bytes, of, index } = self;
        format!("{MARK}/{index}/{of}/{bytes}/{root}/{run}")
    }

    /// Reads a name: the piece, and the run that saved its shard. None: it is the run of a whole shard.
    pub fn read(name: &str) -> Option<(Piece, &str)> {
        let mut parts = name.splitn(6, '/');
        if parts.next() != Some(MARK) {
            return None;
        }
        let index = parts.next()?.parse().ok()?;
        let of: Parity = parts.next()?.parse().ok()?;
        let bytes = parts.next()?.parse().ok()?;
        let root = parts.next().filter(|root| !root.is_empty())?.to_owned();
        let (piece, run) = (Piece { root, bytes, of, index }, parts.next()?);
        (index < of.pieces() && piece.name(run) == name).then_some((piece, run))
    }
}

/// A shard as it is told to others.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Told {
    of: StepKey,
    rank: u32,
    root: String,
    bytes: u64,
    created: i64,
}

impl From<Shard> for Told {
    fn from(shard: Shard) -> Told {
        let Shard { mut of, rank, root, bytes, created, piece } = shard;
        if let Some(piece) = piece {
            of.run = piece.name(&of.run);
        }
        Told { of, rank, root, bytes, created }
    }
}

impl From<Told> for Shard {
    fn from(told: Told) -> Shard {
        let Told { of, rank, root, bytes, created } = told;
        Shard { of, rank, root, bytes, created, piece: None }.understood()
    }
}

impl Shard {
    /// The same, where the name of a piece may stand in the place of the run.
    #[must_use]
    pub fn understood(mut self) -> Shard {
        if let Some((piece, run)) = Piece::read(&self.of.run) {
            let run = run.to_owned();
            (self.piece, self.of.run) = (Some(piece), run);
        }
        self
    }

    /// The root of the whole shard, of which this may be a piece.
    pub fn whole(&self) -> &str {
        self.piece.as_ref().map_or(&self.root, |piece| &piece.root)
    }

    /// The whole shard's size, bytes.
    pub fn whole_bytes(&self) -> u64 {
        self.piece.as_ref().map_or(self.bytes, |piece| piece.bytes)
    }
}

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
pub fn by_way(pieces: &[Copy]) -> Vec<Pieces<'_>> {
    let mut ways: BTreeMap<Parity, BTreeMap<u32, Vec<&Copy>>> = BTreeMap::new();
    for copy in pieces {
        let Some(piece) = &copy.shard.piece else { continue };
        ways.entry(piece.of).or_default().entry(piece.index).or_default().push(copy);
    }
    ways.into_iter().map(|(of, copies)| Pieces { of, copies }).collect()
}

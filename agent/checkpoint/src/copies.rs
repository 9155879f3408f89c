//! Types for stored checkpoints: steps, shards, pieces of shards, and copies of them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use smol_str::SmolStr;

/// One step of one attempt of one run: it is restored completely or not at all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StepKey {
    /// The step. It is the first field because keys sort by it.
    pub step: u64,
    /// The launch of the job, as named by its launcher on its host.
    pub job: SmolStr,
    /// The run id that the user gave, the same on every host and in every launch. After an `@`, which no run id
    /// contains, follows what distinguishes launches with the same name.
    pub run: SmolStr,
    /// The attempt that saved it: the epoch that fences late writers.
    pub attempt: u64,
    /// Number of ranks of the step.
    pub world: u32,
}

impl StepKey {
    /// The run id that the user gave.
    pub fn run_id(&self) -> &str {
        self.run.split_once('@').map_or(&self.run, |(run_id, _)| run_id)
    }
}

/// One rank's part of a step, or a piece of such a part.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "ShardRecord", into = "ShardRecord")]
pub struct Shard {
    /// The step.
    pub key: StepKey,
    /// The rank.
    pub rank: u32,
    /// The root over its manifest, in hex. Copies with the same root have the same bytes.
    pub root: String,
    /// Its size, bytes.
    pub bytes: u64,
    /// When it was sealed, seconds since 1970 on its owner's clock. It only breaks ties within one step and rank.
    pub created: i64,
    /// The piece, if this is not a whole shard. `root` and `bytes` are then those of the piece.
    pub piece: Option<Piece>,
}

impl Shard {
    /// If the run is the name of a piece, replaces it with the piece and its run.
    #[must_use]
    pub fn understood(mut self) -> Shard {
        if let Some((piece, run)) = Piece::read(&self.key.run) {
            let run = SmolStr::new(run);
            (self.piece, self.key.run) = (Some(piece), run);
        }
        self
    }

    /// The root of the whole shard, also for a piece.
    pub fn whole(&self) -> &str {
        self.piece.as_ref().map_or(&self.root, |piece| &piece.root)
    }

    /// The size of the whole shard, bytes.
    pub fn whole_bytes(&self) -> u64 {
        self.piece.as_ref().map_or(self.bytes, |piece| piece.bytes)
    }
}

/// Where a holder stores a copy, the nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Medium {
    /// In memory: a pool or a tmpfs.
    Memory,
    /// On a disk.
    Disk,
    /// In storage that outlives the hosts.
    Durable,
}

/// One copy of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copy {
    /// The host that has it.
    pub holder: SmolStr,
    /// Where the holder stores it.
    pub medium: Medium,
    /// Whether it is the holder's own: saved by a rank there, not stored for another host.
    pub own: bool,
    /// Whether the holder has compared all bytes with the manifest.
    pub verified: bool,
    /// What it is a copy of.
    pub shard: Shard,
}

/// Number of pieces that a shard is cut into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Parity {
    /// Number of pieces with the shard's data, 2 to 16. This many pieces are needed to restore it.
    pub data: u32,
    /// Number of additional pieces, 1 to 4. This many pieces can be lost.
    pub parity: u32,
}

/// The text is not a [`Parity`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it must be like \"4+1\": 2 to 16 pieces of data and 1 to 4 of parity")]
pub struct NoParity;

impl Parity {
    /// Total number of pieces of a shard.
    pub fn pieces(self) -> u32 {
        self.data + self.parity
    }

    /// Bytes in each piece of a shard of `bytes` bytes: a multiple of 64, padded with zeros.
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
        // Accept only the canonical spelling: a name must have one form.
        if makes_sense && found.to_string() == text { Ok(found) } else { Err(NoParity) }
    }
}

/// Prefix of the name of a piece.
const PIECE_PREFIX: &str = "parity";

/// Identifies a piece of a shard.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    /// The root of the shard.
    pub root: String,
    /// The shard's size, bytes.
    pub bytes: u64,
    /// How it was cut.
    pub parity: Parity,
    /// The index of the piece, from 0; data pieces come first.
    pub index: u32,
}

impl Piece {
    /// The name of this piece of a shard that `run` saved.
    pub fn name(&self, run: &str) -> String {
        let Piece { root, bytes, parity, index } = self;
        format!("{PIECE_PREFIX}/{index}/{parity}/{bytes}/{root}/{run}")
    }

    /// Parses a name: the piece, and the run that saved its shard. `None` if it is the run of a whole shard.
    pub fn read(name: &str) -> Option<(Piece, &str)> {
        let mut parts = name.splitn(6, '/');
        if parts.next() != Some(PIECE_PREFIX) {
            return None;
        }
        let index = parts.next()?.parse().ok()?;
        let parity: Parity = parts.next()?.parse().ok()?;
        let bytes = parts.next()?.parse().ok()?;
        let root = parts.next().filter(|root| !root.is_empty())?.to_owned();
        let (piece, run) = (Piece { root, bytes, parity, index }, parts.next()?);
        (index < parity.pieces() && piece.name(run) == name).then_some((piece, run))
    }
}

/// A shard as it is sent to other agents.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct ShardRecord {
    #[serde(rename = "of")]
    key: StepKey,
    rank: u32,
    root: String,
    bytes: u64,
    created: i64,
}

impl From<Shard> for ShardRecord {
    fn from(shard: Shard) -> ShardRecord {
        let Shard { mut key, rank, root, bytes, created, piece } = shard;
        if let Some(piece) = piece {
            key.run = piece.name(&key.run).into();
        }
        ShardRecord { key, rank, root, bytes, created }
    }
}

impl From<ShardRecord> for Shard {
    fn from(record: ShardRecord) -> Shard {
        let ShardRecord { key, rank, root, bytes, created } = record;
        Shard { key, rank, root, bytes, created, piece: None }.understood()
    }
}

//! The words for what is kept where: steps, shards, pieces of shards, and copies of them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use smol_str::SmolStr;

/// One step of one attempt of one run: what is restored together or not at all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StepKey {
    /// The step. It weighs first: keys sort by it.
    pub step: u64,
    /// The launch of the job, as its launcher named it on its host.
    pub job: SmolStr,
    /// The run id that the user gave, the same on every host and in every launch; and behind an `@`, which no run id has, what
    /// tells launches of one name apart.
    pub run: SmolStr,
    /// The attempt that saved it: the epoch that fences late writers.
    pub attempt: u64,
    /// How many ranks the step has.
    pub world: u32,
}

impl StepKey {
    /// The run id that the user gave.
    pub fn run_id(&self) -> &str {
        self.run.split_once('@').map_or(&self.run, |(run_id, _)| run_id)
    }
}

/// One rank's part of a step, or a piece of one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "ShardRecord", into = "ShardRecord")]
pub struct Shard {
    /// The step.
    pub of: StepKey,
    /// The rank.
    pub rank: u32,
    /// The root over its manifest, in hex. Copies with the same root are the same bytes.
    pub root: String,
    /// Its size, bytes.
    pub bytes: u64,
    /// When it was sealed, seconds since 1970 on its owner's clock. It only breaks ties within one step and rank.
    pub created: i64,
    /// Which piece of it, where it is not whole; root and size are then the piece's.
    pub piece: Option<Piece>,
}

impl Shard {
    /// The same, where the name of a piece may stand in the place of the run.
    #[must_use]
    pub fn understood(mut self) -> Shard {
        if let Some((piece, run)) = Piece::read(&self.of.run) {
            let run = SmolStr::new(run);
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

/// Where a holder keeps a copy. The nearer to use, the smaller.
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
    /// Where it lies there.
    pub medium: Medium,
    /// Whether it is the holder's own: made by a rank there, not kept for others.
    pub own: bool,
    /// Whether the holder has compared all bytes with the manifest.
    pub verified: bool,
    /// What it is a copy of.
    pub shard: Shard,
}

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

/// Ahead of the name of a piece.
const MARK: &str = "parity";

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
pub(super) struct ShardRecord {
    of: StepKey,
    rank: u32,
    root: String,
    bytes: u64,
    created: i64,
}

impl From<Shard> for ShardRecord {
    fn from(shard: Shard) -> ShardRecord {
        let Shard { mut of, rank, root, bytes, created, piece } = shard;
        if let Some(piece) = piece {
            of.run = piece.name(&of.run).into();
        }
        ShardRecord { of, rank, root, bytes, created }
    }
}

impl From<ShardRecord> for Shard {
    fn from(reported: ShardRecord) -> Shard {
        let ShardRecord { of, rank, root, bytes, created } = reported;
        Shard { of, rank, root, bytes, created, piece: None }.understood()
    }
}

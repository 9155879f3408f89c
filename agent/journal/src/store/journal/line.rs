//! One entry as one line.

use mainstay_model::entry::Entry;
use serde::Deserialize;

use super::JournalError;

/// The kinds of lines in the journal.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "lives for the moment between reading a line and using it")]
pub enum JournalLine {
    /// An entry.
    Entry(Entry),
    /// An entry of a kind that only a newer version knows. It keeps its number.
    Unknown {
        /// Its number.
        seq: u64,
    },
    /// Not an entry: damaged on the disk, or edited.
    Corrupt,
}

impl JournalLine {
    /// The entry's number, if the line has one.
    pub fn seq(&self) -> Option<u64> {
        match self {
            JournalLine::Entry(entry) => Some(entry.seq),
            JournalLine::Unknown { seq } => Some(*seq),
            JournalLine::Corrupt => None,
        }
    }
}

/// The entry as JSON with its line end.
pub fn encode(entry: &Entry) -> Result<Vec<u8>, JournalError> {
    let mut line =
        serde_json::to_vec(entry).map_err(|source| JournalError::Encode { seq: entry.seq, source })?;
    line.push(b'\n');
    Ok(line)
}

/// Reads a line, with or without its line end.
pub fn decode(line: &[u8]) -> JournalLine {
    match serde_json::from_slice(line) {
        Ok(entry) => JournalLine::Entry(entry),
        Err(_) => decode_seq(line).map_or(JournalLine::Corrupt, |seq| JournalLine::Unknown { seq }),
    }
}

/// Only the entry's number: much cheaper than the whole entry, for position searches.
pub(super) fn decode_seq(line: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Numbered {
        seq: u64,
    }
    serde_json::from_slice::<Numbered>(line).ok().map(|numbered| numbered.seq)
}

//! The files of the journal: `<number of the first entry, 20 digits>.jsonl`, so that names sort as numbers do.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use super::JournalError;
use super::line::decode_seq;

/// A file of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// The number of its first entry.
    pub(super) first_seq: u64,
    /// Its size.
    pub(super) bytes: u64,
}

/// The contents of the segment that is continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// Bytes up to the end of its last whole line.
    pub(super) whole_bytes: u64,
    /// Bytes after that: a line without its end.
    pub(super) torn_bytes: u64,
    /// The number that the next entry gets.
    pub(super) next_seq: u64,
}

pub(super) fn segment_path(dir: &Path, first_seq: u64) -> PathBuf {
    dir.join(format!("{first_seq:020}.jsonl"))
}

/// The segments in `dir`, oldest first. Files with other names are ignored.
pub(super) fn list_segments(dir: &Path) -> Result<Vec<Segment>, JournalError> {
    let listing = |source| JournalError::io("listing", dir, source);
    let mut segments = Vec::new();
    for file in std::fs::read_dir(dir).map_err(listing)? {
        let file = file.map_err(listing)?;
        let Some(first_seq) = file.file_name().to_str().and_then(first_seq_of) else { continue };
        match file.metadata() {
            Ok(metadata) => segments.push(Segment { first_seq, bytes: metadata.len() }),
            // The writer deleted it between the listing and this call.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(JournalError::io("reading the size of", &file.path(), source)),
        }
    }
    segments.sort_by_key(|segment| segment.first_seq);
    Ok(segments)
}

fn first_seq_of(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".jsonl")?;
    (digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// Reads a segment to find where to continue.
pub(super) fn measure(path: &Path, first_seq: u64) -> Result<Extent, JournalError> {
    let reading = |source| JournalError::io("reading", path, source);
    let mut reader = BufReader::new(File::open(path).map_err(reading)?);
    let mut extent = Extent { whole_bytes: 0, torn_bytes: 0, next_seq: first_seq };
    let mut line = Vec::new();
    loop {
        line.clear();
        let bytes = reader.read_until(b'\n', &mut line).map_err(reading)? as u64;
        if line.last() != Some(&b'\n') {
            extent.torn_bytes = bytes;
            return Ok(extent);
        }
        extent.whole_bytes += bytes;
        // An unreadable line was once an entry: its number is not used again.
        let seq = decode_seq(&line).unwrap_or(extent.next_seq).max(extent.next_seq);
        extent.next_seq = seq.saturating_add(1);
    }
}

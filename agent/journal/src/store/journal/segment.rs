//! The files of the journal: `<number of the first entry, 20 digits>.jsonl`, so that names sort as numbers do.

use std::fs::{File, Metadata};
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
    let named = of_segments(dir)?.into_iter();
    let mut segments: Vec<Segment> =
        named.map(|(first_seq, metadata)| Segment { first_seq, bytes: metadata.len() }).collect();
    segments.sort_by_key(|segment| segment.first_seq);
    Ok(segments)
}

/// Renames what has the name of a segment and is no regular file, such as a directory or a link: it would be in the way
/// of the segment with its number.
pub(super) fn set_others_aside(dir: &Path) -> Result<(), JournalError> {
    for (first_seq, metadata) in of_segments(dir)? {
        let path = segment_path(dir, first_seq);
        if metadata.is_file() {
            continue;
        }
        let aside = path.with_extension("set-aside");
        let error = std::fs::rename(&path, &aside).err().map(|error| error.to_string());
        tracing::warn!(
            path = %path.display(),
            aside = %aside.display(),
            error,
            "a segment of the journal is no regular file: it is set aside, and its entries are lost"
        );
    }
    Ok(())
}

/// Everything in `dir` with the name of a segment. Links are not followed.
fn of_segments(dir: &Path) -> Result<Vec<(u64, Metadata)>, JournalError> {
    let listing = |source| JournalError::io("listing", dir, source);
    let mut found = Vec::new();
    for file in std::fs::read_dir(dir).map_err(listing)? {
        let file = file.map_err(listing)?;
        let Some(first_seq) = file.file_name().to_str().and_then(first_seq_of) else { continue };
        match file.metadata() {
            Ok(metadata) => found.push((first_seq, metadata)),
            // The writer deleted it between the listing and this call.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(JournalError::io("reading the size of", &file.path(), source)),
        }
    }
    Ok(found)
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

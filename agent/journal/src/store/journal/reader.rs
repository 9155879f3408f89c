//! The reading side: by path, without a lock, concurrent with a writer that appends, rotates and deletes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read as _, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use mainstay_model::entry::Entry;

use super::line::{JournalLine, decode, decode_seq};
use super::segment::{Segment, list_segments, segment_path};
use super::{JournalError, Replayed};
use mainstay_sys::foreign_files;

/// Below this distance in bytes a position is searched line by line.
const NEAR: u64 = 16 << 10;

/// Bytes of a line. The longest entries are those with which a job of many thousand ranks starts, of a few MiB.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// How often a segment may vanish between listing and opening before that is an error.
const DELETED_UNDER_US: usize = 16;

/// A reader of a journal's directory. Cheap to clone; holds no file open between calls.
#[derive(Clone, Debug)]
pub struct JournalReader {
    dir: PathBuf,
}

/// Entries after a cursor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JournalPage {
    /// The entries, oldest first.
    pub entries: Vec<Entry>,
    /// The requested entries that the journal no longer has.
    pub gap: Option<Gap>,
    /// Where to continue: the number of the last line that was read, readable or not.
    pub cursor: u64,
    /// Lines that were skipped: damaged, or of a kind that only a newer version knows.
    pub skipped: u64,
    /// Whether there may be more after the cursor: a limit was reached.
    pub is_cut: bool,
}

/// Where reading ends: after so many entries or so many bytes, at the first entry that reaches one of them.
#[derive(Clone, Copy, Debug)]
pub struct Most {
    /// Entries.
    pub entries: usize,
    /// Bytes of lines.
    pub bytes: usize,
}

impl From<usize> for Most {
    fn from(entries: usize) -> Most {
        Most { entries, bytes: usize::MAX }
    }
}

/// Entries that were deleted before they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The first missing number.
    pub first: u64,
    /// The last missing number.
    pub last: u64,
}

impl JournalReader {
    /// A reader of the journal in `dir`, which need not exist yet.
    pub fn new(dir: &Path) -> JournalReader {
        JournalReader { dir: dir.to_owned() }
    }

    /// At most `limit` entries with numbers above `cursor`, and at least one if there is one; 0 is before the first.
    ///
    /// Deleted numbers are reported as a gap, and reading starts at the oldest entry there is.
    pub fn entries_after(&self, cursor: u64, limit: impl Into<Most>) -> Result<JournalPage, JournalError> {
        let limit = limit.into();
        for _ in 0..DELETED_UNDER_US {
            if let Some(read) = self.try_entries_after(cursor, limit)? {
                return Ok(read);
            }
        }
        Err(JournalError::io("reading the segments in", &self.dir, ErrorKind::NotFound.into()))
    }

    /// None if the writer deleted the first segment since it was listed.
    fn try_entries_after(&self, cursor: u64, limit: Most) -> Result<Option<JournalPage>, JournalError> {
        let segments = self.segments()?;
        let mut read = JournalPage { cursor, ..JournalPage::default() };
        if let Some(first) = oldest_of(&segments).filter(|oldest| *oldest > cursor.saturating_add(1)) {
            read.gap = Some(Gap { first: cursor.saturating_add(1), last: first - 1 });
            read.cursor = first - 1;
        }
        // The segment with the position is the last one that starts at or before it.
        let begin = segments
            .partition_point(|segment| segment.first_seq <= read.cursor.saturating_add(1))
            .saturating_sub(1);
        let mut left = limit;
        for segment in segments.iter().skip(begin) {
            read.is_cut = left.entries == 0 || left.bytes == 0;
            if read.is_cut {
                break;
            }
            match self.read_segment(*segment, &mut left, &mut read) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::NotFound && read.entries.is_empty() => {
                    return Ok(None);
                }
                // Its content is a gap of the next call.
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                Err(source) => return Err(self.failed(*segment, source)),
            }
        }
        read.is_cut = left.entries == 0 || left.bytes == 0;
        Ok(Some(read))
    }

    /// The first number in the journal; none while it is empty.
    pub fn oldest(&self) -> Result<Option<u64>, JournalError> {
        Ok(oldest_of(&self.segments()?))
    }

    /// The number of the last whole entry; none while the journal is empty.
    pub fn newest(&self) -> Result<Option<u64>, JournalError> {
        for segment in self.segments()?.into_iter().rev() {
            match self.last_seq(segment) {
                Ok(Some(seq)) => return Ok(Some(seq)),
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(source) => return Err(self.failed(segment, source)),
            }
        }
        Ok(None)
    }

    /// Calls `take` with every entry, oldest first. Unreadable lines are counted and logged as a warning.
    pub fn replay(&self, mut take: impl FnMut(Entry)) -> Result<Replayed, JournalError> {
        let mut total = Replayed::default();
        for segment in self.segments()? {
            let mut found = Replayed::default();
            let visited = self.each_line(segment, 0, |line, _| {
                match line {
                    JournalLine::Entry(entry) => {
                        found.entries += 1;
                        take(entry);
                    }
                    JournalLine::Unknown { .. } => found.unknown += 1,
                    JournalLine::Corrupt => found.corrupt += 1,
                }
                true
            });
            match visited {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(source) => return Err(self.failed(segment, source)),
            }
            if found.corrupt + found.unknown > 0 {
                tracing::warn!(
                    path = %self.path(segment).display(),
                    damaged = found.corrupt,
                    unknown = found.unknown,
                    "lines of the journal are skipped: damaged, or written by a newer version"
                );
            }
            total.entries += found.entries;
            total.corrupt += found.corrupt;
            total.unknown += found.unknown;
        }
        Ok(total)
    }

    /// The segments; none if the directory does not exist yet.
    fn segments(&self) -> Result<Vec<Segment>, JournalError> {
        match list_segments(&self.dir) {
            Err(JournalError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            listed => listed,
        }
    }

    fn path(&self, segment: Segment) -> PathBuf {
        segment_path(&self.dir, segment.first_seq)
    }

    fn failed(&self, segment: Segment, source: io::Error) -> JournalError {
        JournalError::io("reading", &self.path(segment), source)
    }

    fn read_segment(&self, segment: Segment, left: &mut Most, read: &mut JournalPage) -> io::Result<()> {
        let begin = self.place_of(segment, read.cursor)?;
        self.each_line(segment, begin, |line, bytes| {
            match line.seq() {
                Some(seq) if seq <= read.cursor => return true,
                Some(seq) => read.cursor = seq,
                None => {}
            }
            match line {
                JournalLine::Entry(entry) => {
                    read.entries.push(entry);
                    left.entries -= 1;
                    left.bytes = left.bytes.saturating_sub(bytes);
                }
                JournalLine::Unknown { .. } | JournalLine::Corrupt => read.skipped += 1,
            }
            left.entries > 0 && left.bytes > 0
        })
    }

    /// Calls `take` with the whole lines from byte `begin` on and their lengths, until it returns false.
    fn each_line(
        &self,
        segment: Segment,
        begin: u64,
        mut take: impl FnMut(JournalLine, usize) -> bool,
    ) -> io::Result<()> {
        let mut file = foreign_files::open(&self.path(segment), None)?;
        file.seek(SeekFrom::Start(begin))?;
        let mut reader = BufReader::new(file);
        let mut line = Vec::new();
        loop {
            read_line(&mut reader, &mut line)?;
            // A line without its end is not complete yet: it is being written.
            if line.last() != Some(&b'\n') || !take(decode(&line), line.len()) {
                return Ok(());
            }
        }
    }

    /// A byte near and before the first line with a number above `cursor`, by binary search: a reader that follows
    /// the end does not read the whole segment each time.
    fn place_of(&self, segment: Segment, cursor: u64) -> io::Result<u64> {
        let file = foreign_files::open(&self.path(segment), None)?;
        let (mut low, mut high) = (0, file.metadata()?.len());
        while high - low > NEAR {
            let middle = low + (high - low) / 2;
            match line_after(&file, middle, high)? {
                Some((start, seq)) if seq <= cursor => low = start,
                _ => high = middle,
            }
        }
        Ok(low)
    }

    fn last_seq(&self, segment: Segment) -> io::Result<Option<u64>> {
        let begin = self.place_of(segment, u64::MAX)?;
        let mut last = None;
        self.each_line(segment, begin, |line, _| {
            last = line.seq().or(last);
            true
        })?;
        Ok(last)
    }
}

/// Reads a line with its end; without it if the file ends first or the line is longer than any entry. Returns its length.
/// `mainstay explain` also reads journals of other users.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<u64> {
    line.clear();
    Ok(reader.take(MAX_LINE_BYTES).read_until(b'\n', line)? as u64)
}

fn oldest_of(segments: &[Segment]) -> Option<u64> {
    segments.iter().find(|segment| segment.bytes > 0).map(|segment| segment.first_seq)
}

/// The first readable line that starts after `from` and before `until`: its position and number.
fn line_after(file: &File, from: u64, until: u64) -> io::Result<Option<(u64, u64)>> {
    let mut reader = BufReader::new(file);
    reader.seek(SeekFrom::Start(from))?;
    let mut line = Vec::new();
    let mut start = from + read_line(&mut reader, &mut line)?;
    while start < until {
        let bytes = read_line(&mut reader, &mut line)?;
        if line.last() != Some(&b'\n') {
            return Ok(None);
        }
        if let Some(seq) = decode_seq(&line) {
            return Ok(Some((start, seq)));
        }
        start += bytes;
    }
    Ok(None)
}

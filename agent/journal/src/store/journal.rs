//! The journal of entries: JSON Lines in segments, one writer, any number of readers. The format is in
//! `docs/reference/journal.md`.
//!
//! Guarantees:
//! - An entry that [`Journal::append`] returned is in the file: it survives the death of this process at any
//!   instant. It survives the death of the host once [`Journal::sync`] has returned.
//! - Sequence numbers increase by one and continue across restarts. A torn last line is cut off at open.
//! - It never grows beyond its limits: the oldest segments are deleted first.
//! - A full or failing disk is an error of one append and never a broken file: once the disk works again, the next
//!   append succeeds.
//! - An unreadable line costs only that line.

mod error;
mod line;
mod reader;
mod segment;

use std::collections::VecDeque;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_model::entry::{Body, Entry};
use mainstay_model::id::{BootId, JobId};
use mainstay_model::time::Stamp;

pub use error::JournalError;
pub use line::{JournalLine, decode, encode};
pub use reader::{Gap, JournalPage, JournalReader, Most};
use segment::{Segment, list_segments, segment_path, set_others_aside};

/// The smallest useful segment: below this, a segment would hold a handful of lines only.
const SMALLEST_SEGMENT: u64 = 4096;

/// How often the lock is tried if another process holds it: for one second in all.
const LOCK_TRIES: u32 = 20;
const BETWEEN_LOCK_TRIES: Duration = Duration::from_millis(50);

/// How large the journal may become, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size beyond which a new segment is started. Clamped between 4 KiB and half of `total_bytes`, so that
    /// deleting whole segments can keep the total.
    pub segment_bytes: u64,
    /// All segments together.
    pub total_bytes: u64,
}

impl Default for Limits {
    /// 4 MiB per segment, 64 MiB in all.
    fn default() -> Limits {
        Limits { segment_bytes: 4 << 20, total_bytes: 64 << 20 }
    }
}

impl Limits {
    fn effective(self) -> Limits {
        let segment_bytes = self.segment_bytes.min(self.total_bytes / 2).max(SMALLEST_SEGMENT);
        Limits { segment_bytes, total_bytes: self.total_bytes.max(2 * segment_bytes) }
    }
}

/// What a pass over the whole journal found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Entries that were read.
    pub entries: u64,
    /// Lines that are not entries.
    pub corrupt: u64,
    /// Entries of kinds that only a newer version knows.
    pub unknown: u64,
}

/// The writing side of the journal. There is one per directory, guarded by a lock.
#[derive(Debug)]
pub struct Journal {
    dir: PathBuf,
    limits: Limits,
    boot: BootId,
    next_seq: u64,
    /// All segments, oldest first; the last one is being written.
    segments: VecDeque<Segment>,
    current: Option<File>,
    /// The current segment may contain a partial line that could not be removed yet.
    torn: bool,
    unsynced: Unsynced,
    /// Held for its lock, which the kernel releases when the file is closed, however the process ends.
    _lock: File,
}

/// What has to reach the disk at the next sync.
#[derive(Debug, Default)]
struct Unsynced {
    /// Segments that were finished since the last sync, with their paths.
    left: Vec<(PathBuf, File)>,
    /// The current segment.
    data: bool,
    directory: bool,
}

/// Written data that may not be on the disk yet. Another thread may sync it while the journal continues to be
/// written.
#[derive(Debug, Default)]
pub struct Unforced {
    files: Vec<(PathBuf, File)>,
    directory: Option<PathBuf>,
}

impl Unforced {
    /// Waits until it is on the disk (fdatasync).
    ///
    /// # Errors
    /// The disk fails.
    pub fn force(&self) -> Result<(), JournalError> {
        for (path, file) in &self.files {
            file.sync_data().map_err(|source| JournalError::io("syncing", path, source))?;
        }
        if let Some(directory) = &self.directory {
            let syncing = |source| JournalError::io("syncing the directory", directory, source);
            File::open(directory).and_then(|open| open.sync_all()).map_err(syncing)?;
        }
        Ok(())
    }
}

impl Journal {
    /// Opens the journal in `dir`, which is created (mode 0750) if it is missing, for this boot of the host.
    ///
    /// A last line that was torn by a crash is cut off. Fails if another process has the journal open, naming it,
    /// or if the directory is not writable.
    pub fn open(dir: &Path, limits: Limits, boot: BootId) -> Result<Journal, JournalError> {
        let making = |source| JournalError::io("creating the directory", dir, source);
        DirBuilder::new().recursive(true).mode(0o750).create(dir).map_err(making)?;
        let lock = take_lock(dir)?;
        set_others_aside(dir)?;
        let mut journal = Journal {
            dir: dir.to_owned(),
            limits: limits.effective(),
            boot,
            next_seq: 1,
            segments: list_segments(dir)?.into(),
            current: None,
            torn: false,
            unsynced: Unsynced::default(),
            _lock: lock,
        };
        journal.continue_last_segment()?;
        journal.delete_beyond_limit(0);
        Ok(journal)
    }

    /// Appends an entry under the next sequence number and returns it as it was written.
    ///
    /// After an error none of it is in the journal, and the number is used for the next entry that succeeds.
    pub fn append(
        &mut self,
        at: Stamp,
        job: Option<&JobId>,
        origin_seq: Option<u64>,
        body: Body,
    ) -> Result<Entry, JournalError> {
        let entry =
            Entry { seq: self.next_seq, at, boot: self.boot.clone(), job: job.cloned(), origin_seq, body };
        self.append_entry(&entry)?;
        Ok(entry)
    }

    /// Appends an entry that already has a number because it could not be written at its time. Its number must not
    /// be below [`Journal::next_seq`]; a higher one leaves a gap, which readers skip.
    pub fn append_entry(&mut self, entry: &Entry) -> Result<(), JournalError> {
        if entry.seq < self.next_seq {
            return Err(JournalError::Order { seq: entry.seq, next: self.next_seq });
        }
        let line = encode(entry)?;
        self.repair()?;
        self.make_room(entry.seq, line.len() as u64)?;
        self.write_line(&line)?;
        self.next_seq = entry.seq.saturating_add(1);
        Ok(())
    }

    /// Waits until all appended entries are on the disk (fdatasync).
    pub fn sync(&mut self) -> Result<(), JournalError> {
        let unforced = self.unforced()?;
        let forced = unforced.force();
        if forced.is_err() {
            self.not_forced(unforced);
        }
        forced
    }

    /// Returns what may not be on the disk yet. If syncing it fails, call [`Journal::not_forced`].
    ///
    /// # Errors
    /// The kernel provides no more descriptors.
    pub fn unforced(&mut self) -> Result<Unforced, JournalError> {
        let mut files = Vec::new();
        if let Some(file) = self.current.as_ref().filter(|_| self.unsynced.data) {
            let path = self.current_path();
            let file = file.try_clone().map_err(|source| JournalError::io("syncing", &path, source))?;
            files.push((path, file));
        }
        files.append(&mut self.unsynced.left);
        let directory = self.unsynced.directory.then(|| self.dir.clone());
        (self.unsynced.data, self.unsynced.directory) = (false, false);
        Ok(Unforced { files, directory })
    }

    /// What was returned did not reach the disk: it will be returned again.
    pub fn not_forced(&mut self, unforced: Unforced) {
        self.unsynced.left.extend(unforced.files);
        self.unsynced.directory |= unforced.directory.is_some();
    }

    /// Calls `take` with every entry in the journal, oldest first.
    pub fn replay(&self, take: impl FnMut(Entry)) -> Result<Replayed, JournalError> {
        self.reader().replay(take)
    }

    /// A reader of this journal, independent of the writer.
    pub fn reader(&self) -> JournalReader {
        JournalReader::new(&self.dir)
    }

    /// The number that the next entry gets.
    pub fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// The first number in the journal; none while it is empty.
    pub fn oldest(&self) -> Option<u64> {
        self.segments.front().map(|segment| segment.first_seq).filter(|first| *first < self.next_seq)
    }

    /// The first number that stays in the journal when its oldest segment is deleted; none while it has only one.
    pub fn oldest_after_deletion(&self) -> Option<u64> {
        self.segments.get(1).map(|segment| segment.first_seq)
    }

    /// How large it may become, in bytes.
    pub fn most_bytes(&self) -> u64 {
        self.limits.total_bytes
    }

    /// The boot whose monotonic clock the entries of this writer use.
    pub fn boot(&self) -> &BootId {
        &self.boot
    }

    /// The directory with the segments.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn current_path(&self) -> PathBuf {
        let first_seq = self.segments.back().map_or(self.next_seq, |segment| segment.first_seq);
        segment_path(&self.dir, first_seq)
    }

    fn continue_last_segment(&mut self) -> Result<(), JournalError> {
        let Some(segment) = self.segments.back_mut() else { return Ok(()) };
        let path = segment_path(&self.dir, segment.first_seq);
        let extent = segment::measure(&path, segment.first_seq)?;
        let opening = |source| JournalError::io("opening", &path, source);
        let file = OpenOptions::new().append(true).open(&path).map_err(opening)?;
        if extent.torn_bytes > 0 {
            tracing::warn!(
                path = %path.display(),
                bytes = extent.torn_bytes,
                "the journal's last line was torn by a crash: it is cut off"
            );
            let cutting = |source| JournalError::io("cutting a torn line off", &path, source);
            file.set_len(extent.whole_bytes).map_err(cutting)?;
        }
        segment.bytes = extent.whole_bytes;
        self.next_seq = extent.next_seq;
        self.current = Some(file);
        Ok(())
    }

    /// Removes the rest of a line of an earlier append, if that was not possible at that time.
    fn repair(&mut self) -> Result<(), JournalError> {
        if !self.torn {
            return Ok(());
        }
        let path = self.current_path();
        let (Some(file), Some(segment)) = (&self.current, self.segments.back()) else { return Ok(()) };
        file.set_len(segment.bytes)
            .map_err(|source| JournalError::io("taking a partly written line back in", &path, source))?;
        self.torn = false;
        Ok(())
    }

    /// Starts a new segment if the line does not fit into this one, and deletes the oldest ones beyond the limit.
    fn make_room(&mut self, seq: u64, line_bytes: u64) -> Result<(), JournalError> {
        let full = self.segments.back().is_none_or(|segment| {
            segment.bytes > 0 && segment.bytes.saturating_add(line_bytes) > self.limits.segment_bytes
        });
        if full || self.current.is_none() {
            self.begin_segment(seq)?;
        }
        self.delete_beyond_limit(line_bytes);
        Ok(())
    }

    fn begin_segment(&mut self, first_seq: u64) -> Result<(), JournalError> {
        let left = self.current_path();
        let path = segment_path(&self.dir, first_seq);
        let creating = |source| JournalError::io("creating", &path, source);
        let file = OpenOptions::new().append(true).create(true).mode(0o640).open(&path).map_err(creating)?;
        file.set_len(0).map_err(creating)?;
        self.segments.push_back(Segment { first_seq, bytes: 0 });
        // The next sync waits for the disk, not this entry.
        let before = self.current.replace(file).filter(|_| self.unsynced.data);
        self.unsynced.left.extend(before.map(|before| (left, before)));
        self.unsynced.data = false;
        self.unsynced.directory = true;
        Ok(())
    }

    /// Deletes the oldest segments until `coming` more bytes fit; the current segment always stays.
    fn delete_beyond_limit(&mut self, coming: u64) {
        let mut total = self.segments.iter().map(|segment| segment.bytes).sum::<u64>().saturating_add(coming);
        while total > self.limits.total_bytes && self.segments.len() > 1 {
            let Some(oldest) = self.segments.front().copied() else { return };
            let path = segment_path(&self.dir, oldest.first_seq);
            match std::fs::remove_file(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    // No reason to lose an entry: the next append tries again.
                    tracing::warn!(path = %path.display(), %error, "the journal's oldest segment cannot be deleted");
                    return;
                }
            }
            total = total.saturating_sub(oldest.bytes);
            self.segments.pop_front();
        }
    }

    /// Writes a whole line with one write(). If a failing disk wrote part of it, that part is removed.
    fn write_line(&mut self, line: &[u8]) -> Result<(), JournalError> {
        let path = self.current_path();
        let (Some(file), Some(segment)) = (&mut self.current, self.segments.back_mut()) else {
            return Err(JournalError::io("appending to", &path, ErrorKind::NotFound.into()));
        };
        if let Err(source) = file.write_all(line) {
            self.torn = file.set_len(segment.bytes).is_err();
            return Err(JournalError::io("appending to", &path, source));
        }
        segment.bytes = segment.bytes.saturating_add(line.len() as u64);
        self.unsynced.data = true;
        Ok(())
    }
}

/// Takes the directory's lock and stores this process's id in it, for the error message of another process.
fn take_lock(dir: &Path) -> Result<File, JournalError> {
    let path = dir.join("lock");
    let opening = |source| JournalError::io("opening the lock", &path, source);
    let mut lock = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o640)
        .open(&path)
        .map_err(opening)?;
    match locked_soon(&lock) {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let holder = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
            return Err(JournalError::Locked { dir: dir.to_owned(), holder });
        }
        Err(TryLockError::Error(source)) => return Err(JournalError::io("locking", &path, source)),
    }
    // The id is only for people: a full disk must not prevent opening the journal.
    let noted = lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id()));
    if let Err(error) = noted {
        tracing::debug!(path = %path.display(), %error, "the lock's holder could not be noted");
    }
    Ok(lock)
}

/// Takes the lock; waits a moment for its holder. A process that is being started holds its parent's open files
/// until it executes its program: for example the lock of an agent that has just ended, or of a journal that was
/// just closed.
fn locked_soon(lock: &File) -> Result<(), TryLockError> {
    for _ in 0..LOCK_TRIES {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(BETWEEN_LOCK_TRIES),
            other => return other,
        }
    }
    lock.try_lock()
}

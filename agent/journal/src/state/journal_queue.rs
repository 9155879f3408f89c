//! The queue of entries for the journal. Entries wait in memory while the journal cannot be written, and bursts of
//! entries are written together.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mainstay_model::entry::Entry;

use super::UNWRITTEN_ENTRIES;
use crate::store::journal::{Journal, JournalError, Unforced};
use crate::store::sync_thread::Forced;
use mainstay_sys::timed_files::Patient;

/// Maximum number of entries that are written together.
const GATHERED_ENTRIES: usize = 256;

/// How long an entry waits for the journal's file system. After a timeout, no entry waits until it answers again.
const WRITE_TIMEOUT: Duration = Duration::from_millis(500);

/// The same for the very last entries, which are synced to disk.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// A disk that is busy for less than this is not reported.
const REPORT_AFTER: Duration = Duration::from_secs(2);

/// Entries that are queued for the journal.
#[derive(Debug)]
pub(super) struct JournalQueue {
    /// Written by a separate thread: it may be on a user's file system.
    journal: Arc<Mutex<Journal>>,
    writing: Patient,
    dir: PathBuf,
    /// The number of the oldest entry in the journal.
    oldest: u64,
    /// The same after the next deletion of a segment; 0 while there is only one.
    oldest_after_deletion: u64,
    /// What did not reach the disk and could not be returned to the journal so far.
    not_forced: Vec<Unforced>,
    /// Entries that are queued for the disk, oldest first.
    unwritten: VecDeque<Arc<Entry>>,
    /// Whether some of them have not been sent to the journal yet.
    has_gathered: bool,
    error: Option<Arc<str>>,
    /// Since when the journal's file system has not answered.
    silent_since: Option<Instant>,
    /// Entries that never reached the journal.
    lost: u64,
}

impl JournalQueue {
    pub(super) fn new(journal: Journal) -> JournalQueue {
        JournalQueue {
            writing: Patient::new("journal"),
            dir: journal.dir().to_owned(),
            oldest: journal.oldest().unwrap_or(0),
            oldest_after_deletion: journal.oldest_after_deletion().unwrap_or(0),
            not_forced: Vec::new(),
            unwritten: VecDeque::new(),
            has_gathered: false,
            error: None,
            silent_since: None,
            lost: 0,
            journal: Arc::new(Mutex::new(journal)),
        }
    }

    /// The number of the oldest entry in the journal; 0 while it is empty.
    pub(super) fn oldest(&self) -> u64 {
        self.oldest
    }

    /// The first number that stays in the journal when its oldest segment is deleted.
    pub(super) fn oldest_after_deletion(&self) -> u64 {
        self.oldest_after_deletion
    }

    /// Entries that are queued for the disk, oldest first.
    pub(super) fn unwritten(&self) -> &VecDeque<Arc<Entry>> {
        &self.unwritten
    }

    /// Why the journal cannot be written at the moment, if it cannot.
    pub(super) fn error(&self) -> Option<&Arc<str>> {
        self.error.as_ref()
    }

    /// Writes an entry and everything queued before it.
    pub(super) fn append(&mut self, entry: Entry) {
        self.unwritten.push_back(Arc::new(entry));
        self.write();
    }

    /// Keeps an entry until [`JournalQueue::write_gathered`], or until there are many.
    pub(super) fn gather(&mut self, entry: Entry) {
        self.unwritten.push_back(Arc::new(entry));
        self.has_gathered = true;
        if self.unwritten.len() >= GATHERED_ENTRIES {
            self.write();
        }
    }

    /// Writes what was gathered.
    pub(super) fn write_gathered(&mut self) {
        if self.has_gathered {
            self.write();
        }
    }

    /// Writes queued entries and waits, with a time limit, until the disk has everything (fdatasync). An error is
    /// kept for [`JournalQueue::error`].
    pub(super) fn sync(&mut self) {
        self.writing.settle(LAST_PATIENCE);
        let synced = self.write_waiting().and_then(|()| self.ask(LAST_PATIENCE, Journal::sync)?);
        self.note_journal(synced);
    }

    /// Writes queued entries, and returns what has to be synced to disk elsewhere; none if that is not available,
    /// with the reason in [`JournalQueue::error`].
    pub(super) fn unforced(&mut self) -> Option<Unforced> {
        let before = std::mem::take(&mut self.not_forced);
        let hand_out = move |journal: &mut Journal| {
            before.into_iter().for_each(|unforced| journal.not_forced(unforced));
            journal.unforced()
        };
        let unforced = self.write_waiting().and_then(|()| self.ask(WRITE_TIMEOUT, hand_out)?);
        match unforced {
            Ok(unforced) => Some(unforced),
            Err(error) => {
                self.note_journal(Err(error));
                None
            }
        }
    }

    /// Records whether what was returned is on the disk.
    pub(super) fn forced(&mut self, forced: Forced) {
        let forced = forced.map_err(|(error, unforced)| {
            self.not_forced.push(unforced);
            error
        });
        self.note_journal(forced);
    }

    /// Writes queued entries, and drops those beyond the limit of the queue.
    fn write(&mut self) {
        let written = self.write_waiting();
        if self.unwritten.len() > UNWRITTEN_ENTRIES
            && let Some(lost) = self.unwritten.pop_front()
        {
            self.lost += 1;
            // Once for each power of two: losses continue for as long as the disk fails.
            if self.lost.is_power_of_two() {
                tracing::error!(
                    seq = lost.seq,
                    lost = self.lost,
                    "entries are lost to the journal, which cannot be written"
                );
            }
        }
        self.note_journal(written);
    }

    /// Writes queued entries. The journal knows which entries of an earlier request that was still in progress it
    /// has.
    fn write_waiting(&mut self) -> Result<(), JournalError> {
        self.has_gathered = false;
        if self.unwritten.is_empty() {
            return Ok(());
        }
        let waiting: Vec<Arc<Entry>> = self.unwritten.iter().cloned().collect();
        let wrote = self.ask(WRITE_TIMEOUT, move |journal| append(journal, &waiting))?;
        (self.oldest, self.oldest_after_deletion) = (wrote.oldest, wrote.oldest_after_deletion);
        while self.unwritten.front().is_some_and(|entry| entry.seq <= wrote.through) {
            self.unwritten.pop_front();
        }
        wrote.result
    }

    /// The result of work on the journal, if its file system answers.
    fn ask<T: Send + 'static>(
        &self,
        patience: Duration,
        work: impl FnOnce(&mut Journal) -> T + Send + 'static,
    ) -> Result<T, JournalError> {
        let journal = Arc::clone(&self.journal);
        let answer = self.writing.ask(patience, move || work(&mut lock(&journal)));
        answer.ok_or_else(|| JournalError::Silent { dir: self.dir.clone() })
    }

    /// Logs when the journal fails and when it works again, not each time in between.
    fn note_journal(&mut self, result: Result<(), JournalError>) {
        if let Err(JournalError::Silent { .. }) = result {
            if self.silent_since.get_or_insert_with(Instant::now).elapsed() < REPORT_AFTER {
                return;
            }
        } else {
            self.silent_since = None;
        }
        match (result, &self.error) {
            (Ok(()), None) => {}
            (Ok(()), Some(_)) => {
                tracing::info!(dir = %self.dir.display(), "the journal can be written again");
                self.error = None;
            }
            (Err(error), before) => {
                let text: Arc<str> = error.to_string().into();
                if before.is_none() {
                    tracing::error!(%error, "the journal cannot be written; entries are kept in memory");
                }
                self.error = Some(text);
            }
        }
    }
}

/// The result of appending entries.
struct Wrote {
    /// All entries up to this number were written, or cannot be.
    through: u64,
    oldest: u64,
    oldest_after_deletion: u64,
    result: Result<(), JournalError>,
}

fn append(journal: &mut Journal, entries: &[Arc<Entry>]) -> Wrote {
    let mut result = Ok(());
    let mut through = journal.next_seq() - 1;
    for entry in entries {
        if entry.seq < journal.next_seq() {
            continue;
        }
        match journal.append_entry(entry) {
            Err(error) if error.is_disk() => {
                result = Err(error);
                break;
            }
            // Retrying will not help this entry; it must not block those behind it.
            Err(error) => {
                tracing::error!(%error, seq = entry.seq, "an entry is lost to the journal");
                result = Err(error);
            }
            Ok(()) => {}
        }
        through = entry.seq;
    }
    let (oldest, oldest_after_deletion) = (journal.oldest(), journal.oldest_after_deletion());
    let [oldest, oldest_after_deletion] = [oldest, oldest_after_deletion].map(Option::unwrap_or_default);
    Wrote { through, oldest, oldest_after_deletion, result }
}

/// After a panic of another holder the journal is in a state that the next append handles, as after a crash.
fn lock(journal: &Mutex<Journal>) -> MutexGuard<'_, Journal> {
    journal.lock().unwrap_or_else(PoisonError::into_inner)
}

//! The way of entries into the journal. Entries wait in memory while the journal cannot be written, and where they come in bursts they
//! are written together.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mainstay_core::model::entry::Entry;

use super::UNWRITTEN_ENTRIES;
use crate::os::patient::Patient;
use crate::store::forcing::Forced;
use crate::store::journal::{Journal, JournalError, Unforced};

/// Entries that are written together at most.
const GATHERED_ENTRIES: usize = 256;

/// How long an entry waits for the journal's file system. Once it has not answered, none waits until it does.
const PATIENCE: Duration = Duration::from_millis(500);

/// The same for the last entries of all, which are forced onto the disk.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// A disk that is busy for less is not worth a word.
const REPORT_AFTER: Duration = Duration::from_secs(2);

/// Entries on their way into the journal.
#[derive(Debug)]
pub(super) struct JournalQueue {
    /// Written by a thread of its own: it may be on a file system of a user's.
    journal: Arc<Mutex<Journal>>,
    writing: Patient,
    dir: PathBuf,
    /// The number of the oldest entry that the journal holds.
    oldest: u64,
    /// What did not reach the disk and could not be handed back to the journal so far.
    not_forced: Vec<Unforced>,
    /// Entries that wait for the disk, oldest first.
    unwritten: VecDeque<Arc<Entry>>,
    /// Whether the journal was not asked to write some of them so far.
    has_gathered: bool,
    error: Option<Arc<str>>,
    /// Since when the journal's file system has not answered.
    silent_since: Option<Instant>,
    /// Entries that the journal never got.
    lost: u64,
}

impl JournalQueue {
    pub(super) fn new(journal: Journal) -> JournalQueue {
        JournalQueue {
            writing: Patient::new("journal"),
            dir: journal.dir().to_owned(),
            oldest: journal.oldest().unwrap_or(0),
            not_forced: Vec::new(),
            unwritten: VecDeque::new(),
            has_gathered: false,
            error: None,
            silent_since: None,
            lost: 0,
            journal: Arc::new(Mutex::new(journal)),
        }
    }

    /// The number of the oldest entry that the journal holds; 0 while it is empty.
    pub(super) fn oldest(&self) -> u64 {
        self.oldest
    }

    /// Entries that wait for the disk, oldest first.
    pub(super) fn unwritten(&self) -> &VecDeque<Arc<Entry>> {
        &self.unwritten
    }

    /// Why the journal cannot be written at present, if it cannot.
    pub(super) fn error(&self) -> Option<&Arc<str>> {
        self.error.as_ref()
    }

    /// Has an entry written, and what waits before it.
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

    /// Has written what was gathered.
    pub(super) fn write_gathered(&mut self) {
        if self.has_gathered {
            self.write();
        }
    }

    /// Writes what still waits and waits until the disk has everything (fdatasync), but not for ever. An error is kept for
    /// [`JournalQueue::error`].
    pub(super) fn sync(&mut self) {
        self.writing.settle(LAST_PATIENCE);
        let synced = self.write_waiting().and_then(|()| self.ask(LAST_PATIENCE, Journal::sync)?);
        self.note_journal(synced);
    }

    /// Writes what still waits, and hands out what is to be forced onto the disk elsewhere; none where that cannot be
    /// had, for which [`JournalQueue::error`] has the reason.
    pub(super) fn unforced(&mut self) -> Option<Unforced> {
        let before = std::mem::take(&mut self.not_forced);
        let hand_out = move |journal: &mut Journal| {
            before.into_iter().for_each(|unforced| journal.not_forced(unforced));
            journal.unforced()
        };
        let unforced = self.write_waiting().and_then(|()| self.ask(PATIENCE, hand_out)?);
        match unforced {
            Ok(unforced) => Some(unforced),
            Err(error) => {
                self.note_journal(Err(error));
                None
            }
        }
    }

    /// Takes in whether what was handed out is on the disk.
    pub(super) fn forced(&mut self, forced: Forced) {
        let forced = forced.map_err(|(error, unforced)| {
            self.not_forced.push(unforced);
            error
        });
        self.note_journal(forced);
    }

    /// Has what waits written, and keeps no more than may wait.
    fn write(&mut self) {
        let written = self.write_waiting();
        if self.unwritten.len() > UNWRITTEN_ENTRIES
            && let Some(lost) = self.unwritten.pop_front()
        {
            self.lost += 1;
            // Once for each power of two: it goes on for as long as the disk does not come back.
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

    /// Has what waits written. Of what was still being written when it was last asked, the journal knows what it has.
    fn write_waiting(&mut self) -> Result<(), JournalError> {
        self.has_gathered = false;
        if self.unwritten.is_empty() {
            return Ok(());
        }
        let waiting: Vec<Arc<Entry>> = self.unwritten.iter().cloned().collect();
        let wrote = self.ask(PATIENCE, move |journal| append(journal, &waiting))?;
        self.oldest = wrote.oldest;
        while self.unwritten.front().is_some_and(|entry| entry.seq <= wrote.through) {
            self.unwritten.pop_front();
        }
        wrote.result
    }

    /// What comes of work on the journal, if its file system answers.
    fn ask<T: Send + 'static>(
        &self,
        patience: Duration,
        work: impl FnOnce(&mut Journal) -> T + Send + 'static,
    ) -> Result<T, JournalError> {
        let journal = Arc::clone(&self.journal);
        let answer = self.writing.ask(patience, move || work(&mut lock(&journal)));
        answer.ok_or_else(|| JournalError::Silent { dir: self.dir.clone() })
    }

    /// Logs when the journal fails and when it is well again, not each time in between.
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

/// What came of appending entries.
struct Wrote {
    /// All entries up to this number were written, or cannot be.
    through: u64,
    oldest: u64,
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
            // Time will not mend this entry; it must not hold up those behind it.
            Err(error) => {
                tracing::error!(%error, seq = entry.seq, "an entry is lost to the journal");
                result = Err(error);
            }
            Ok(()) => {}
        }
        through = entry.seq;
    }
    Wrote { through, oldest: journal.oldest().unwrap_or(0), result }
}

/// A panic of another holder leaves the journal as the next append finds it after a crash.
fn lock(journal: &Mutex<Journal>) -> MutexGuard<'_, Journal> {
    journal.lock().unwrap_or_else(PoisonError::into_inner)
}

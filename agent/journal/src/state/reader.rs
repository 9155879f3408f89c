//! The reading side of what is published.

use std::sync::Arc;

use mainstay_model::entry::Entry;
use mainstay_view::node::NodeView;
use tokio::sync::watch;

use super::{Published, Roster};
use crate::store::journal::{JournalError, JournalPage, JournalReader, Most};

/// The reading side. Each clone notices changes independently.
#[derive(Clone, Debug)]
pub struct StateReader {
    pub(super) journal: JournalReader,
    pub(super) published: watch::Receiver<Published>,
    pub(super) roster: Roster,
}

impl StateReader {
    /// Whether nothing will be published any more.
    pub fn is_gone(&self) -> bool {
        self.published.has_changed().is_err()
    }

    /// Which sensors watch the host, and their progress.
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// The view as it was last published.
    pub fn view(&self) -> Arc<NodeView> {
        self.published.borrow().view.clone()
    }

    /// Waits until something is published that this reader has not seen yet. False once the writer is gone: nothing
    /// will be published any more.
    pub async fn changed(&mut self) -> bool {
        self.published.changed().await.is_ok()
    }

    /// Waits until there is an entry with a number above `cursor`. False once the writer is gone.
    pub async fn newer_than(&mut self, cursor: u64) -> bool {
        self.published.wait_for(|published| published.newest > cursor).await.is_ok()
    }

    /// At most `limit` entries with numbers above `cursor`, including those queued for the disk. Reads files: call
    /// it where blocking is allowed.
    pub fn entries_after(&self, cursor: u64, limit: impl Into<Most>) -> Result<JournalPage, JournalError> {
        let limit = limit.into();
        // Copied before the files are read: entries written in between are found there.
        let waiting = self.published.borrow().unwritten.clone();
        let mut read = self.journal.entries_after(cursor, limit)?;
        if read.is_cut {
            return Ok(read);
        }
        for entry in waiting.iter().filter(|entry| entry.seq > read.cursor.max(cursor)) {
            if read.entries.len() >= limit.entries {
                read.is_cut = true;
                break;
            }
            read.entries.push(Entry::clone(entry));
        }
        read.cursor = read.entries.last().map_or(read.cursor, |last| last.seq.max(read.cursor));
        Ok(read)
    }

    /// The number of the newest entry; 0 before the first.
    pub fn newest(&self) -> u64 {
        self.published.borrow().newest
    }

    /// The number of the oldest entry in the journal; 0 while it is empty.
    pub fn oldest(&self) -> u64 {
        self.published.borrow().oldest
    }

    /// Why the journal cannot be written at the moment, if it cannot.
    pub fn journal_error(&self) -> Option<Arc<str>> {
        self.published.borrow().journal_error.clone()
    }
}

//! What a leader that took the place of another one needs to know of it.

use crate::model::entry::Entry;

use super::wire::Join;

/// The leader whose place this launcher took: which of its entries are where in the journal here.
#[derive(Debug)]
pub struct Predecessor {
    launcher: String,
    /// Its number of an entry, and the number here; in order.
    entries: Vec<(u64, u64)>,
    /// The newest entry here when it was lost.
    since: u64,
}

impl Predecessor {
    /// `entries` are those of the journal here, `since` the newest.
    pub fn new(launcher: String, entries: &[Entry], since: u64) -> Predecessor {
        let entries = entries.iter().filter_map(|entry| Some((entry.origin_seq?, entry.seq))).collect();
        Predecessor { launcher, entries, since }
    }

    /// The newest entry here when it was lost.
    pub fn since(&self) -> u64 {
        self.since
    }

    /// What of the journal here a follower has that had so many of its entries.
    pub fn position(&self, join: &Join) -> u64 {
        if join.have_of != self.launcher {
            return self.since;
        }
        let has = self.entries.partition_point(|(theirs, _)| *theirs <= join.have.1);
        match (has.checked_sub(1).and_then(|last| self.entries.get(last)), self.entries.get(has)) {
            (_, None) => self.since,
            (Some((_, ours)), Some(_)) => *ours,
            (None, Some((_, first))) => first.saturating_sub(1),
        }
    }
}

//! What a leader needs to know about the leader that it replaced.

use mainstay_model::entry::Entry;

use super::wire::Join;

/// The leader that this launcher replaced, with the positions of its entries in the local journal.
#[derive(Debug)]
pub struct Predecessor {
    launcher: String,
    /// Its number of an entry and the local number; in order.
    entries: Vec<(u64, u64)>,
    /// The newest local entry when it was lost.
    since: u64,
}

impl Predecessor {
    /// `entries` are those of the local journal, `since` is the newest.
    pub fn new(launcher: String, entries: &[Entry], since: u64) -> Predecessor {
        let entries = entries.iter().filter_map(|entry| Some((entry.origin_seq?, entry.seq))).collect();
        Predecessor { launcher, entries, since }
    }

    /// The newest local entry when it was lost.
    pub fn since(&self) -> u64 {
        self.since
    }

    /// The position in the local journal of a follower that has that many entries of the former leader.
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

//! The newest entries of the leader's journal, kept in memory for its followers so that they are not read back from
//! the disk for each.

use std::collections::VecDeque;
use std::sync::Arc;

use mainstay_model::entry::{Body, Entry};
use mainstay_model::time::Stamp;

/// The number of entries that are kept. For followers that need older ones they are read from the disk.
const MAX_ENTRIES: usize = 2048;

/// The number of entries that are kept while they are not sent to followers: a round of a large job records several
/// of each rank between two feeds.
const UNSENT: usize = 1 << 18;

/// An entry, shared by many followers.
#[derive(Clone, Debug)]
pub(super) struct Recorded {
    pub(super) seq: u64,
    pub(super) at: Stamp,
    pub(super) is_of_leader_before: bool,
    pub(super) is_of_the_job: bool,
    pub(super) body: Arc<Body>,
}

impl Recorded {
    pub(super) fn from_entry(entry: &Entry) -> Recorded {
        Recorded {
            seq: entry.seq,
            at: entry.at,
            is_of_leader_before: entry.origin_seq.is_some(),
            is_of_the_job: entry.job.is_some() && !matches!(entry.body, Body::Health(_)),
            body: Arc::new(entry.body.clone()),
        }
    }
}

/// The newest entries, without gaps.
#[derive(Debug)]
pub struct Recent {
    complete_after: u64,
    sent: u64,
    entries: VecDeque<Recorded>,
}

impl Recent {
    /// Empty; the next entry has number `seq`.
    pub fn complete_from(seq: u64) -> Recent {
        let before = seq.saturating_sub(1);
        Recent { complete_after: before, sent: before, entries: VecDeque::new() }
    }

    /// All entries with a higher number are available.
    pub fn complete_after(&self) -> u64 {
        self.complete_after
    }

    /// The number of the newest entry.
    pub(super) fn newest(&self) -> u64 {
        self.entries.back().map_or(self.complete_after, |entry| entry.seq)
    }

    /// Adds the newest entry.
    pub fn push(&mut self, entry: &Entry) {
        let is_sent = |oldest: &Recorded| oldest.seq <= self.sent;
        let has_room = self.entries.len() < MAX_ENTRIES
            || (self.entries.len() < UNSENT && !self.entries.front().is_some_and(is_sent));
        if !has_room {
            self.drop_oldest();
        }
        self.entries.push_back(Recorded::from_entry(entry));
    }

    /// All connected followers have the entries up to this number.
    pub(super) fn sent(&mut self, through: u64) {
        self.sent = through;
        while self.entries.len() > MAX_ENTRIES
            && self.entries.front().is_some_and(|oldest| oldest.seq <= through)
        {
            self.drop_oldest();
        }
        // Releases the memory that a round needed.
        if self.entries.capacity() > 8 * MAX_ENTRIES {
            self.entries.shrink_to(2 * MAX_ENTRIES);
        }
    }

    fn drop_oldest(&mut self) {
        if let Some(oldest) = self.entries.pop_front() {
            self.complete_after = oldest.seq;
        }
    }

    /// The entries with a higher number, oldest first.
    pub(super) fn after(&self, seq: u64) -> impl Iterator<Item = &Recorded> {
        let known = self.entries.partition_point(|entry| entry.seq <= seq);
        self.entries.range(known..)
    }
}

#[cfg(test)]
mod tests {
    use mainstay_model::entry::Fact;
    use mainstay_model::id::BootId;

    use super::*;

    fn entry(seq: u64) -> Entry {
        let body = Body::Fact(Fact::AgentFound { version: String::new() });
        Entry { seq, at: Stamp::default(), boot: BootId(String::new()), job: None, origin_seq: None, body }
    }

    #[test]
    fn dropped_entries_are_known_to_be_missing() {
        let mut recent = Recent::complete_from(5);
        assert_eq!(recent.complete_after(), 4);
        (5..5 + MAX_ENTRIES as u64).for_each(|seq| recent.push(&entry(seq)));
        recent.sent(recent.newest());
        assert_eq!((recent.complete_after(), recent.after(4).count()), (4, MAX_ENTRIES));
        recent.push(&entry(5 + MAX_ENTRIES as u64));
        assert_eq!((recent.complete_after(), recent.after(0).next().map(|entry| entry.seq)), (5, Some(6)));
        assert_eq!(recent.after(4 + MAX_ENTRIES as u64).count(), 1);
    }

    #[test]
    fn unsent_entries_are_kept_up_to_a_limit() {
        let mut recent = Recent::complete_from(1);
        let many = 3 * MAX_ENTRIES as u64;
        (1..=many).for_each(|seq| recent.push(&entry(seq)));
        assert_eq!((recent.complete_after(), recent.newest()), (0, many));
        recent.sent(many / 2);
        assert_eq!(recent.complete_after(), many / 2);
        recent.sent(many);
        assert_eq!(
            (recent.complete_after(), recent.after(0).count()),
            (many - MAX_ENTRIES as u64, MAX_ENTRIES)
        );
        (many + 1..=many + UNSENT as u64 + 7).for_each(|seq| recent.push(&entry(seq)));
        assert_eq!(recent.after(0).count(), UNSENT);
    }
}

//! The newest entries of the leader's journal, kept for its followers: none of these is read back from the disk for each of them.

use std::collections::VecDeque;

use crate::model::entry::Entry;

/// So many are kept. Followers that need older ones have them read from the disk.
const KEPT: usize = 2048;

/// The newest entries, without gaps.
#[derive(Debug)]
pub struct Recent {
    complete_after: u64,
    entries: VecDeque<Entry>,
}

impl Recent {
    /// Empty; the next entry has this number.
    pub fn complete_from(seq: u64) -> Recent {
        Recent { complete_after: seq.saturating_sub(1), entries: VecDeque::new() }
    }

    /// All entries with a higher number are here.
    pub fn complete_after(&self) -> u64 {
        self.complete_after
    }

    /// Takes in the newest entry.
    pub fn push(&mut self, entry: Entry) {
        if self.entries.len() == KEPT
            && let Some(oldest) = self.entries.pop_front()
        {
            self.complete_after = oldest.seq;
        }
        self.entries.push_back(entry);
    }

    /// Those with a higher number, oldest first.
    pub fn after(&self, seq: u64) -> impl Iterator<Item = &Entry> {
        let known = self.entries.partition_point(|entry| entry.seq <= seq);
        self.entries.range(known..)
    }
}

#[cfg(test)]
mod tests {
    use crate::base::id::BootId;
    use crate::base::time::Stamp;
    use crate::model::entry::{Body, Fact};

    use super::*;

    fn entry(seq: u64) -> Entry {
        let body = Body::Fact(Fact::AgentFound { version: String::new() });
        Entry { seq, at: Stamp::default(), boot: BootId(String::new()), job: None, origin_seq: None, body }
    }

    #[test]
    fn what_is_no_longer_kept_is_known_to_be_missing() {
        let mut recent = Recent::complete_from(5);
        assert_eq!(recent.complete_after(), 4);
        (5..5 + KEPT as u64).for_each(|seq| recent.push(entry(seq)));
        assert_eq!((recent.complete_after(), recent.after(4).count()), (4, KEPT));
        recent.push(entry(5 + KEPT as u64));
        assert_eq!((recent.complete_after(), recent.after(0).next().map(|entry| entry.seq)), (5, Some(6)));
        assert_eq!(recent.after(4 + KEPT as u64).count(), 1);
    }
}

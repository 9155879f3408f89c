//! Followers get the job's journal from their leader.

use super::{Act, Lead};
use crate::base::time::{Mono, Span};
use crate::model::entry::{Body, Entry};
use crate::recovery::hosts::link::Link;
use crate::recovery::hosts::predecessor::Predecessor;
use crate::recovery::hosts::recent::Recent;
use crate::recovery::hosts::wire::Down;

/// How often followers are sent what is new in the journal, at most; and while ranks are stopped and started.
const FED_EVERY: Span = Span::millis(50);
const FED_IN_A_ROUND: Span = Span::millis(500);

impl Lead {
    /// Keeps an entry that was written just now for the followers, so that none is read back from the disk.
    pub fn keep_recent(&mut self, entry: &Entry) {
        self.recent.get_or_insert_with(|| Recent::complete_from(entry.seq)).push(entry.clone());
    }

    /// Whether followers are to be sent what is new in the journal: in parts, and not while they are to stop or start ranks.
    /// What is ordered comes first.
    pub fn is_feed_due(&mut self, now: Mono) -> bool {
        let every = if self.merge.is_settled() { FED_EVERY } else { FED_IN_A_ROUND };
        let due = !self.deposed && now.since(self.fed) >= every;
        if due {
            self.fed = now;
        }
        due
    }

    /// Sends what followers have not of the job's journal. `read` has what is older than what is kept in memory; none if it
    /// cannot be read now.
    pub fn feed(&mut self, read: impl Fn(u64) -> Option<Vec<Entry>>) {
        let Some(recent) = &self.recent else { return };
        // What a leader wrote before it led is of the leader before it, or of its host alone.
        let since = self.predecessor.as_ref().map_or(0, Predecessor::since);
        for link in self.links.iter_mut().filter(|link| link.connection.is_some()) {
            if link.entries < recent.complete_after() {
                // Nothing newer goes before it: it is read again later.
                let Some(older) = read(link.entries) else { continue };
                for entry in older.iter().filter(|entry| entry.seq <= recent.complete_after()) {
                    self.acts.extend(link.entry(entry, since));
                }
                link.entries = recent.complete_after();
            }
            for entry in recent.after(link.entries) {
                self.acts.extend(link.entry(entry, since));
            }
        }
    }
}

impl Link {
    /// The message with an entry, if it is one of the job.
    fn entry(&mut self, entry: &Entry, since: u64) -> Option<Act> {
        self.entries = entry.seq;
        let mine = entry.seq > since || entry.origin_seq.is_some();
        if !mine || entry.job.is_none() || matches!(entry.body, Body::Health(_)) {
            return None;
        }
        let down = Down::Entry { seq: entry.seq, at: entry.at, body: Box::new(entry.body.clone()) };
        Some(Act::Send(self.connection?, down))
    }
}

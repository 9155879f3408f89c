//! Followers get the job's journal from their leader.

use std::sync::Arc;

use super::parts::part_for;
use super::{Act, Lead};
use crate::base::time::{Mono, Span, Stamp};
use crate::model::entry::{Body, Entry};
use crate::recovery::hosts::link::{Connection, Link};
use crate::recovery::hosts::predecessor::Predecessor;
use crate::recovery::hosts::recent::Recent;
use crate::recovery::hosts::round::Seated;
use crate::recovery::hosts::wire::Down;

/// In a job of more hosts than that not all of them get the whole journal: what is said of each rank, for each host, grows with
/// the square of the job. At 12,500 hosts that were 100 GB for each start.
const WHOLE_UP_TO: usize = 256;

/// Then these do, from the first seat on. The others get what concerns all, and of single ranks what concerns their own.
const KEEPERS: usize = 16;

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
        let all = self.links.len() <= WHOLE_UP_TO;
        let connected = || self.links.iter().filter(|link| link.connection.is_some());
        let Some(behind) = connected().map(|link| link.entries).min() else { return };
        let newest: Vec<Shared> = recent.after(behind).map(Shared::of).collect();
        for (seat, link) in self.links.iter_mut().enumerate() {
            let Some(connection) = link.connection else { continue };
            let keeps = all || seat < KEEPERS;
            if link.entries < recent.complete_after() {
                // Nothing newer goes before it: it is read again later.
                let Some(older) = read(link.entries) else { continue };
                for entry in older.iter().filter(|entry| entry.seq <= recent.complete_after()) {
                    self.acts.extend(link.entry(connection, &Shared::of(entry), since, keeps));
                }
                link.entries = recent.complete_after();
            }
            let known = newest.partition_point(|entry| entry.seq <= link.entries);
            for entry in newest.iter().skip(known) {
                self.acts.extend(link.entry(connection, entry, since, keeps));
            }
        }
    }
}

impl Link {
    /// The message with an entry, if it is one of the job. `keeps`: this host gets the whole journal.
    fn entry(&mut self, connection: Connection, entry: &Shared, since: u64, keeps: bool) -> Option<Act> {
        self.entries = entry.seq;
        let mine = entry.seq > since || entry.is_of_leader_before;
        if !mine || !entry.is_of_the_job {
            return None;
        }
        let body = match keeps {
            true => Arc::clone(&entry.body),
            false => {
                let Seated { member, seat } = &self.seated;
                part_for(&entry.body, seat.first_rank..seat.first_rank.saturating_add(member.ranks))?
            }
        };
        Some(Act::Send(connection, Down::Entry { seq: entry.seq, at: entry.at, body }))
    }
}

/// An entry for many followers.
struct Shared {
    seq: u64,
    at: Stamp,
    is_of_leader_before: bool,
    is_of_the_job: bool,
    body: Arc<Body>,
}

impl Shared {
    fn of(entry: &Entry) -> Shared {
        Shared {
            seq: entry.seq,
            at: entry.at,
            is_of_leader_before: entry.origin_seq.is_some(),
            is_of_the_job: entry.job.is_some() && !matches!(entry.body, Body::Health(_)),
            body: Arc::new(entry.body.clone()),
        }
    }
}

//! Sends the job's journal from the leader to its followers.

use std::ops::Range;
use std::sync::Arc;

use super::parts::{only_rank, part_for};
use super::{Act, Here, Lead};
use crate::link::{Connection, Link};
use crate::predecessor::Predecessor;
use crate::recent::{Recent, Recorded};
use crate::wire::Down;
use mainstay_model::entry::Entry;
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};

/// In a job with more hosts than this not all of them get the whole journal: entries about each rank, sent to each
/// host, grow with the square of the job. With 12,500 hosts that would be 100 GB for each start.
const WHOLE_UP_TO: usize = 256;

/// In such a job this many hosts get it, from the first seat on. The others get what concerns the job, and their own
/// ranks.
const KEEPERS: usize = 5;

/// The shortest interval between journal updates to followers, in general and while ranks are stopped and started. A
/// round of a large job records several entries of each of 100,000 ranks, which would delay its commands for seconds.
const FED_EVERY: Span = Span::millis(50);
const FED_IN_A_ROUND: Span = Span::millis(500);
const FED_IN_A_LARGE_ROUND: Span = Span::seconds(10);

/// The most entries that a large job sends at one time, to all followers together, so that beats and reports are not
/// delayed.
const AT_ONE_TIME: usize = 8192;

/// The most entries that are read back from the disk at one time.
const READ_AT_ONE_TIME: usize = 1 << 15;

/// With the last command, a follower with at most this many new entries gets all of them, otherwise only its part:
/// more would overflow its connection and end it.
const AT_THE_END: usize = 4096;

impl Lead {
    /// Keeps an entry that was just written for the followers, so that it is not read back from the disk.
    pub fn keep_recent(&mut self, entry: &Entry) {
        if !self.leader_settings.has_store {
            return;
        }
        self.recent.get_or_insert_with(|| Recent::complete_from(entry.seq)).push(entry);
    }

    /// Whether to send followers the news of the journal: in parts, and not while they stop or start ranks. Orders
    /// come first.
    pub(super) fn is_feed_due(&mut self, now: Mono) -> bool {
        let is_large = self.links.len() > WHOLE_UP_TO;
        let every = match self.merge.is_settled() {
            true => FED_EVERY,
            // A feed in progress continues: a job can wait for a lost host for long.
            false if is_large && !self.feeds => FED_IN_A_LARGE_ROUND,
            false => FED_IN_A_ROUND,
        };
        let due = self.leader_settings.has_store && now.since(self.fed) >= every;
        if due {
            self.fed = now;
        }
        due
    }

    /// Sends followers the entries of the journal that they lack. In a large job one call sends a limited number, and
    /// the next calls send the rest.
    pub(super) fn feed(&mut self, here: &dyn Here) {
        let most = if self.links.len() <= WHOLE_UP_TO { usize::MAX } else { AT_ONE_TIME };
        self.feeds = self.feed_at_most(most, usize::MAX, READ_AT_ONE_TIME, here);
    }

    /// Sends what followers lack, before the last command.
    pub fn feed_all(&mut self, here: &dyn Here) {
        self.feed_at_most(usize::MAX, AT_THE_END, usize::MAX, here);
    }

    /// Sends at most `most` entries in all, and reads at most `read_back` from the disk. A host that keeps the
    /// journal gets only its part if it lacks more than `whole` entries. Returns whether any are left.
    fn feed_at_most(&mut self, most: usize, whole: usize, read_back: usize, here: &dyn Here) -> bool {
        let Some(recent) = &mut self.recent else { return false };
        // What this launcher wrote before it led belongs to the leader before it, or to its host alone.
        let since = self.predecessor.as_ref().map_or(0, Predecessor::since);
        let all = self.links.len() <= WHOLE_UP_TO;
        let connected = self.links.iter().filter(|link| link.connection.is_some());
        let Some(behind) = connected.map(|link| link.entries).min() else {
            recent.sent(recent.newest());
            return false;
        };
        let complete_after = recent.complete_after();
        // Once for all followers: each of many thousands may need it.
        let older =
            if behind < complete_after { here.entries_after(behind, read_back) } else { Some(Vec::new()) };
        let is_read = older.is_some();
        let older = older.unwrap_or_default();
        let is_cut = older.len() >= read_back;
        let older = older.iter().filter(|entry| entry.seq <= complete_after).map(Recorded::from_entry);
        let older: Vec<Recorded> = older.collect();
        // The kept entries follow only if all older ones were read.
        let newest = if is_cut { older.last().map_or(behind, |entry| entry.seq) } else { recent.newest() };
        let kept = recent.after(behind.max(complete_after)).filter(|_| !is_cut);
        let news = JournalUpdate::from_entries(older.iter().chain(kept));
        let (count, mut left) = (self.links.len(), most);
        let keepers = if all { count } else { KEEPERS.min(count) };
        let first = self.fed_from.clamp(keepers, count);
        // Hosts with the whole journal come first: one of them may lead next.
        for seat in (0..keepers).chain(first..count).chain(keepers..first) {
            let Some(link) = self.links.get_mut(seat) else { continue };
            let Some(connection) = link.connection else { continue };
            // Nothing newer is sent before what cannot be read now; it is read later.
            if link.entries >= newest || (!is_read && link.entries < complete_after) {
                continue;
            }
            // Keepers leave half of the budget to the others.
            let room = if all || seat >= keepers { left } else { left.saturating_sub(most / 2) };
            if room == 0 {
                if seat >= keepers {
                    self.fed_from = seat;
                    break;
                }
                continue;
            }
            let keeps = seat < keepers && news.count_after(link.entries) <= whole;
            let (part, through) = match keeps {
                true => news.all_after(link.entries, room),
                false => (news.for_host(link.entries, &link.seated.ranks()), None),
            };
            left = left.saturating_sub(part.len());
            let sent = part.into_iter().filter_map(|entry| link.entry(connection, entry, since, keeps));
            self.acts.extend(sent);
            link.entries = through.unwrap_or(newest);
        }
        let connected = self.links.iter().filter(|link| link.connection.is_some());
        let through = connected.map(|link| link.entries).min().unwrap_or(newest);
        recent.sent(through);
        through < recent.newest()
    }
}

impl Link {
    /// The message for an entry, if it belongs to the job. `keeps`: this host gets the whole journal.
    fn entry(&self, connection: Connection, entry: &Recorded, since: u64, keeps: bool) -> Option<Act> {
        let mine = entry.seq > since || entry.is_of_leader_before;
        if !mine || !entry.is_of_the_job {
            return None;
        }
        let body = match keeps {
            true => Arc::clone(&entry.body),
            false => part_for(&entry.body, self.seated.ranks())?,
        };
        Some(Act::Send(connection, Down::Entry { seq: entry.seq, at: entry.at, body }))
    }
}

/// The news of the journal, indexed so that each of many followers finds its part without scanning the entries of all
/// other ranks.
struct JournalUpdate<'a> {
    all: Vec<&'a Recorded>,
    /// Entries that are not about a single rank.
    of_the_job: Vec<&'a Recorded>,
    /// Entries about a single rank, by rank.
    of_ranks: Vec<(Rank, &'a Recorded)>,
}

impl<'a> JournalUpdate<'a> {
    /// Indexes entries that are given in order.
    fn from_entries(entries: impl Iterator<Item = &'a Recorded>) -> JournalUpdate<'a> {
        let mut news = JournalUpdate { all: entries.collect(), of_the_job: Vec::new(), of_ranks: Vec::new() };
        for entry in &news.all {
            match only_rank(&entry.body) {
                Some(rank) => news.of_ranks.push((rank, entry)),
                None => news.of_the_job.push(entry),
            }
        }
        // A stable sort: the entries of a rank stay in order.
        news.of_ranks.sort_by_key(|(rank, _)| *rank);
        news
    }

    fn count_after(&self, known: u64) -> usize {
        self.all.len() - self.all.partition_point(|entry| entry.seq <= known)
    }

    /// At most `most` of all entries, in order. If more follow, also the number of the last one.
    fn all_after(&self, known: u64, most: usize) -> (Vec<&'a Recorded>, Option<u64>) {
        let from = self.all.partition_point(|entry| entry.seq <= known);
        let to = self.all.len().min(from.saturating_add(most));
        let part = self.all.get(from..to).unwrap_or_default().to_vec();
        let last = part.last().filter(|_| to < self.all.len()).map(|entry| entry.seq);
        (part, last)
    }

    /// The entries for a host with these ranks, in order.
    fn for_host(&self, known: u64, own: &Range<u32>) -> Vec<&'a Recorded> {
        let [from, to] =
            [own.start, own.end].map(|limit| self.of_ranks.partition_point(|(rank, _)| rank.0 < limit));
        let of_own = self.of_ranks.get(from..to).unwrap_or_default().iter().map(|(_, entry)| *entry);
        let from = self.of_the_job.partition_point(|entry| entry.seq <= known);
        let of_the_job = self.of_the_job.iter().skip(from).copied();
        let mut news: Vec<&Recorded> = of_own.filter(|entry| entry.seq > known).chain(of_the_job).collect();
        news.sort_by_key(|entry| entry.seq);
        news
    }
}

#[cfg(test)]
mod tests {
    use mainstay_model::entry::{Body, Fact};
    use mainstay_model::id::{Attempt, BootId, JobId};
    use mainstay_model::time::Stamp;

    use super::*;

    fn recorded(seq: u64, fact: Fact) -> Recorded {
        let (boot, job) = (BootId(String::new()), Some(JobId("job".to_owned())));
        Recorded::from_entry(&Entry {
            seq,
            at: Stamp::default(),
            boot,
            job,
            origin_seq: None,
            body: Body::Fact(fact),
        })
    }

    #[test]
    fn a_host_gets_entries_of_the_job_and_of_its_own_ranks_in_order() {
        let of_rank = |seq, rank| {
            let (attempt, rank) = (Attempt(0), Rank(rank));
            recorded(seq, Fact::RankConnected { attempt, rank, client: String::new() })
        };
        let of_the_job = |seq| {
            recorded(
                seq,
                Fact::RanksStepping {
                    attempt: Attempt(0),
                    step: seq,
                    counted: false,
                    restoring: Span::default(),
                },
            )
        };
        let entries =
            [of_rank(1, 9), of_the_job(2), of_rank(3, 20), of_rank(4, 8), of_rank(5, 9), of_the_job(6)];
        let news = JournalUpdate::from_entries(entries.iter());
        let numbers = |of: Vec<&Recorded>| of.into_iter().map(|entry| entry.seq).collect::<Vec<u64>>();
        assert_eq!(numbers(news.for_host(0, &(8..16))), [1, 2, 4, 5, 6]);
        assert_eq!(numbers(news.for_host(4, &(8..16))), [5, 6]);
        assert_eq!(numbers(news.for_host(0, &(24..32))), [2, 6]);
        let (all, more_after) = news.all_after(3, 10);
        assert_eq!((numbers(all), more_after), (vec![4, 5, 6], None));
        let (some, more_after) = news.all_after(1, 2);
        assert_eq!((numbers(some), more_after), (vec![2, 3], Some(3)));
        assert_eq!((news.count_after(0), news.count_after(4)), (6, 2));
    }
}

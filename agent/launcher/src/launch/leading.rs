//! This launcher leads: it decides for the ranks of all hosts. `group::lead` decides; this module connects it with the
//! streams to other launchers, the store, the journal and the ranks of this host. A job of one host has neither streams
//! nor a store.

mod launcher;

use std::collections::BTreeMap;
use std::time::Duration;

use mainstay_group::lead::{self, Expected, Lead};
use mainstay_group::link::Connection;
use mainstay_group::merge::Merge;
use mainstay_group::round::{Member, Seated};
use mainstay_group::wire::{Down, Join};
use mainstay_model::entry::Entry;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::job::Job;
use tokio::sync::mpsc;

use crate::act::rank_spec::RankSpec;
use crate::hosts::listen::{FromHost, Listener};
use crate::launch::POLL_INTERVAL;
use crate::launch::hosts::{HostsPlan, span};
use crate::launch::rendezvous::{FIRST_RECORD, Gathered};
use crate::launch::store_session::{FromStore, RecordWriter, StoreSession};
use mainstay_journal::state::StateReader;
use mainstay_sys::clock;

/// How long the end of the job waits for followers to know of it.
const END_WITHIN: Duration = Duration::from_secs(5);

/// What a leader has.
#[derive(Debug)]
pub(super) struct Leading {
    pub(super) lead: Lead,
    /// The other hosts; none for a job of one host.
    pub(super) remote: Option<Remote>,
}

/// What connects a leader with the other launchers of its job.
#[derive(Debug)]
pub(super) struct Remote {
    listener: Listener,
    /// The channels to followers and spares.
    ways: BTreeMap<Connection, mpsc::Sender<Down>>,
    pub(super) plan: HostsPlan,
    pub(super) store_session: StoreSession,
    /// Where it writes; none until the store records that this launcher leads.
    pub(super) record_writer: Option<RecordWriter>,
}

/// Events from outside for a leader.
#[derive(Debug)]
pub(super) enum ToLeader {
    Host(Box<FromHost>),
    Store(FromStore),
}

/// At most `most` entries that are older than what the leader keeps in memory; none if the journal cannot be read now.
fn entries_after(reader: &StateReader, have: u64, most: usize) -> Option<Vec<Entry>> {
    reader.entries_after(have, most).ok().map(|read| read.entries)
}

impl Leading {
    /// The leader of a job of one host.
    pub(super) fn alone(job: Job, rank_spec: &RankSpec) -> Leading {
        let member = Member {
            ranks: rank_spec.local_world_size,
            address: rank_spec.master_addr.clone(),
            leads: true,
            ..Member::default()
        };
        let merge = Merge::new(vec![Seated { member, seat: rank_spec.seat.clone() }], Span(u64::MAX));
        let lead = Lead::new(clock::mono(), job, merge, lead::LeaderSettings::default());
        Leading { lead, remote: None }
    }

    /// The leader of a complete round.
    pub(super) fn new(job: Job, gathered: Gathered, names: (String, String)) -> Leading {
        let Gathered { round, me, listener, connections, plan, join, spares, store_session, record_writer } =
            gathered;
        let merge = Merge::new(round, plan.join_timeout);
        let mut ways = BTreeMap::new();
        let mut followers = Vec::new();
        for (launcher, connection, to) in connections {
            ways.insert(connection, to);
            followers.push((launcher, connection));
        }
        let mut waiting = Vec::new();
        for (member, connection, to) in spares {
            ways.insert(connection, to);
            waiting.push((member, connection));
        }
        let remote = Remote { listener, ways, plan, store_session, record_writer: Some(record_writer) };
        let mut leading = Leading::of(job, merge, me, join, names, remote);
        leading.lead.gathered(&followers, waiting);
        leading
    }

    /// A leader without followers that it knows.
    pub(super) fn of(
        job: Job,
        merge: Merge,
        seat: u32,
        leader: Join,
        names: (String, String),
        remote: Remote,
    ) -> Leading {
        let plan = &remote.plan;
        let by = lead::LeaderSettings {
            seat,
            launcher: remote.store_session.launcher().to_owned(),
            names,
            expected: Expected { leader, mixed: plan.mixed },
            lease: plan.lease(),
            looks_every: span(POLL_INTERVAL),
            epoch: remote.record_writer.as_ref().map_or(0, |writer| writer.epoch),
            newest_record: FIRST_RECORD,
            has_store: true,
        };
        let lead = Lead::new(clock::mono(), job, merge.within(plan.limits(), &by.launcher), by);
        Leading { lead, remote: Some(remote) }
    }

    /// The next message of a follower or of the store.
    pub(super) async fn next(&mut self) -> ToLeader {
        match &mut self.remote {
            Some(remote) => remote.next().await,
            None => std::future::pending().await,
        }
    }

    /// A full channel is dropped; the follower connects again.
    fn send(&mut self, now: Mono, connection: Connection, down: Down) {
        let Some(Remote { ways, .. }) = &mut self.remote else { return };
        if ways.get(&connection).is_some_and(|to| to.try_send(down).is_err()) {
            ways.remove(&connection);
            self.lead.gone(now, connection, "it does not read its messages".to_owned());
        }
    }
}

impl Remote {
    pub(super) fn new(
        listener: Listener,
        plan: HostsPlan,
        store_session: StoreSession,
        record_writer: RecordWriter,
    ) -> Remote {
        Remote { listener, ways: BTreeMap::new(), plan, store_session, record_writer: Some(record_writer) }
    }

    async fn next(&mut self) -> ToLeader {
        tokio::select! {
            Some(event) = self.listener.events.recv() => ToLeader::Host(Box::new(event)),
            update = self.store_session.next() => ToLeader::Store(update),
        }
    }
}

//! Another launcher leads: this one reports to it what it sees, and carries out its orders. The leader's journal is written
//! here too, so that each host shows the whole job. `core::recovery::hosts::follow` decides what is sent when.

mod launcher;

use std::time::Duration;

use mainstay_coord::Leader;
use mainstay_group::clock::Mapping;
use mainstay_group::follow::{Follow, Leads};
use mainstay_group::round::Member;
use mainstay_group::wire::{Join, Seat, Up};
use mainstay_model::entry::JobSpec;
use mainstay_model::id::Rank;
use mainstay_recovery::job::Summary;
use tokio::sync::{mpsc, watch};

use crate::hosts::connect::{self, FromLeader};
use crate::hosts::listen::Listener;
use crate::hosts::streams;
use crate::launch::hosts::{Aborting, HostsPlan};
use crate::launch::spare_reports::SpareReports;
use crate::launch::store_session::{FromStore, StoreSession};
use mainstay_sys::clock;

/// How long to wait at the end for the leader.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(1);

/// What a follower starts with.
#[derive(Debug)]
pub struct Followed {
    /// Whether it waits as a spare.
    pub waits: bool,
    /// The newest entry of the leader's journal when it got its seat.
    pub newest: u64,
    /// Its seat; for a spare, one like the seat that it may get.
    pub seat: Seat,
    /// The job's name for ranks of all hosts.
    pub job: String,
    /// The job's launch for ranks of all hosts.
    pub launch: String,
    /// The leader's epoch.
    pub epoch: u64,
    /// Who leads.
    pub leader: Leader,
    /// Messages from the leader.
    pub events: mpsc::Receiver<FromLeader>,
    /// The channel to it, while there is one.
    pub to: Option<mpsc::Sender<Up>>,
    /// Its clock.
    pub clock: Mapping,
    /// The first message on a new connection.
    pub join: watch::Sender<Join>,
    /// What was asked for on the command line.
    pub plan: HostsPlan,
    /// The task that keeps the connection.
    pub task: Aborting,
    /// The group of the job.
    pub store_session: StoreSession,
    /// Where followers connect if this launcher leads.
    pub listener: Listener,
}

/// What a follower has.
#[derive(Debug)]
pub(super) struct Following {
    pub(super) follow: Follow,
    events: mpsc::Receiver<FromLeader>,
    to: Option<mpsc::Sender<Up>>,
    join: watch::Sender<Join>,
    pub(super) plan: HostsPlan,
    task: Aborting,
    pub(super) store_session: StoreSession,
    pub(super) listener: Listener,
    /// The job as this host's journal records it.
    pub(super) spec: JobSpec,
    pub(super) summary: Option<Summary>,
    /// Why this host no longer takes part.
    pub(super) cut_off: Option<String>,
    /// What a launcher that started as a spare has ready.
    pub(super) ready: Option<SpareReports>,
}

/// Events from outside for a follower.
#[derive(Debug)]
pub(super) enum ToFollower {
    Leader(Box<FromLeader>),
    Store(FromStore),
}

impl Following {
    pub(super) fn new(followed: Followed, spec: JobSpec) -> Following {
        let Followed {
            waits,
            newest,
            seat,
            epoch,
            leader,
            events,
            to,
            clock,
            join,
            plan,
            task,
            store_session,
            listener,
            ..
        } = followed;
        let leads = Leads { epoch, ..leads(&leader) };
        let me = store_session.launcher().to_owned();
        let follow = Follow::new(clock::mono(), me, leads, seat, plan.lease(), clock, to.is_some())
            .joining_after(newest);
        let (follow, ready) =
            if waits { (follow.waiting(), Some(SpareReports::default())) } else { (follow, None) };
        let following = Following {
            follow,
            events,
            to,
            join,
            plan,
            task,
            store_session,
            listener,
            spec,
            summary: None,
            cut_off: None,
            ready,
        };
        following.remember();
        following
    }

    /// The host has other ranks from now on.
    pub(super) fn sit(&mut self, seat: &Seat) {
        self.follow.sit(seat);
        (self.spec.world_size, self.spec.first_rank) = (seat.world_size, Rank(seat.first_rank));
    }

    /// This launcher as rounds see it.
    pub(super) fn member(&self) -> Member {
        Member::of(&self.join.borrow())
    }

    /// The description of this launcher for others.
    pub(super) fn join(&self) -> Join {
        self.join.borrow().clone()
    }

    /// The next message of the leader or of the store.
    pub(super) async fn next(&mut self) -> ToFollower {
        loop {
            tokio::select! {
                Some(event) = self.events.recv() => return ToFollower::Leader(Box::new(event)),
                update = self.store_session.next() => return ToFollower::Store(update),
                // A launcher that takes this one for the leader gets no answer.
                Some(_) = self.listener.events.recv() => {}
            }
        }
    }

    /// Waits until the leader, which ordered the end, closes the connection. Before that it may not have received the confirmation.
    pub(super) async fn wait_for_the_end(&mut self) {
        if self.summary.is_none() {
            return;
        }
        let ended = async {
            while !matches!(self.next().await, ToFollower::Leader(event) if matches!(*event, FromLeader::Lost { .. }))
            {
            }
        };
        let _ = tokio::time::timeout(ACKNOWLEDGED_WITHIN, ended).await;
    }

    /// Connects to the leader that the store names.
    fn connect(&mut self) {
        self.to = None;
        let Some(leader) = self.store_session.leader().cloned() else { return };
        let (sender, events) = mpsc::channel(1024);
        self.events = events;
        let token = self.store_session.token.clone();
        self.task =
            Aborting(streams().spawn(connect::keep(leader.addresses, token, self.join.subscribe(), sender)));
    }

    /// A full channel is dropped; another connection is made.
    fn send(&mut self, up: Up) {
        if self.to.as_ref().is_some_and(|to| to.try_send(up).is_err()) {
            self.to = None;
            self.follow.gave_up(clock::mono());
        }
    }

    /// The first messages on a new connection.
    fn remember(&self) {
        let (have, of) = self.follow.have();
        self.join.send_if_modified(|join| {
            let changed = join.have != have || join.have_of != of;
            (join.have, join.have_of) = (have, of.to_owned());
            changed
        });
    }
}

fn leads(leader: &Leader) -> Leads {
    let Leader { launch, host, epoch, .. } = leader.clone();
    Leads { launcher: launch, host, epoch }
}

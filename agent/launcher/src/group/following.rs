//! Another launcher leads: this one reports to it what it sees, and carries out its orders. The leader's journal is written
//! here too, so that each host shows the whole job. `group::follow` decides what is sent when.

use mainstay_coord::Leader;
use mainstay_group::clock::Mapping;
use mainstay_group::follow::{self, CutOff, Follow, Leads, concerns_all};
use mainstay_group::spare_ready::SpareReady;
use mainstay_group::wire::{Join, Up};
use mainstay_hang::RankSeen;
use mainstay_model::entry::{Body, Fact, JobSpec};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::observation::LEADS_HERE;
use mainstay_model::time::Mono;
use mainstay_recovery::job::Summary;
use mainstay_recovery::protocol::{Event, Seat};
use mainstay_sys::clock;
use tokio::sync::{mpsc, watch};

use crate::group::plan::Aborting;
use crate::group::spare::SpareReports;
use crate::group::store::{Elected, FromStore, StoreSession, exit_of};
use crate::group::streams::connect::{self, FromLeader};
use crate::group::streams::streams;
use crate::group::{Act, Group, Remote, Role};

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
    pub(super) leads: Leads,
    pub(super) events: mpsc::Receiver<FromLeader>,
    pub(super) to: Option<mpsc::Sender<Up>>,
    pub(super) clock: Mapping,
    /// The first message on a new connection.
    pub(super) join: watch::Sender<Join>,
    pub(super) task: Aborting,
}

#[derive(Debug)]
pub(crate) struct Following {
    pub(crate) follow: Follow,
    pub(crate) events: mpsc::Receiver<FromLeader>,
    to: Option<mpsc::Sender<Up>>,
    pub(super) join: watch::Sender<Join>,
    task: Aborting,
    /// The job as this host's journal records it.
    pub(crate) spec: JobSpec,
    pub(crate) summary: Option<Summary>,
    /// Why this host no longer takes part.
    pub(crate) cut_off: Option<String>,
    /// Whether a new launcher on this host may take part: the job goes on without this one.
    pub(crate) may_return: bool,
    /// What a launcher that started as a spare has ready.
    pub(crate) ready: Option<SpareReports>,
}

impl Following {
    pub(super) fn new(followed: Followed, remote: &Remote, spec: JobSpec) -> Following {
        let Followed { waits, newest, seat, leads, events, to, clock, join, task, .. } = followed;
        let (me, lease) = (remote.store_session.launcher.clone(), remote.plan.lease());
        let follow = Follow::new(clock::mono(), me, leads, seat, lease, clock, to.is_some());
        let follow = follow.joining_after(newest);
        let (follow, ready) =
            if waits { (follow.waiting(), Some(SpareReports::default())) } else { (follow, None) };
        let (summary, cut_off, may_return) = (None, None, false);
        let following =
            Following { follow, events, to, join, task, spec, summary, cut_off, may_return, ready };
        following.remember();
        following
    }

    /// The host has other ranks from now on.
    pub(crate) fn sit(&mut self, seat: &Seat) {
        self.follow.sit(seat);
        (self.spec.world_size, self.spec.first_rank) = (seat.world_size, Rank(seat.first_rank));
    }

    /// The line for the terminal when this host, with so many ranks, has a seat from now on, or again.
    pub(crate) fn seated(&mut self, ranks: u32) -> String {
        if let Some(ready) = &mut self.ready {
            ready.forget();
        }
        let seat = self.follow.seat();
        let last = seat.first_rank + ranks.saturating_sub(1);
        format!(
            "this host joined the job: it is node rank {} of {}, with ranks {} to {last} of {}",
            seat.group_rank, seat.group_world_size, seat.first_rank, seat.world_size
        )
    }

    /// Takes in what a spare has ready. Returns whether to show it to people; none if it is not to be written down.
    pub(crate) fn take_ready(&mut self, now: &SpareReady) -> Option<bool> {
        self.ready.get_or_insert_default().take(now)
    }

    /// Whether an event concerns the leader. Facts about a host without ranks do not.
    pub(crate) fn reports(&self, event: &Event) -> bool {
        match event {
            Event::Fact(fact) => {
                let follows = !self.follow.is_cut_off() && !self.follow.waits_for_a_seat();
                follows && concerns_all(fact)
            }
            _ => true,
        }
    }

    /// Connects to the leader that the store names.
    fn connect(&mut self, store_session: &StoreSession) {
        self.to = None;
        let Some(leader) = store_session.leader.clone() else { return };
        let (sender, events) = mpsc::channel(1024);
        self.events = events;
        let token = store_session.token.clone();
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
    pub(crate) fn remember(&self) {
        let (have, of) = self.follow.have();
        self.join.send_if_modified(|join| {
            let changed = join.have != have || join.have_of != of;
            (join.have, join.have_of) = (have, of.to_owned());
            changed
        });
    }
}

impl Group {
    /// Carries out an action of the follower, or leaves it to this launcher.
    pub(crate) fn act_as_follower(&mut self, act: follow::Act) {
        let (Role::Follows(following), Some(remote)) = (&mut self.role, &mut self.remote) else { return };
        let store_session = &mut remote.store_session;
        match act {
            follow::Act::Send(up) => following.send(up),
            follow::Act::Close => following.to = None,
            follow::Act::Obey(command) => self.acts.push_back(Act::Obey(command)),
            follow::Act::Entry { seq, at, body, is_past } => {
                let body = match body {
                    // The fact names where this host runs and writes.
                    Body::Fact(Fact::JobStarted(_)) => Body::Fact(Fact::JobStarted(following.spec.clone())),
                    Body::Fact(Fact::Observed(mut seen)) => {
                        if let Some(leads) = seen.values.get_mut(LEADS_HERE) {
                            *leads = false.to_string();
                        }
                        Body::Fact(Fact::Observed(seen))
                    }
                    body => body,
                };
                self.acts.push_back(Act::Entry { seq, at, body, is_past });
            }
            follow::Act::Print(line) => self.print(line),
            follow::Act::Campaign => store_session.campaign(),
            follow::Act::StandDown => store_session.stand_down(),
            follow::Act::RemoveLeader => {
                let leader = following.follow.leader();
                tracing::info!(leader = %leader.host, "the launcher that leads is dead");
                store_session.remove_leader(&leader.launcher);
            }
            follow::Act::LookAtLeader => self.look_at_leader(),
            follow::Act::MissLeader(misses) => store_session.miss_leader(misses),
            follow::Act::Connect => following.connect(store_session),
            follow::Act::TookSeat => {
                store_session.set_seated(true);
                self.acts.push_back(Act::TookSeat);
            }
            follow::Act::Meet { hosts, spares } => self.acts.push_back(Act::Meet { hosts, spares }),
            follow::Act::LeftSeat => {
                store_session.set_seated(false);
                self.acts.push_back(Act::LeftSeat);
            }
            follow::Act::CutOff(why) => self.cut_off(why),
        }
    }

    /// Whether sights of ranks can be sent to the leader, which judges hangs.
    pub(crate) fn reports_ranks(&self) -> bool {
        self.follower().is_some_and(|following| following.follow.reports_ranks())
    }

    /// Reports to the leader what the ranks here are doing.
    pub(crate) fn ranks_seen(&mut self, attempt: Attempt, ranks: Vec<RankSeen>) {
        if let Role::Follows(following) = &mut self.role {
            following.follow.ranks_seen(attempt, ranks);
        }
    }

    /// Processes a message of the leader, or the loss of the connection.
    pub(crate) fn leader_sent(&mut self, now: Mono, event: FromLeader) {
        let Role::Follows(following) = &mut self.role else { return };
        match event {
            FromLeader::Connected { to } => {
                following.to = Some(to);
                following.follow.connected();
            }
            FromLeader::Lost { why, refused } => {
                following.to = None;
                following.follow.disconnected(now, &why, refused);
            }
            FromLeader::Received { at, down } => following.follow.receive(at, down),
        }
    }

    /// Processes news from the store for a follower. Returns its election, if it can take over.
    pub(crate) fn store_sent_to_follower(
        &mut self,
        now: Mono,
        newest: u64,
        update: FromStore,
    ) -> Option<Elected> {
        let Role::Follows(following) = &mut self.role else { return None };
        let Following { follow, .. } = &mut **following;
        match update {
            FromStore::Leader(Some(leader)) => follow.led_by(now, leads(&leader), newest),
            // Dropping it returns the leadership to the store.
            FromStore::Elected(elected) => {
                return follow.takes_over(now, elected.record.as_ref()).then_some(*elected);
            }
            FromStore::LeaderMissed => follow.leader_is_missed(),
            // With a connection, the leader itself reports the end.
            FromStore::Ended(ended)
                if (follow.waits_for_a_seat() || !follow.is_connected()) && !follow.is_cut_off() =>
            {
                following.cut_off = Some(ended.why.clone());
                self.print(format!("the job has ended: {}", ended.why));
                self.acts.push_back(Act::End(exit_of(&ended)));
            }
            FromStore::Notice(why) | FromStore::Problem(why) => self.print(why),
            FromStore::Leader(None) | FromStore::Deposed(_) | FromStore::Written(_) | FromStore::Ended(_) => {
            }
        }
        None
    }

    /// Checks whether the leader is alive, if this launcher has a say on it.
    fn look_at_leader(&self) {
        let (Some(following), Some(remote)) = (self.follower(), &self.remote) else { return };
        let (store_session, follows) = (&remote.store_session, &following.follow.leader().launcher);
        let leader = store_session.leader.as_ref();
        let leader = leader.filter(|leader| store_session.has_vote() && leader.launch == *follows);
        if let Some(leader) = leader
            && let Some(address) = leader.addresses.first()
        {
            self.probe(leader.launch.clone(), address.clone());
        }
    }

    fn cut_off(&mut self, why: CutOff) {
        let (Role::Follows(following), Some(remote)) = (&mut self.role, &self.remote) else { return };
        let (endpoint, lease) = (remote.plan.endpoint(), remote.plan.lease());
        following.may_return = matches!(why, CutOff::Replaced | CutOff::Refused { may_return: true, .. });
        let (reason, is_without_leader) = match why {
            CutOff::NoLeader => (format!("no leader at {endpoint} for {lease}"), true),
            CutOff::Replaced => ("this host's place in the job was given to another one".to_owned(), false),
            CutOff::Refused { why, .. } => (format!("the leader refuses this host: {why}"), false),
            CutOff::NoRecord => {
                ("the leader is lost, and no host that has a record of the job leads it".to_owned(), true)
            }
        };
        following.cut_off = Some(reason.clone());
        self.print(format!("the ranks of this host are stopped: {reason}"));
        if is_without_leader {
            self.acts.push_back(Act::Orphaned(reason));
        }
        self.acts.push_back(Act::StopRanks);
    }
}

pub(super) fn leads(leader: &Leader) -> Leads {
    let Leader { launch, host, epoch, .. } = leader.clone();
    Leads { launcher: launch, host, epoch }
}

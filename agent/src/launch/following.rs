//! Another launcher leads: what is seen here goes to it, and what it orders is done here. Its journal is written here as
//! well, so that each host shows the whole job. What is sent when is in `core::recovery::hosts::follow`.

use std::time::Duration;

use mainstay_coord::Leader;
use mainstay_core::base::id::Rank;
use mainstay_core::base::time::Mono;
use mainstay_core::model::entry::{Body, Entry, Fact, JobSpec};
use mainstay_core::recovery::hosts::clock::Mapping;
use mainstay_core::recovery::hosts::follow::{Act, CutOff, Follow, Leads, concerns_all};
use mainstay_core::recovery::hosts::round::Member;
use mainstay_core::recovery::hosts::wire::{Command, Join, Report, Seat, Up};
use mainstay_core::recovery::job::{Input, StopWhy, Summary};
use tokio::sync::{mpsc, watch};

use crate::hosts::connect::{self, FromLeader};
use crate::hosts::listen::Listener;
use crate::hosts::streams;
use crate::launch::brain::{Brain, Task};
use crate::launch::hosts::{Aborting, HostsPlan, span};
use crate::launch::meeting::{FromStore, Meeting, exit_of};
use crate::launch::ready::Ready;
use crate::launch::shell::Launcher;
use crate::os::clock;

/// How long is waited at the end for the leader.
const HEARD_WITHIN: Duration = Duration::from_secs(1);

/// What a follower starts with.
#[derive(Debug)]
pub struct Followed {
    /// Whether it waits as a spare.
    pub waits: bool,
    /// Its seat; of one that waits, one like that which it may get.
    pub seat: Seat,
    /// The job's name for ranks of all hosts.
    pub job: String,
    /// The job's launch for ranks of all hosts.
    pub launch: String,
    /// The leader's epoch.
    pub epoch: u64,
    /// Who leads.
    pub leader: Leader,
    /// What arrives from the leader.
    pub events: mpsc::Receiver<FromLeader>,
    /// The way to it, while there is one.
    pub to: Option<mpsc::Sender<Up>>,
    /// Its clock.
    pub clock: Mapping,
    /// What is sent first on a new connection.
    pub join: watch::Sender<Join>,
    /// What was asked for.
    pub plan: HostsPlan,
    /// The task that keeps the connection.
    pub task: Aborting,
    /// The group of the job.
    pub meeting: Meeting,
    /// Where followers would come, should this launcher lead.
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
    pub(super) meeting: Meeting,
    pub(super) listener: Listener,
    /// What this host's journal says of the job.
    pub(super) spec: JobSpec,
    pub(super) summary: Option<Summary>,
    /// Why this host takes no part any more.
    pub(super) cut_off: Option<String>,
    /// What it has ready, of one that began as a spare.
    pub(super) ready: Option<Ready>,
}

/// What comes from outside to a follower.
#[derive(Debug)]
pub(super) enum ToFollower {
    Leader(Box<FromLeader>),
    Store(FromStore),
}

impl Following {
    pub(super) fn new(followed: Followed, spec: JobSpec) -> Following {
        let Followed {
            waits,
            seat,
            epoch,
            leader,
            events,
            to,
            clock,
            join,
            plan,
            task,
            meeting,
            listener,
            ..
        } = followed;
        let leads = Leads { epoch, ..leads(&leader) };
        let me = meeting.launcher().to_owned();
        let follow = Follow::new(clock::mono(), me, leads, seat, plan.lease(), clock, to.is_some());
        let (follow, ready) = if waits { (follow.waiting(), Some(Ready::default())) } else { (follow, None) };
        let following = Following {
            follow,
            events,
            to,
            join,
            plan,
            task,
            meeting,
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

    /// The next message of the leader or of the store.
    pub(super) async fn next(&mut self) -> ToFollower {
        loop {
            tokio::select! {
                Some(event) = self.events.recv() => return ToFollower::Leader(Box::new(event)),
                news = self.meeting.next() => return ToFollower::Store(news),
                // Whoever takes this launcher for the leader is not answered.
                Some(_) = self.listener.events.recv() => {}
            }
        }
    }

    /// Until the leader, which ordered the end, has ended the connection: until then it may not have heard that it is known.
    pub(super) async fn wait_for_the_end(&mut self) {
        if self.summary.is_none() {
            return;
        }
        let ended = async {
            while !matches!(self.next().await, ToFollower::Leader(event) if matches!(*event, FromLeader::Lost { .. }))
            {
            }
        };
        let _ = tokio::time::timeout(HEARD_WITHIN, ended).await;
    }

    /// Connects to the leader that the store names.
    fn connect(&mut self) {
        self.to = None;
        let Some(leader) = self.meeting.leader().cloned() else { return };
        let (sender, events) = mpsc::channel(1024);
        self.events = events;
        let token = self.meeting.token.clone();
        self.task =
            Aborting(streams().spawn(connect::keep(leader.addresses, token, self.join.subscribe(), sender)));
    }

    /// A way that takes no more is given up; another connection is made.
    fn send(&mut self, up: Up) {
        if self.to.as_ref().is_some_and(|to| to.try_send(up).is_err()) {
            self.to = None;
            self.follow.gave_up(clock::mono());
        }
    }

    /// What a new connection begins with.
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

impl Launcher {
    /// Does what the follower wants to have done, until there is nothing left.
    pub(super) fn follow(&mut self) {
        loop {
            let Brain::Following(following) = &mut self.brain else { return };
            following.remember();
            let Some(act) = following.follow.next_act() else { return };
            match act {
                Act::Send(up) => following.send(up),
                Act::Close => following.to = None,
                Act::Obey(command) => self.tasks.push_back(Task::Command(command)),
                Act::Entry { seq, at, body } => {
                    let body = match body {
                        // Where it runs and writes is told of this host.
                        Body::Fact(Fact::JobStarted(_)) => {
                            Body::Fact(Fact::JobStarted(following.spec.clone()))
                        }
                        body => body,
                    };
                    let entry = self.record(at, Some(seq), body);
                    self.send_entry(entry);
                }
                Act::Say(line) => self.terminal.say(line),
                Act::Campaign => following.meeting.campaign(),
                Act::StandDown => following.meeting.stand_down(),
                Act::RemoveLeader => {
                    let leader = following.follow.leader();
                    tracing::info!(leader = %leader.host, "the launcher that leads is dead");
                    following.meeting.remove_leader(&leader.launcher);
                }
                Act::LookAtLeader => self.look_at_leader(),
                Act::MissLeader(misses) => following.meeting.miss_leader(misses),
                Act::Connect => following.connect(),
                Act::TookSeat => {
                    following.meeting.take_seat();
                    self.has_a_seat();
                }
                Act::Meet { hosts, spares } => self.meet(&hosts, spares),
                Act::LeftSeat => {
                    following.meeting.leave_seat();
                    if self.ranks.iter().any(|rank| rank.exit.is_none()) {
                        // They wait in their processes, for nothing.
                        let (attempt, why) = (self.attempt, StopWhy::Dismissed);
                        self.tasks.push_back(Task::Command(Command::Stop { attempt, why, save_after: None }));
                    }
                }
                Act::CutOff(why) => self.cut_off(why),
            }
        }
    }

    /// Something happened on this host.
    pub(super) fn report_input(&mut self, at: Mono, input: Input) {
        let Brain::Following(following) = &mut self.brain else { return };
        if let Input::Fact(fact) = &input {
            if following.follow.is_cut_off() && matches!(fact, Fact::AttemptEnded { .. }) {
                self.exit = Some(self.settings.policy.hand_back_exit);
                return;
            }
            if !concerns_all(fact) || following.follow.waits_for_a_seat() {
                return self.publish_body(at, Body::Fact(fact.clone()));
            }
        }
        if let Some(report) = Report::of(input) {
            self.report_up(at, report);
        }
    }

    /// Sends a report, now or when there is a connection again.
    pub(super) fn report_up(&mut self, at: Mono, report: Report) {
        let Brain::Following(following) = &mut self.brain else { return };
        following.follow.report(at, report);
        self.follow();
    }

    /// Tells the leader, which judges whether ranks hang, what the ranks here are at.
    pub(super) fn report_sights(&mut self) {
        let Brain::Following(following) = &mut self.brain else { return };
        if following.follow.tells_sights() {
            following.follow.seen(self.attempt, self.hangs.due_to_report(clock::mono()));
            self.follow();
        }
    }

    /// A message of the leader, or the news that there is no connection.
    pub(super) fn hear_leader(&mut self, event: FromLeader) {
        let Brain::Following(following) = &mut self.brain else { return };
        match event {
            FromLeader::Connected { to } => {
                following.to = Some(to);
                following.follow.connected();
            }
            FromLeader::Lost { why, refused } => {
                following.to = None;
                following.follow.disconnected(clock::mono(), &why, refused);
            }
            FromLeader::Said { at, down } => following.follow.said(at, down),
        }
        self.follow();
    }

    /// News from the store for a follower.
    pub(super) fn hear_store_as_follower(&mut self, news: FromStore) {
        let newest = self.board.newest();
        let Brain::Following(following) = &mut self.brain else { return };
        match news {
            FromStore::Leader(Some(leader)) => following.follow.led_by(clock::mono(), leads(&leader), newest),
            FromStore::Elected(elected) => self.take_over(*elected),
            FromStore::LeaderMissed => following.follow.leader_is_missed(),
            // The leader itself says so, where there is a connection to it.
            FromStore::Ended(ended)
                if (following.follow.waits_for_a_seat() || !following.follow.is_connected())
                    && !following.follow.is_cut_off() =>
            {
                self.terminal.say(format!("the job has ended: {}", ended.why));
                if following.follow.waits_for_a_seat() {
                    following.cut_off = Some(ended.why.clone());
                }
                self.exit = Some(exit_of(&ended));
            }
            FromStore::Trouble(why) => self.terminal.say(why),
            FromStore::Leader(None) | FromStore::Deposed(_) | FromStore::Written(_) | FromStore::Ended(_) => {
            }
        }
        self.follow();
    }

    /// A follower that is cut off from the leader ends by itself.
    pub(super) fn look_for_leader(&mut self) {
        let Brain::Following(following) = &mut self.brain else { return };
        let meeting = &mut following.meeting;
        let silent = meeting.silent_for().map(span);
        let led = meeting.leader().is_some_and(|leader| !meeting.is_me(leader));
        following.follow.look(clock::mono(), silent, led);
        self.follow();
    }

    /// Looks whether the leader lives, if this launcher has a say on it.
    fn look_at_leader(&mut self) {
        let Brain::Following(following) = &self.brain else { return };
        let (meeting, follows) = (&following.meeting, &following.follow.leader().launcher);
        let Some(leader) = meeting.leader().filter(|leader| meeting.has_say() && leader.launch == *follows)
        else {
            return;
        };
        if let Some(address) = leader.addresses.first().cloned() {
            self.look_at_launcher(leader.launch.clone(), address);
        }
    }

    fn cut_off(&mut self, why: CutOff) {
        let Brain::Following(following) = &mut self.brain else { return };
        let (endpoint, lease) = (following.plan.endpoint(), following.plan.lease());
        let (why, do_now) = match why {
            CutOff::NoLeader => {
                (format!("no leader at {endpoint} for {lease}"), ". Start the job again on all hosts")
            }
            CutOff::Replaced => ("this host's place in the job was given to another one".to_owned(), ""),
            CutOff::Refused(why) => (format!("the leader refuses this host: {why}"), ""),
            CutOff::NoRecord => (
                "the leader is lost, and no host that has a record of the job leads it".to_owned(),
                ". Start the job again on all hosts",
            ),
        };
        following.cut_off = Some(why.clone());
        self.terminal.say(format!("the ranks of this host are stopped: {why}{do_now}"));
        self.stop_and_hand_back();
    }

    /// Nothing more is decided for this host: its ranks are stopped, and the scheduler has it back.
    pub(super) fn stop_and_hand_back(&mut self) {
        if self.ranks.iter().any(|rank| rank.exit.is_none()) {
            let (attempt, why) = (self.attempt, StopWhy::Requested);
            self.tasks.push_back(Task::Command(Command::Stop { attempt, why, save_after: None }));
        } else {
            self.exit = Some(self.settings.policy.hand_back_exit);
        }
    }

    /// Gives an entry to the agent of this host, which knows the ranks of this host by their processes and no others.
    pub(super) fn send_entry(&mut self, entry: Entry) {
        // While older ones are being read for it, this one comes after those.
        if self.agent_has.is_none() {
            self.send_entry_now(entry);
        }
    }

    pub(super) fn send_entry_now(&mut self, mut entry: Entry) {
        if let Body::Fact(Fact::AttemptStarted { ranks, .. }) = &mut entry.body {
            let seat = &self.crew.seat;
            let here = seat.first_rank..seat.first_rank + self.crew.local_world_size;
            ranks.retain(|started| here.contains(&started.rank.0));
        }
        self.send(crate::launcher_link::agent::LinkOrder::Entry(Box::new(entry)));
    }
}

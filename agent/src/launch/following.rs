//! Another launcher leads: what is seen here goes to it, and what it orders is done here. Its journal is written here as
//! well, so that each host shows the whole job.

use std::collections::VecDeque;
use std::time::Duration;

use mainstay_coord::Leader;
use mainstay_core::base::time::{Mono, Stamp};
use mainstay_core::model::entry::{Body, Entry, Fact, JobSpec};
use mainstay_core::recovery::hosts::clock::{Mapping, times};
use mainstay_core::recovery::hosts::round::Member;
use mainstay_core::recovery::hosts::sequence::{Inbox, Outbox, Received};
use mainstay_core::recovery::hosts::succession::{OnLeader, Standing};
use mainstay_core::recovery::hosts::wire::{Command, Down, Join, Report, Seat, Up};
use mainstay_core::recovery::job::{Input, StopWhy, Summary};
use tokio::sync::{mpsc, watch};

use crate::hosts::connect::{self, FromLeader};
use crate::hosts::listen::Listener;
use crate::launch::brain::{Brain, Task};
use crate::launch::hosts::{Aborting, HostsPlan};
use crate::launch::meeting::{FromStore, Meeting, exit_of};
use crate::launch::shell::Launcher;
use crate::os::clock;

/// Reports that the leader has not acknowledged; with more this host counts as cut off.
const REPORTS: usize = 16_384;

/// How long is waited at the end for the leader.
const HEARD_WITHIN: Duration = Duration::from_secs(1);

/// A launcher that the store answers waits for another leader for so many leases.
const LEASES: u64 = 3;

/// A leader is dead when its host has refused so many connections after one that was made; one alone may be a firewall that is
/// loaded again.
const REFUSALS: u32 = 2;

/// What a host has seen of an attempt is kept for the next leader, so much of it at most.
const LOG: usize = 65_536;

/// What a follower starts with.
#[derive(Debug)]
pub struct Followed {
    /// Its seat.
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
    events: mpsc::Receiver<FromLeader>,
    to: Option<mpsc::Sender<Up>>,
    clock: Mapping,
    join: watch::Sender<Join>,
    pub(super) plan: HostsPlan,
    task: Aborting,
    pub(super) meeting: Meeting,
    listener: Listener,
    leader: Leader,
    /// Orders of a lower epoch are refused.
    epoch: u64,
    seat: Seat,
    outbox: Outbox<(Mono, Report)>,
    inbox: Inbox,
    /// What was seen of the current attempt, by the clock here: a new leader has it told again.
    log: VecDeque<(Mono, Report)>,
    /// A new leader has not been told yet what was seen before.
    catches_up: bool,
    /// The newest entry of the leader's journal that was written here.
    entries: u64,
    /// The newest entry here when the present leader began.
    since: u64,
    gone: Option<Mono>,
    /// How often the leader's host has answered since the last connection that no process listens there; none before the
    /// first connection.
    refusals: Option<u32>,
    /// Whether the leader was given up.
    pub(super) cut_off: bool,
    /// What this host's journal says of the job.
    pub(super) spec: JobSpec,
    pub(super) summary: Option<Summary>,
}

/// What a follower takes with it when it leads.
pub(super) struct Parts {
    pub(super) plan: HostsPlan,
    pub(super) meeting: Meeting,
    pub(super) listener: Listener,
    pub(super) leader: String,
    pub(super) since: u64,
    pub(super) log: VecDeque<(Mono, Report)>,
}

/// What comes from outside to a follower.
#[derive(Debug)]
pub(super) enum ToFollower {
    Leader(Box<FromLeader>),
    Store(FromStore),
}

impl Following {
    pub(super) fn new(followed: Followed, spec: JobSpec) -> Following {
        let Followed { seat, epoch, leader, events, to, clock, join, plan, task, meeting, listener, .. } =
            followed;
        join.send_modify(|join| join.have_of.clone_from(&leader.launch));
        let refusals = to.is_some().then_some(0);
        Following {
            events,
            gone: to.is_none().then(clock::mono),
            to,
            clock,
            join,
            plan,
            task,
            meeting,
            listener,
            leader,
            epoch,
            seat,
            outbox: Outbox::new(REPORTS),
            inbox: Inbox::default(),
            log: VecDeque::new(),
            catches_up: false,
            entries: 0,
            since: 0,
            refusals,
            cut_off: false,
            spec,
            summary: None,
        }
    }

    pub(super) fn into_parts(self) -> Parts {
        let Following { plan, meeting, listener, leader, since, log, .. } = self;
        Parts { plan, meeting, listener, leader: leader.launch, since, log }
    }

    /// This launcher as rounds see it.
    pub(super) fn member(&self) -> Member {
        Member::of(&self.join.borrow())
    }

    pub(super) fn standing(&self) -> Standing<'_> {
        Standing::Follows { leader: &self.leader.launch, epoch: self.epoch }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.gone.is_none()
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

    /// Keeps what was seen for a leader to come. What is of earlier attempts is decided.
    fn keep(&mut self, at: Mono, report: &Report) {
        if let Report::Fact { fact: Fact::AttemptStarted { .. } | Fact::StartFailed { .. } } = report {
            self.log
                .retain(|(_, report)| matches!(report, Report::Fact { fact: Fact::StopRequested { .. } }));
        }
        // Steps are many, and the next ones tell of those before. That an attempt has ended is asked for again by whoever has
        // it stopped: an old answer would be taken for the new one.
        let again = match report {
            Report::Steps { .. }
            | Report::Opened { .. }
            | Report::Holding { .. }
            | Report::Brought { .. } => false,
            Report::Fact { fact } => !matches!(fact, Fact::AttemptEnded { .. }),
            Report::Role { .. } => true,
        };
        if again && self.log.len() < LOG {
            self.log.push_back((at, report.clone()));
        }
    }

    /// Follows another leader.
    fn follow(&mut self, leader: Leader, since: u64) {
        let (sender, events) = mpsc::channel(1024);
        self.events = events;
        let (addresses, token) = (leader.addresses.clone(), self.meeting.token.clone());
        self.task = Aborting(tokio::spawn(connect::keep(addresses, token, self.join.subscribe(), sender)));
        (self.to, self.gone, self.since) = (None, Some(clock::mono()), since);
        (self.outbox, self.inbox) = (Outbox::new(REPORTS), Inbox::default());
        (self.clock, self.catches_up) = (Mapping::default(), true);
        (self.epoch, self.refusals) = (leader.epoch, None);
        self.leader = leader;
    }

    /// A leader that was connected, and at whose port no process listens any more, is dead: it holds the port for as long as it
    /// lives. Its lease would go on for some seconds.
    fn refused(&mut self) {
        let Some(refusals) = &mut self.refusals else { return };
        *refusals += 1;
        if *refusals == REFUSALS {
            tracing::info!(leader = %self.leader.host, "the launcher that leads is dead");
            self.meeting.remove_leader(&self.leader.launch);
        }
    }

    /// A way that takes no more is given up; another connection is made.
    fn send(&mut self, up: Up) {
        if self.to.as_ref().is_some_and(|to| to.try_send(up).is_err()) {
            self.to = None;
            self.gone.get_or_insert(clock::mono());
        }
    }

    /// A leader that was replaced and does not know it: its connection is ended.
    fn refuse_epoch(&mut self, epoch: u64) {
        tracing::warn!(epoch, now = self.epoch, "orders of a leader that was replaced are refused");
        self.to = None;
        self.gone.get_or_insert(clock::mono());
    }

    fn send_again(&mut self) {
        let again: Vec<Up> = self
            .outbox
            .unacknowledged()
            .map(|(number, (at, report))| Up::Report { number, at: *at, report: report.clone() })
            .collect();
        again.into_iter().for_each(|up| self.send(up));
    }

    fn remember(&self) {
        let have = (self.inbox.have(), self.entries);
        self.join.send_modify(|join| {
            join.have = have;
            join.have_of.clone_from(&self.leader.launch);
        });
    }

    /// Tells a new leader what was seen of the current attempt.
    fn catch_up(&mut self) {
        self.catches_up = false;
        for (at, report) in self.log.clone() {
            // No more than what a leader that lives leaves unread.
            let _ = self.outbox.push((self.clock.to_leader(at), self.clock.report(report)));
        }
        self.log.retain(|(_, report)| !is_end(report));
        self.send_again();
    }
}

/// Whether this says that an attempt has ended on this host.
fn is_end(report: &Report) -> bool {
    matches!(report, Report::Fact { fact: Fact::AttemptEnded { .. } })
}

/// Whether a fact concerns the whole job, and not only this host.
fn concerns_all(fact: &Fact) -> bool {
    match fact {
        Fact::AttemptStarted { .. }
        | Fact::StartFailed { .. }
        | Fact::RankConnected { .. }
        | Fact::RankRefused { .. }
        | Fact::PagesUnavailable { .. }
        | Fact::RankRaised { .. }
        | Fact::RankEnding { .. }
        | Fact::RankExited { .. }
        | Fact::RanksHung { .. }
        | Fact::HangPassed { .. }
        | Fact::EvidenceTaken { .. }
        | Fact::AttemptEnded { .. }
        | Fact::StopRequested { .. }
        | Fact::OutOfMemoryKills { .. } => true,
        Fact::Observed(seen) => {
            seen.component == mainstay_core::recovery::job::ORDERS
                || matches!(seen.component.as_str(), "job" | "template")
        }
        _ => false,
    }
}

impl Launcher {
    /// Something happened on this host.
    pub(super) fn report_input(&mut self, at: Mono, input: Input) {
        let Brain::Following(following) = &mut self.brain else { return };
        if let Input::Fact(fact) = &input {
            if following.cut_off && matches!(fact, Fact::AttemptEnded { .. }) {
                self.exit = Some(self.settings.policy.hand_back_exit);
                return;
            }
            if !concerns_all(fact) {
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
        following.keep(at, &report);
        if following.catches_up {
            // An answer to the new leader: it goes with the rest.
            if following.is_connected() && is_end(&report) {
                following.log.push_back((at, report));
            }
            return;
        }
        let (at, report) = (following.clock.to_leader(at), following.clock.report(report));
        match following.outbox.push((at, report.clone())) {
            Ok(number) => following.send(Up::Report { number, at, report }),
            // Far more than a leader that lives leaves unread.
            Err(error) => {
                tracing::warn!(%error, "the leader does not read the reports of this host");
                following.gone = Some(Mono(0));
            }
        }
    }

    /// Tells the leader, which judges whether ranks hang, what the ranks here are at.
    pub(super) fn report_sights(&mut self) {
        let Brain::Following(following) = &mut self.brain else { return };
        // Before the first round trip no time can be told.
        if following.gone.is_some() || following.clock.uncertainty().is_none() {
            return;
        }
        let clock = &following.clock;
        let seen = self.hangs.due_to_report(clock::mono()).into_iter();
        let ranks: Vec<_> = seen.map(|seen| seen.on_clock(&|at| clock.to_leader(at))).collect();
        if !ranks.is_empty() {
            following.send(Up::Seen { attempt: self.attempt, ranks });
        }
    }

    /// A message of the leader, or the news that there is no connection.
    pub(super) fn hear_leader(&mut self, event: FromLeader) {
        let Brain::Following(following) = &mut self.brain else { return };
        match event {
            FromLeader::Connected { to } => (following.to, following.refusals) = (Some(to), Some(0)),
            FromLeader::Lost { why, refused } => {
                following.to = None;
                if following.gone.is_none() {
                    following.gone = Some(clock::mono());
                    let host = &following.leader.host;
                    self.terminal
                        .say(format!("no connection to the leader on host {host}: {why}; the ranks go on"));
                }
                if !following.cut_off {
                    following.meeting.campaign();
                    if refused {
                        following.refused();
                    }
                }
            }
            FromLeader::Said { at, down } => self.said_by_leader(at, down),
        }
    }

    fn said_by_leader(&mut self, received: Mono, down: Down) {
        let Brain::Following(following) = &mut self.brain else { return };
        match down {
            Down::Welcome { epoch, .. } if !following.standing().obeys(epoch) => {
                following.refuse_epoch(epoch);
            }
            Down::Welcome { seat, .. } if seat != following.seat => {
                self.terminal.say("the leader has given this host's place to another one".to_owned());
                self.cut_off();
            }
            Down::Welcome { have, epoch, .. } => {
                (following.gone, following.epoch) = (None, epoch);
                following.meeting.stand_down();
                if following.catches_up {
                    following.entries = 0;
                    following.remember();
                } else {
                    following.outbox.acknowledged(have);
                    following.send_again();
                }
            }
            Down::Refused { why } => {
                self.terminal.say(format!("the leader refuses this host: {why}"));
                self.cut_off();
            }
            Down::Waiting { told } => self.terminal.say(told),
            Down::Command { epoch, .. } if !following.standing().obeys(epoch) => {
                following.refuse_epoch(epoch);
            }
            Down::Command { number, command, .. } => match following.inbox.receive(number) {
                Received::New => {
                    following.send(Up::Received { number });
                    following.remember();
                    self.tasks.push_back(Task::Command(command));
                }
                Received::Again => {
                    let number = following.inbox.have();
                    following.send(Up::Received { number });
                }
                Received::Gap => following.to = None,
            },
            Down::Entry { seq, at, body } if seq > following.entries => {
                following.entries = seq;
                following.remember();
                let clock = following.clock.clone();
                let body = match *body {
                    // Where it runs and writes is told of this host.
                    Body::Fact(Fact::JobStarted(_)) => Body::Fact(Fact::JobStarted(following.spec.clone())),
                    Body::Fact(fact) => Body::Fact(times(fact, &|at| clock.from_leader(at))),
                    body => body,
                };
                let stamp = Stamp { mono: clock.from_leader(at.mono), wall: at.wall };
                let entry = self.record(stamp, Some(seq), body);
                self.send_entry(entry);
            }
            Down::Entry { .. } => {}
            Down::Received { number } => following.outbox.acknowledged(number),
            Down::Beat { sent, at } => {
                following.clock.round_trip(sent, at, received);
                if following.catches_up && following.gone.is_none() {
                    following.catch_up();
                }
            }
        }
    }

    /// News from the store for a follower.
    pub(super) fn hear_store_as_follower(&mut self, news: FromStore) {
        let newest = self.board.reader().newest();
        let Brain::Following(following) = &mut self.brain else { return };
        match news {
            FromStore::Leader(Some(leader)) => {
                let me = following.meeting.launcher();
                match following.standing().on_leader(me, &leader.launch, leader.epoch) {
                    OnLeader::NewEpoch => following.epoch = leader.epoch,
                    OnLeader::Follow => {
                        let (host, epoch) = (&leader.host, leader.epoch);
                        self.terminal.say(format!("host {host} leads the job now (epoch {epoch})"));
                        following.follow(leader, newest);
                    }
                    OnLeader::Nothing | OnLeader::StepDown => {}
                }
            }
            FromStore::Elected(elected) => self.take_over(*elected),
            // The leader itself says so, where there is a connection to it.
            FromStore::Ended(ended) if !following.is_connected() && !following.cut_off => {
                self.terminal.say(format!("the job has ended: {}", ended.why));
                self.exit = Some(exit_of(&ended));
            }
            FromStore::Trouble(why) => self.terminal.say(why),
            FromStore::Leader(None) | FromStore::Deposed(_) | FromStore::Written(_) | FromStore::Ended(_) => {
            }
        }
    }

    /// A follower that is cut off from the leader ends by itself: others may have its ranks by now. While the store answers, the
    /// leader may be lost, and its lease not over yet: a store that elects a leader of its own makes leases longer.
    pub(super) fn look_for_leader(&mut self) {
        let Brain::Following(following) = &mut self.brain else { return };
        let (now, lease) = (clock::mono(), following.plan.lease());
        if following.cut_off || following.gone.is_none_or(|since| now.since(since) < lease) {
            return;
        }
        let waits = match following.meeting.silent_for() {
            Some(silent) => silent < following.plan.lease,
            None => {
                let led = following.meeting.leader().is_some_and(|leader| !following.meeting.is_me(leader));
                !led || following.gone.is_none_or(|since| now.since(since).0 < LEASES.saturating_mul(lease.0))
            }
        };
        if waits {
            return;
        }
        let endpoint = following.plan.endpoint();
        self.terminal.say(format!(
            "no leader at {endpoint} for {lease}: the ranks of this host are stopped. Start the job again on all hosts"
        ));
        self.cut_off();
    }

    pub(super) fn cut_off(&mut self) {
        let (attempt, hand_back) = (self.attempt, self.settings.policy.hand_back_exit);
        let Brain::Following(following) = &mut self.brain else { return };
        following.cut_off = true;
        following.meeting.stand_down();
        if self.ranks.iter().any(|rank| rank.exit.is_none()) {
            self.tasks.push_back(Task::Command(Command::Stop {
                attempt,
                why: StopWhy::Requested,
                save_after: None,
            }));
        } else {
            self.exit = Some(hand_back);
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

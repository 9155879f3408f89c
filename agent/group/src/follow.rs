//! A launcher that follows another. It reports what it sees to the leader and carries out the leader's orders, each
//! once. Pure: messages of the leader, of the store and of the clock go in, and [`Act`]s come out.

mod election;
mod missing;
mod reports;

pub use reports::concerns_all;

use std::collections::VecDeque;
use std::sync::Arc;

use mainstay_model::entry::Body;
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_recovery::protocol::{Command, Event, Seat};

use super::clock::{Mapping, times};
use super::lost::LivenessMonitor;
use super::sequence::{Inbox, Outbox, Received};
use super::succession::LeadershipRole;
use super::wire::{Down, Up};

/// The limit of reports that the leader has not acknowledged. With more this host counts as cut off.
const REPORTS: usize = 16_384;

/// An action that a follower requests, in order.
#[derive(Clone, Debug)]
pub enum Act {
    /// Send this to the leader. If the connection accepts no more, call [`Follow::gave_up`].
    Send(Up),
    /// End the connection and make another one.
    Close,
    /// Carry out a command.
    Obey(Command),
    /// Write an entry of the leader's journal, with local times.
    Entry {
        /// Its number in the leader's journal.
        seq: u64,
        /// Its time.
        at: Stamp,
        /// Its content.
        body: Body,
        /// Whether it was written before this host joined.
        is_past: bool,
    },
    /// Show the user a line.
    Print(String),
    /// Stand for election.
    Campaign,
    /// Do not stand for election any more.
    StandDown,
    /// The leader is dead: remove it from the store.
    RemoveLeader,
    /// Check whether the leader is alive and report the result as [`Event::Looked`]. Only electors do.
    LookAtLeader,
    /// Publish to the others whether this host misses the leader.
    MissLeader(bool),
    /// Connect to the leader that the store names now.
    Connect,
    /// It no longer has a seat and waits for one.
    LeftSeat,
    /// It has a seat again.
    TookSeat,
    /// The addresses where launchers of the job store copies of checkpoints for each other from now on.
    Meet {
        /// Addresses on hosts with ranks.
        hosts: Vec<String>,
        /// Addresses on spares.
        spares: Vec<String>,
    },
    /// It no longer follows: the ranks of its host are stopped.
    CutOff(CutOff),
}

/// Why a launcher no longer follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CutOff {
    /// There was no leader for too long.
    NoLeader,
    /// The leader has given its place to another host.
    Replaced,
    /// The leader refuses it.
    Refused {
        /// The leader's reason.
        why: String,
        /// Whether a new launcher on this host may take part.
        may_return: bool,
    },
    /// The leader is lost, and no launcher with a record of the job has taken its place.
    NoRecord,
}

/// The leader that a launcher follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leads {
    /// Its launcher.
    pub launcher: String,
    /// Its host.
    pub host: String,
    /// Its epoch. Orders of a lower epoch are refused.
    pub epoch: u64,
}

/// The state of a follower.
#[derive(Debug)]
pub struct Follow {
    me: String,
    leader: Leads,
    lease: Span,
    seat: Seat,
    acts: VecDeque<Act>,
    clock: Mapping,
    /// Whether there is a connection to the leader.
    open: bool,
    /// Since when it has had no welcome from the leader.
    gone: Option<Mono>,
    outbox: Outbox<(Mono, Event)>,
    inbox: Inbox,
    /// What this host saw of the current attempt, in local times. It is reported again to a new leader.
    log: VecDeque<(Mono, Event)>,
    /// Set until what was seen before has been reported to a new leader.
    catches_up: bool,
    /// The newest entry of the leader's journal that was written here.
    entries: u64,
    /// The newest entry of the leader's journal when this host joined; 0 under another leader.
    past: u64,
    /// The newest local entry when the present leader was elected.
    since: u64,
    /// How often, since the last connection, the leader's host has answered that no process listens there. `None`
    /// before the first connection.
    refusals: Option<u32>,
    /// Whether the leader is alive, as far as this host can see.
    vital: LivenessMonitor,
    /// Whether this host has published that it misses the leader.
    misses: bool,
    /// Whether ranks of an attempt may be running on this host.
    runs: bool,
    /// Whether the present leader has ordered to stop them.
    stops: bool,
    /// Whether it currently has no seat.
    waits: bool,
    /// Whether it was elected but knew too little of the job to lead it. It then waits for another leader.
    cannot_lead: bool,
    /// Whether it has stopped following.
    cut_off: bool,
}

impl Follow {
    /// A follower with a seat. `clock` has the round trips so far; `open`: whether the connection still exists.
    pub fn new(
        at: Mono,
        me: String,
        leader: Leads,
        seat: Seat,
        lease: Span,
        clock: Mapping,
        open: bool,
    ) -> Follow {
        let mut vital = LivenessMonitor::expected(at, lease);
        if open {
            vital.connects(at);
        }
        Follow {
            me,
            leader,
            lease,
            seat,
            acts: VecDeque::new(),
            clock,
            open,
            gone: (!open).then_some(at),
            outbox: Outbox::new(REPORTS),
            inbox: Inbox::default(),
            log: VecDeque::new(),
            catches_up: false,
            entries: 0,
            past: 0,
            since: 0,
            refusals: open.then_some(0),
            vital,
            misses: false,
            runs: false,
            stops: false,
            waits: false,
            cannot_lead: false,
            cut_off: false,
        }
    }

    /// A follower that waits for a seat. Its present seat is only similar to the one it may get.
    #[must_use]
    pub fn waiting(self) -> Follow {
        Follow { waits: true, ..self }
    }

    /// A follower that joins a job with this many entries in the leader's journal.
    #[must_use]
    pub fn joining_after(self, newest: u64) -> Follow {
        Follow { past: newest, ..self }
    }

    /// The next action; `None` when all are done. Call it until then after each of the other calls.
    pub fn poll(&mut self) -> Option<Act> {
        self.acts.pop_front()
    }

    /// What a new connection starts with: the newest command and the newest entry that were received, and their
    /// leader.
    pub fn have(&self) -> ((u64, u64), &str) {
        ((self.inbox.have(), self.entries), &self.leader.launcher)
    }

    fn standing(&self) -> LeadershipRole<'_> {
        LeadershipRole::Follows { leader: &self.leader.launcher, epoch: self.leader.epoch }
    }

    /// The leader that it follows.
    pub fn leader(&self) -> &Leads {
        &self.leader
    }

    /// Whether it has stopped following.
    pub fn is_cut_off(&self) -> bool {
        self.cut_off
    }

    /// Whether the leader has welcomed it on the present connection.
    pub fn is_connected(&self) -> bool {
        self.gone.is_none()
    }

    /// The newest local journal entry when the present leader was elected.
    pub fn since(&self) -> u64 {
        self.since
    }

    /// What was seen of the current attempt, for this launcher if it becomes the leader.
    pub fn into_log(self) -> impl Iterator<Item = (Mono, Event)> {
        self.log.into_iter()
    }

    fn send(&mut self, up: Up) {
        if self.open {
            self.acts.push_back(Act::Send(up));
        }
    }

    fn close(&mut self) {
        if std::mem::take(&mut self.open) {
            self.acts.push_back(Act::Close);
        }
    }

    /// There is a connection, and the leader has not answered on it yet.
    pub fn connected(&mut self) {
        (self.open, self.refusals) = (true, Some(0));
    }

    /// The connection to the leader accepts no more messages and was closed.
    pub fn gave_up(&mut self, now: Mono) {
        self.open = false;
        self.gone.get_or_insert(now);
    }

    /// There is no connection. `refused`: the host answered that no process listens there.
    pub fn disconnected(&mut self, now: Mono, why: &str, refused: bool) {
        self.open = false;
        self.vital.breaks(now, why.to_owned());
        if self.gone.is_none() {
            self.gone = Some(now);
            let host = &self.leader.host;
            // A spare has no ranks.
            let ranks = if self.waits { "" } else { "; the ranks go on" };
            let message = format!("no connection to the leader on host {host}: {why}{ranks}");
            self.acts.push_back(Act::Print(message));
        }
        if !self.cut_off {
            self.campaign();
            if refused {
                self.refused();
            }
        }
    }

    /// A message of the leader, received at this time.
    pub fn receive(&mut self, received: Mono, down: Down) {
        self.leader_reported(received, &down);
        match down {
            Down::Welcome { epoch, .. } | Down::Command { epoch, .. } if !self.standing().obeys(epoch) => {
                // A leader that was replaced and does not know it yet.
                self.close();
                self.gone.get_or_insert(received);
            }
            Down::Welcome { seat, .. } if seat != self.seat && self.runs => self.cut_off(CutOff::Replaced),
            Down::Welcome { seat, have, epoch, newest, .. } => {
                (self.gone, self.leader.epoch, self.cannot_lead) = (None, epoch, false);
                // The leader sends orders for the consequences of another seat.
                self.seat = seat;
                if std::mem::take(&mut self.waits) {
                    self.past = newest;
                    self.acts.push_back(Act::TookSeat);
                }
                self.acts.push_back(Act::StandDown);
                if self.catches_up {
                    self.entries = 0;
                } else {
                    self.outbox.acknowledged(have);
                    self.send_again();
                }
            }
            Down::Refused { why, may_return } => self.cut_off(CutOff::Refused { why, may_return }),
            Down::Waiting { status, .. } => {
                self.acts.push_back(Act::Print(status));
                self.wait_for_a_seat();
            }
            Down::Meet { hosts, spares } => self.acts.push_back(Act::Meet { hosts, spares }),
            Down::Command { number, command, .. } => match self.inbox.receive(number) {
                Received::New => {
                    self.send(Up::Received { number });
                    self.runs |= matches!(command, Command::Start { .. });
                    self.stops |= matches!(command, Command::Stop { .. });
                    self.acts.push_back(Act::Obey(command));
                }
                Received::Again => self.send(Up::Received { number: self.inbox.have() }),
                Received::Gap => self.close(),
            },
            Down::Entry { seq, at, body } if seq > self.entries => {
                self.entries = seq;
                let body = match Arc::unwrap_or_clone(body) {
                    Body::Fact(fact) => Body::Fact(times(fact, &|at| self.clock.from_leader(at))),
                    body => body,
                };
                let at = Stamp { mono: self.clock.from_leader(at.mono), wall: at.wall };
                self.acts.push_back(Act::Entry { seq, at, body, is_past: seq <= self.past });
            }
            // The links are measured before the first round.
            Down::Entry { .. } | Down::Measure { .. } => {}
            Down::Received { number } => self.outbox.acknowledged(number),
            Down::Beat { sent, at } => {
                self.clock.round_trip(sent, at, received);
                if self.catches_up && self.gone.is_none() {
                    self.catch_up();
                }
            }
        }
    }

    /// The leader has no ranks for this host any more, or does not know it. The host waits like a new one. What it
    /// saw of its former ranks has been reported.
    fn wait_for_a_seat(&mut self) {
        if self.runs {
            return self.cut_off(CutOff::Replaced);
        }
        (self.waits, self.gone, self.catches_up) = (true, None, false);
        (self.outbox, self.inbox) = (Outbox::new(REPORTS), Inbox::default());
        self.log.clear();
        self.acts.push_back(Act::StandDown);
        self.acts.push_back(Act::LeftSeat);
    }

    /// The host gets other ranks.
    pub fn sit(&mut self, seat: &Seat) {
        self.seat = seat.clone();
    }

    /// Its seat, as the leader knows it.
    pub fn seat(&self) -> &Seat {
        &self.seat
    }

    /// Whether it currently has no seat.
    pub fn waits_for_a_seat(&self) -> bool {
        self.waits
    }
}

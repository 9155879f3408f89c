//! A launcher that follows another one: what it sees goes to the leader, and what that one orders is done, each once. Pure:
//! what comes from the leader, from the store and from the clock goes in, and [`Act`]s come out.

mod election;
mod missing;
mod reports;

pub use reports::concerns_all;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::base::time::{Mono, Span, Stamp};
use crate::model::entry::Body;

use super::clock::{Mapping, times};
use super::lost::Vital;
use super::sequence::{Inbox, Outbox, Received};
use super::succession::Standing;
use super::wire::{Command, Down, Report, Seat, Up};

/// Reports that the leader has not acknowledged; with more this host counts as cut off.
const REPORTS: usize = 16_384;

/// What a follower wants to have done, in order.
#[derive(Clone, Debug)]
pub enum Act {
    /// Send this to the leader. A way that takes no more is reported by [`Follow::gave_up`].
    Send(Up),
    /// End the connection; another one is made.
    Close,
    /// Carry out a command.
    Obey(Command),
    /// Write an entry of the leader's journal, by the clock here.
    Entry {
        /// Its number in the leader's journal.
        seq: u64,
        /// When.
        at: Stamp,
        /// What.
        body: Body,
    },
    /// Show people a line.
    Say(String),
    /// Stand for election.
    Campaign,
    /// Do not stand for election any more.
    StandDown,
    /// The leader is dead: the store is to forget it.
    RemoveLeader,
    /// Look whether the leader lives; [`Report::Looked`] says what was found. Only those do that have a say.
    LookAtLeader,
    /// The others are to know whether this host misses the leader.
    MissLeader(bool),
    /// Connect to the leader that the store names now.
    Connect,
    /// It has no seat any more and waits for one.
    LeftSeat,
    /// It has got a seat again.
    TookSeat,
    /// Where launchers of the job keep copies of checkpoints for each other from now on.
    Meet {
        /// Those of hosts with ranks.
        hosts: Vec<String>,
        /// Those of spares.
        spares: Vec<String>,
    },
    /// It follows no more: the ranks of its host are stopped.
    CutOff(CutOff),
}

/// Why a follower follows no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CutOff {
    /// There was no leader for too long.
    NoLeader,
    /// The leader has given its place to another host.
    Replaced,
    /// The leader refuses it.
    Refused(String),
    /// The leader is lost, and no launcher with a record of the job has taken its place.
    NoRecord,
}

/// Whom a launcher follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leads {
    /// The launcher.
    pub launcher: String,
    /// Its host.
    pub host: String,
    /// Orders of a lower epoch are refused.
    pub epoch: u64,
}

/// What a follower has.
#[derive(Debug)]
pub struct Follow {
    me: String,
    leader: Leads,
    lease: Span,
    seat: Seat,
    acts: VecDeque<Act>,
    clock: Mapping,
    /// Whether there is a way to the leader.
    open: bool,
    /// Since when the leader has not welcomed it.
    gone: Option<Mono>,
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
    /// How often the leader's host has answered since the last connection that no process listens there; none before the
    /// first connection.
    refusals: Option<u32>,
    /// Whether the leader lives, as far as can be seen from here.
    vital: Vital,
    /// Whether the others were told that it does not.
    misses: bool,
    /// Whether ranks of an attempt may run here.
    runs: bool,
    /// Whether the present leader has had them stopped.
    stops: bool,
    /// Whether it has no seat for the moment.
    waits: bool,
    /// Whether it was elected and knew too little of the job to lead it: it waits for another leader.
    cannot_lead: bool,
    /// Whether the leader was given up.
    cut_off: bool,
}

impl Follow {
    /// One that has been given a seat. `clock` has the round trips until then; `open`: whether the connection is still there.
    pub fn new(
        at: Mono,
        me: String,
        leader: Leads,
        seat: Seat,
        lease: Span,
        clock: Mapping,
        open: bool,
    ) -> Follow {
        let mut vital = Vital::expected(at, lease);
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

    /// The same for one that waits for a seat: what it is given is one like the one that it may get.
    #[must_use]
    pub fn waiting(self) -> Follow {
        Follow { waits: true, ..self }
    }

    /// The next thing to do; none once all that came up is done. Called until then after each of the other calls.
    pub fn next_act(&mut self) -> Option<Act> {
        self.acts.pop_front()
    }

    /// What a new connection begins with: the newest command and the newest entry that were received, and of whom.
    pub fn have(&self) -> ((u64, u64), &str) {
        ((self.inbox.have(), self.entries), &self.leader.launcher)
    }

    fn standing(&self) -> Standing<'_> {
        Standing::Follows { leader: &self.leader.launcher, epoch: self.leader.epoch }
    }

    /// Whom it follows.
    pub fn leader(&self) -> &Leads {
        &self.leader
    }

    /// Whether the leader was given up.
    pub fn is_cut_off(&self) -> bool {
        self.cut_off
    }

    /// Whether the leader has welcomed it on the present connection.
    pub fn is_connected(&self) -> bool {
        self.gone.is_none()
    }

    /// The newest entry of the journal here when the present leader began.
    pub fn since(&self) -> u64 {
        self.since
    }

    /// What was seen of the current attempt, for this launcher if it leads from now on.
    pub fn into_log(self) -> impl Iterator<Item = (Mono, Report)> {
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

    /// There is a connection; the leader has not answered on it yet.
    pub fn connected(&mut self) {
        (self.open, self.refusals) = (true, Some(0));
    }

    /// The way to the leader takes no more messages, and was given up.
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
            let said = format!("no connection to the leader on host {host}: {why}{ranks}");
            self.acts.push_back(Act::Say(said));
        }
        if !self.cut_off {
            self.campaign();
            if refused {
                self.refused();
            }
        }
    }

    /// A message of the leader, which came at this time.
    pub fn said(&mut self, received: Mono, down: Down) {
        self.hears_leader(received, &down);
        match down {
            Down::Welcome { epoch, .. } | Down::Command { epoch, .. } if !self.standing().obeys(epoch) => {
                // A leader that was replaced and does not know it.
                self.close();
                self.gone.get_or_insert(received);
            }
            Down::Welcome { seat, .. } if seat != self.seat && self.runs => self.cut_off(CutOff::Replaced),
            Down::Welcome { seat, have, epoch, .. } => {
                (self.gone, self.leader.epoch, self.cannot_lead) = (None, epoch, false);
                // What another seat means for the host is ordered.
                self.seat = seat;
                if std::mem::take(&mut self.waits) {
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
            Down::Refused { why } => self.cut_off(CutOff::Refused(why)),
            Down::Waiting { reported, .. } => {
                self.acts.push_back(Act::Say(reported));
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
                self.acts.push_back(Act::Entry { seq, at, body });
            }
            Down::Entry { .. } => {}
            Down::Received { number } => self.outbox.acknowledged(number),
            Down::Beat { sent, at } => {
                self.clock.round_trip(sent, at, received);
                if self.catches_up && self.gone.is_none() {
                    self.catch_up();
                }
            }
        }
    }

    /// The leader has no ranks for this host any more, or does not know it: it waits like one that has just come. What was seen
    /// of the ranks that it had was told.
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

    /// The host has other ranks.
    pub fn sit(&mut self, seat: &Seat) {
        self.seat = seat.clone();
    }

    /// The seat that the leader knows it by.
    pub fn seat(&self) -> &Seat {
        &self.seat
    }

    /// Whether it has no seat for the moment.
    pub fn waits_for_a_seat(&self) -> bool {
        self.waits
    }
}

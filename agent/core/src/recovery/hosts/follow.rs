//! A launcher that follows another one: what it sees goes to the leader, and what that one orders is done, each once. Pure:
//! what comes from the leader, from the store and from the clock goes in, and [`Act`]s come out.

mod missing;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::base::id::Attempt;
use crate::base::time::{Mono, Span, Stamp};
use crate::hang::RankSeen;
use crate::model::entry::{Body, Fact};
use crate::recovery::job::ORDERS;

use super::clock::{Mapping, times};
use super::lost::Vital;
use super::record::Record;
use super::sequence::{Inbox, Outbox, Received};
use super::succession::{OnElection, OnLeader, Standing};
use super::wire::{Command, Down, Report, Seat, Up};

/// Reports that the leader has not acknowledged; with more this host counts as cut off.
const REPORTS: usize = 16_384;

/// A launcher that the store answers waits for another leader for so many leases.
const LEASES: u64 = 3;

/// A leader is dead when its host has refused so many connections after one that was made; one alone may be a firewall that is
/// loaded again.
const REFUSALS: u32 = 2;

/// What a host has seen of an attempt is kept for the next leader, so much of it at most.
const LOG: usize = 65_536;

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
    /// The leader is lost and has left no record.
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

    /// Something that concerns the whole job happened here.
    pub fn report(&mut self, at: Mono, report: Report) {
        if let Report::Looked { launcher, sight } = &report
            && *launcher == self.leader.launcher
        {
            return self.saw_leader(*sight);
        }
        self.runs &= !is_end(&report);
        self.keep(at, &report);
        if self.catches_up {
            // An answer to the new leader: it goes with the rest, also if the connection has just ended. What it ordered is
            // not ordered again.
            if (self.is_connected() || self.stops) && is_end(&report) {
                self.log.push_back((at, report));
            }
            return;
        }
        let (at, report) = (self.clock.to_leader(at), self.clock.report(report));
        match self.outbox.push((at, report.clone())) {
            Ok(number) => self.send(Up::Report { number, at, report }),
            // Far more than a leader that lives leaves unread.
            Err(_) => self.gone = Some(Mono(0)),
        }
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
            | Report::Seated { .. }
            | Report::Holding { .. }
            | Report::Brought { .. }
            | Report::Looked { .. } => false,
            Report::Fact { fact } => !matches!(fact, Fact::AttemptEnded { .. }),
            Report::Role { .. } => true,
        };
        if again && self.log.len() < LOG {
            self.log.push_back((at, report.clone()));
        }
    }

    /// Whether the leader can be told now what ranks are at. Before the first round trip no time can be told.
    pub fn tells_sights(&self) -> bool {
        self.gone.is_none() && self.clock.uncertainty().is_some()
    }

    /// What ranks are at, for the leader, which judges whether they hang.
    pub fn seen(&mut self, attempt: Attempt, ranks: Vec<RankSeen>) {
        if !ranks.is_empty() {
            let clock = &self.clock;
            let ranks = ranks.into_iter().map(|seen| seen.on_clock(&|at| clock.to_leader(at))).collect();
            self.send(Up::Seen { attempt, ranks });
        }
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
            // Whoever has no seat does not know the job well enough to lead it.
            if !self.waits {
                self.acts.push_back(Act::Campaign);
            }
            if refused {
                self.refused();
            }
        }
    }

    /// A leader that was connected, and at whose port no process listens any more, is dead: it holds the port for as long as it
    /// lives. Its lease would go on for some seconds.
    fn refused(&mut self) {
        let Some(refusals) = &mut self.refusals else { return };
        *refusals += 1;
        if *refusals == REFUSALS {
            self.acts.push_back(Act::RemoveLeader);
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
                (self.gone, self.leader.epoch) = (None, epoch);
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
            Down::Waiting { told, .. } => {
                self.acts.push_back(Act::Say(told));
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

    fn send_again(&mut self) {
        if self.open {
            let again = self.outbox.unacknowledged();
            let again =
                again.map(|(number, (at, report))| Up::Report { number, at: *at, report: report.clone() });
            self.acts.extend(again.map(Act::Send));
        }
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

    /// The store says that this launcher leads. `newest`: the newest entry of the journal here.
    pub fn led_by(&mut self, now: Mono, leader: Leads, newest: u64) {
        match self.standing().on_leader(&self.me, &leader.launcher, leader.epoch) {
            OnLeader::NewEpoch => {
                self.leader.epoch = leader.epoch;
                // What the others were told was of the epoch before.
                self.miss_leader(false);
            }
            OnLeader::Follow => {
                let said = format!("host {} leads the job now (epoch {})", leader.host, leader.epoch);
                self.acts.push_back(Act::Say(said));
                (self.open, self.gone, self.since) = (false, Some(now), newest);
                (self.outbox, self.inbox) = (Outbox::new(REPORTS), Inbox::default());
                (self.clock, self.catches_up, self.stops) = (Mapping::default(), true, false);
                (self.refusals, self.leader) = (None, leader);
                self.vital = Vital::expected(now, self.lease);
                self.miss_leader(false);
                self.acts.push_back(Act::Connect);
            }
            OnLeader::Nothing | OnLeader::StepDown => {}
        }
    }

    /// Whether this launcher, which was elected, takes over; else the leader is there after all, or this one is cut off.
    pub fn takes_over(&self) -> bool {
        !self.cut_off
            && !self.waits
            && self.standing().on_election(self.is_connected(), None) == OnElection::TakeOver
    }

    /// Whether the record of the lost leader has a seat for this launcher. Else another one may have its ranks by now, and this one
    /// leads nobody.
    pub fn is_in(&self, record: &Record) -> bool {
        record.seats.iter().any(|seated| seated.member.launcher == self.me)
    }

    /// Time has passed. A follower that is cut off from the leader ends by itself: others may have its ranks by now. While the
    /// store answers, the leader may be lost, and its lease not over yet: a store that elects a leader of its own makes leases
    /// longer. `silent`: for how long the store has not answered; `led`: whether it says that another launcher leads.
    pub fn look(&mut self, now: Mono, silent: Option<Span>, led: bool) {
        if !self.cut_off && !self.waits && silent.is_none() {
            self.look_at_leader(now);
        }
        let Some(gone) = self.gone.filter(|_| !self.cut_off).map(|since| now.since(since)) else { return };
        if gone < self.lease {
            return;
        }
        let waits = match silent {
            Some(silent) => silent < self.lease,
            // One without a seat stands for no election; those with a seat do, for as long as no launcher leads.
            None => (!led && !self.waits) || gone.0 < LEASES.saturating_mul(self.lease.0),
        };
        if !waits {
            self.cut_off(CutOff::NoLeader);
        }
    }

    /// It follows no more.
    pub fn cut_off(&mut self, why: CutOff) {
        self.cut_off = true;
        self.acts.push_back(Act::StandDown);
        self.acts.push_back(Act::CutOff(why));
    }
}

/// Whether this says that an attempt has ended on this host.
fn is_end(report: &Report) -> bool {
    matches!(report, Report::Fact { fact: Fact::AttemptEnded { .. } })
}

/// Whether a fact concerns the whole job, and not only the host on which it was seen.
pub fn concerns_all(fact: &Fact) -> bool {
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
            seen.component == ORDERS || matches!(seen.component.as_str(), "job" | "template")
        }
        _ => false,
    }
}

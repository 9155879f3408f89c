//! The launcher that leads. It owns the job and the merge, a link to each follower, and what waits for the store.
//! Pure: events of connections, of the store and of the clock go in, and [`Act`]s come out. The launcher carries them
//! out, and so does the simulation.

mod expected;
mod feed;
mod joining;
mod leadership;
mod parts;
mod probing;
mod spares;
mod world;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use mainstay_hang::RankSeen;
use mainstay_model::entry::{Body, Fact};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::job::{Input, Job, Order, Output};

use super::link::{BACK_WITHIN, Connection, Link};
use super::merge::{Merge, Next};
use super::predecessor::Predecessor;
use super::recent::Recent;
use super::record::Record;
use super::round::{Member, Seated};
use super::sequence::Received;
use super::wire::{Command, Down, Report, Up};

pub use expected::Expected;

/// The capacity for acts that is kept when all are done.
const ROOM_KEPT: usize = 1024;

/// An action that a leader requests, in order.
#[derive(Clone, Debug)]
pub enum Act {
    /// Send a message. If the connection accepts no more, call [`Lead::gone`].
    Send(Connection, Down),
    /// End a connection.
    Close(Connection),
    /// Write this to the journal.
    Record(Mono, Body),
    /// A command for the host at this seat. The launcher completes it and passes it to [`Lead::command`].
    Command(u32, Command),
    /// A command for the leader's own host.
    Obey(Command),
    /// An order that concerns only the leader's launcher.
    Local(Order),
    /// Store this record under this number, with the time of the request. A newer record replaces one that is not
    /// stored yet.
    Store(u64, Box<Record>),
    /// Show the user a line.
    Print(String),
    /// Stand for election again: the store no longer knows this leader.
    Campaign,
    /// It no longer leads: the ranks of its host are stopped.
    StepDown(SteppedDown),
    /// A rank on another host has finished.
    Finished(Attempt, Rank),
    /// Sights of ranks of another host.
    Seen(Attempt, Vec<RankSeen>),
    /// The addresses where launchers of the job store copies of checkpoints for each other from now on.
    Meet {
        /// Addresses on hosts with ranks.
        hosts: Vec<String>,
        /// Addresses on spares.
        spares: Vec<String>,
    },
}

/// Why a launcher no longer leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SteppedDown {
    /// Another launcher leads now.
    Replaced {
        /// The host of the new leader.
        host: String,
        /// The epoch of the new leader.
        epoch: u64,
    },
    /// Another launcher has led in the meantime: its actions are newer than what this launcher knows.
    LedMeanwhile,
    /// Neither the store nor a follower answers.
    CutOff,
    /// Another launcher has led the job to its end.
    Ended {
        /// The status with which all launchers exit.
        exit: i32,
    },
}

/// The leader and its rules. The default is that of a job of one host: it has no store and no followers.
#[derive(Clone, Debug, Default)]
pub struct LeaderSettings {
    /// The seat of the leader.
    pub seat: u32,
    /// Its launcher.
    pub launcher: String,
    /// The names of the job and of its launch, as ranks of all hosts get them.
    pub names: (String, String),
    /// What it expects of other launchers.
    pub expected: Expected,
    /// How long a launcher may continue alone if the store does not answer.
    pub lease: Span,
    /// The interval between calls of [`Lead::look`].
    pub looks_every: Span,
    /// The epoch of its orders.
    pub epoch: u64,
    /// The newest record that was requested to be stored.
    pub newest_record: u64,
    /// Whether a store keeps the record of the job for the next leader. Without one, nothing waits for it.
    pub has_store: bool,
}

/// The state of a leader.
#[derive(Debug)]
pub struct Lead {
    job: Job,
    merge: Merge,
    leader_settings: LeaderSettings,
    next: VecDeque<Next>,
    /// Outputs of the job that are not carried out yet.
    outputs: VecDeque<(Mono, Output)>,
    acts: VecDeque<Act>,
    links: Vec<Link>,
    /// The seat of each launcher, including lost ones.
    of_launcher: BTreeMap<String, usize>,
    /// The seat of each connection.
    seats: BTreeMap<Connection, usize>,
    /// Launchers that wait for a seat.
    spares: Vec<(Member, Connection)>,
    /// Where copies of checkpoints are stored, as last sent to all. `None` before the first spare.
    replica_addresses: Option<spares::ReplicaAddresses>,
    /// The record that stores changed seats, until it is stored.
    seats_due: Option<u64>,
    /// Launchers that were declared lost.
    lost: BTreeSet<String>,
    /// Whether the store knows this launcher as the leader.
    is_registered: bool,
    /// Whether there is something to store that the newest record lacks.
    record_due: bool,
    /// When time alone last made a record due.
    remembered: Mono,
    /// Orders that wait until their record is stored.
    held: VecDeque<leadership::PendingOrder>,
    /// The status of the job, once it is over.
    over: Option<i32>,
    /// Another launcher leads: this one decides nothing more.
    deposed: bool,
    /// The leader that it replaced.
    predecessor: Option<Predecessor>,
    /// When it last checked its hosts.
    looked: Mono,
    /// When journal entries were last sent to followers.
    fed: Mono,
    /// The seat to continue with, and whether entries are left to send.
    fed_from: usize,
    feeds: bool,
    /// The entries that it wrote last, for the followers. `None` before the first entry.
    recent: Option<Recent>,
}

impl Lead {
    /// A leader without connected followers.
    pub fn new(at: Mono, mut job: Job, merge: Merge, leader_settings: LeaderSettings) -> Lead {
        let within = leader_settings.lease.plus(BACK_WITHIN);
        let link = |seated: &Seated| Link::new(seated.clone(), at, within);
        job.on_hosts(merge.hosts_of_ranks());
        let links: Vec<Link> = merge.seats().map(link).collect();
        Lead {
            of_launcher: by_launcher(&links),
            links,
            job,
            merge,
            leader_settings,
            next: VecDeque::new(),
            outputs: VecDeque::new(),
            acts: VecDeque::new(),
            seats: BTreeMap::new(),
            spares: Vec::new(),
            replica_addresses: None,
            seats_due: None,
            lost: BTreeSet::new(),
            is_registered: true,
            record_due: false,
            remembered: at,
            held: VecDeque::new(),
            over: None,
            deposed: false,
            predecessor: None,
            looked: at,
            fed: Mono(0),
            fed_from: 0,
            feeds: false,
            recent: None,
        }
    }

    /// Adds the job's first outputs. Its first orders wait until its facts are written.
    pub fn begin_with(&mut self, at: Mono, out: Vec<Output>) {
        self.outputs.extend(out.into_iter().map(|output| (at, output)));
    }

    /// The next action; `None` when all are done. Call it until then after each of the other calls.
    pub fn next_act(&mut self, now: Mono) -> Option<Act> {
        loop {
            if let Some(act) = self.acts.pop_front() {
                return Some(act);
            }
            if self.deposed {
                return None;
            }
            if let Some((at, output)) = self.outputs.pop_front() {
                match output {
                    Output::Record(body) => {
                        self.record_due |= is_to_be_remembered(&body);
                        return Some(Act::Record(at, body));
                    }
                    Output::Order(order) => self.order(now, order),
                }
                continue;
            }
            match self.next.pop_front() {
                Some(Next::Job(at, input)) => {
                    let mut out = Vec::new();
                    self.job.step(at, input, &mut out);
                    self.outputs.extend(out.into_iter().map(|output| (at, output)));
                }
                Some(Next::Command(seat, Command::Finish { exit, .. })) => {
                    let summary = Some(Box::new(self.job.summary(now)));
                    return Some(Act::Command(seat, Command::Finish { exit, summary }));
                }
                Some(Next::Command(seat, command)) => return Some(Act::Command(seat, command)),
                Some(Next::Local(order)) => return Some(Act::Local(order)),
                Some(Next::Arranged(arranged)) => self.arranged(*arranged),
                None if self.record_due => self.write_record(),
                None => {
                    // When all ranks of a large job start, there are 100,000 of them.
                    self.acts.shrink_to(ROOM_KEPT);
                    self.outputs.shrink_to(ROOM_KEPT);
                    self.next.shrink_to(ROOM_KEPT);
                    return None;
                }
            }
        }
    }

    /// Something happened on the leader's host.
    pub fn see(&mut self, at: Mono, input: Input) {
        match Report::of(input.clone()) {
            Some(report) => self.report_of_mine(at, report),
            // Inputs about the leader's own host and from its agent go to the job directly.
            None => self.next.push_back(Next::Job(at, input)),
        }
    }

    /// A report of the leader's host.
    pub fn report_of_mine(&mut self, at: Mono, report: Report) {
        self.take_report(at, self.leader_settings.seat, report);
    }

    fn take_report(&mut self, at: Mono, seat: u32, report: Report) {
        match &report {
            Report::Fact { fact: Fact::StopRequested { .. } } => self.give_up_held_start(at),
            Report::Looked { launcher, sight } => return self.looked_at(seat, launcher, *sight),
            _ => {}
        }
        self.merge.report(at, seat, report, &mut self.next);
    }

    /// Passes an input to the job.
    pub fn report_to_job(&mut self, at: Mono, input: Input) {
        self.next.push_back(Next::Job(at, input));
    }

    /// Sends a command to the host at this seat.
    pub fn command(&mut self, seat: u32, command: Command) {
        if seat == self.leader_settings.seat {
            return self.acts.push_back(Act::Obey(command));
        }
        let epoch = self.leader_settings.epoch;
        let Some(link) = self.links.get_mut(seat as usize) else { return };
        match link.outbox.push(command.clone()) {
            Ok(number) => self.send(seat as usize, Down::Command { number, epoch, command }),
            Err(error) => link.given_up = Some(error.to_string()),
        }
    }

    /// Sends a command to each host.
    pub fn command_all(&mut self, command: &Command) {
        for seat in 0..self.links.len() as u32 {
            self.command(seat, command.clone());
        }
    }

    fn send(&mut self, seat: usize, down: Down) {
        if let Some(connection) = self.links.get(seat).and_then(|link| link.connection) {
            self.acts.push_back(Act::Send(connection, down));
        }
    }

    fn close(&mut self, connection: Option<Connection>) {
        if let Some(connection) = connection {
            self.seats.remove(&connection);
            self.acts.push_back(Act::Close(connection));
        }
    }

    /// A connection has ended or accepts no more messages.
    pub fn gone(&mut self, now: Mono, connection: Connection, why: String) {
        self.spares.retain(|(_, of)| *of != connection);
        self.report_who_waits();
        self.give_up_connection(now, connection, why);
    }

    fn give_up_connection(&mut self, now: Mono, connection: Connection, why: String) {
        let Some(seat) = self.seats.get(&connection).copied() else { return };
        let ended = self.links.get_mut(seat).and_then(|link| link.disconnected(now, why));
        self.close(ended);
    }

    /// A message from a follower.
    pub fn receive(&mut self, now: Mono, connection: Connection, up: Up) {
        let Some(seat) = self.seats.get(&connection).copied() else { return };
        let Some(link) = self.links.get_mut(seat) else { return };
        match up {
            Up::Beat { .. } => link.vital.beat(now),
            _ => link.vital.received(now),
        }
        match up {
            Up::Report { number, at, report } => match link.inbox.receive(number) {
                Received::New => {
                    self.send(seat, Down::Received { number });
                    if let Some((attempt, rank)) = finished(&report) {
                        self.acts.push_back(Act::Finished(attempt, rank));
                    }
                    self.take_report(at, seat as u32, report);
                }
                Received::Again => {
                    let number = link.inbox.have();
                    self.send(seat, Down::Received { number });
                }
                Received::Gap => self.give_up_connection(now, connection, "a report is missing".to_owned()),
            },
            Up::Seen { attempt, ranks } => self.acts.push_back(Act::Seen(attempt, ranks)),
            Up::Received { number } => link.outbox.acknowledged(number),
            Up::Join(_) | Up::Beat { .. } => {}
        }
    }

    /// The job.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// The job, for what no message carries.
    pub fn job_mut(&mut self) -> &mut Job {
        &mut self.job
    }

    /// The hosts as the job sees them.
    pub fn merge(&self) -> &Merge {
        &self.merge
    }

    /// The seat of each member.
    pub fn seats(&self) -> impl Iterator<Item = &Seated> {
        self.merge.seats()
    }

    /// The epoch of its orders.
    pub fn epoch(&self) -> u64 {
        self.leader_settings.epoch
    }

    /// The exit status of the job, once it is over.
    pub fn over(&self) -> Option<i32> {
        self.over
    }

    /// Whether it no longer leads.
    pub fn is_deposed(&self) -> bool {
        self.deposed
    }

    /// Whether all ranks of this attempt have started.
    fn has_started(&self, attempt: Attempt) -> bool {
        self.merge.has_started() && self.merge.attempt() == attempt
    }

    /// Whether a follower that may return lacks commands. A job that is over waits for it.
    pub fn awaits_followers(&self) -> bool {
        !self.deposed && self.links.iter().any(|link| !link.lost && !link.outbox.is_empty())
    }

    /// Ends all connections.
    pub fn close_all(&mut self) {
        for seat in 0..self.links.len() {
            let open = self.links.get_mut(seat).and_then(|link| link.connection.take());
            self.close(open);
        }
        for (_, connection) in std::mem::take(&mut self.spares) {
            self.close(Some(connection));
        }
    }
}

/// The seat of each launcher.
fn by_launcher(links: &[Link]) -> BTreeMap<String, usize> {
    links.iter().enumerate().map(|(seat, link)| (link.seated.member.launcher.clone(), seat)).collect()
}

/// Whether the next leader should know this, although nothing waits for it.
fn is_to_be_remembered(body: &Body) -> bool {
    matches!(
        body,
        Body::Fact(Fact::AttemptStarted { .. } | Fact::RanksStepping { .. } | Fact::StopRequested { .. })
    )
}

/// The rank that the report reports as finished.
fn finished(report: &Report) -> Option<(Attempt, Rank)> {
    match report {
        Report::Fact { fact: Fact::RankExited { attempt, rank, status, .. } } if status.is_success() => {
            Some((*attempt, *rank))
        }
        _ => None,
    }
}

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
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::job::{Job, Output};
use mainstay_recovery::protocol::{Command, Event};

use super::link::{BACK_WITHIN, Connection, Link};
use super::merge::{Merge, Next};
use super::predecessor::Predecessor;
use super::recent::Recent;
use super::record::Record;
use super::round::{Member, Seated};
use super::sequence::Received;
use super::wire::{Down, Up};

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
    /// A command for the leader's own host.
    Obey(Command),
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

/// What the leader asks of its own host.
pub trait Here {
    /// The step after which all ranks of the job can save. `None` if it is not known.
    fn save_after(&self) -> Option<u64>;

    /// At most `most` entries of the journal that are newer than `have`. `None` if they cannot be read now.
    fn entries_after(&self, have: u64, most: usize) -> Option<Vec<Entry>>;
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
    /// Commands that wait until their record is stored.
    held: VecDeque<leadership::PendingCommand>,
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
        let own = links.get(leader_settings.seat as usize);
        own.iter().for_each(|link| job.lead_from(&link.seated.member.host));
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
    pub fn poll(&mut self, now: Mono, here: &dyn Here) -> Option<Act> {
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
                        if let Body::Verdict(verdict) = &body {
                            self.merge.judged(verdict);
                        }
                        return Some(Act::Record(at, body));
                    }
                    Output::Command(command) => self.order(now, command, here),
                }
                continue;
            }
            match self.next.pop_front() {
                Some(Next::Job(at, event)) => {
                    let mut out = Vec::new();
                    self.job.step(at, event, &mut out);
                    self.outputs.extend(out.into_iter().map(|output| (at, output)));
                }
                Some(Next::Command(seat, command)) => {
                    if matches!(command, Command::Finish { .. }) {
                        // A follower reads nothing that comes after it.
                        self.feed_all(here);
                    }
                    self.command(seat, command);
                }
                Some(Next::Arranged(arranged)) => self.arranged(*arranged),
                None if self.record_due => self.write_record(),
                None if self.is_feed_due(now) => self.feed(here),
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

    /// Something happened on the leader's own host.
    pub fn step(&mut self, at: Mono, event: Event) {
        self.step_member(at, self.leader_settings.seat, event);
    }

    /// Something happened on the host at this seat.
    fn step_member(&mut self, at: Mono, seat: u32, event: Event) {
        match &event {
            Event::Fact(Fact::StopRequested { .. }) => self.give_up_held_start(at),
            Event::Looked { launcher, sight } => return self.looked_at(seat, launcher, *sight),
            _ => {}
        }
        self.merge.step(at, seat, event, &mut self.next);
    }

    /// Passes a fact about the whole group to the job.
    pub fn fact(&mut self, at: Mono, fact: Fact) {
        self.next.push_back(Next::Job(at, Event::Fact(fact)));
    }

    /// Sends a command to the host at this seat.
    fn command(&mut self, seat: u32, command: Command) {
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

    /// A save is due on all ranks of the attempt, after this step.
    pub fn save_is_due(&mut self, attempt: Attempt, step: u64) {
        for seat in 0..self.links.len() as u32 {
            self.command(seat, Command::SaveDue { attempt, step });
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
            Up::Event { number, at, event } => match link.inbox.receive(number) {
                Received::New => {
                    self.send(seat, Down::Received { number });
                    if let Some((attempt, rank)) = finished(&event) {
                        self.acts.push_back(Act::Finished(attempt, rank));
                    }
                    self.step_member(at, seat as u32, event);
                }
                Received::Again => {
                    let number = link.inbox.have();
                    self.send(seat, Down::Received { number });
                }
                Received::Gap => self.give_up_connection(now, connection, "a report is missing".to_owned()),
            },
            Up::Seen { attempt, ranks } => self.acts.push_back(Act::Seen(attempt, ranks)),
            Up::Received { number } => link.outbox.acknowledged(number),
            Up::Join(_) | Up::Api | Up::Measure | Up::Measured { .. } | Up::Beat { .. } => {}
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

/// The rank that has finished by this event.
fn finished(event: &Event) -> Option<(Attempt, Rank)> {
    match event {
        Event::Fact(Fact::RankExited { attempt, rank, status, .. }) if status.is_success() => {
            Some((*attempt, *rank))
        }
        _ => None,
    }
}

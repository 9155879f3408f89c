//! The leader's view of all hosts: their reports become the inputs of the one [`Job`](crate::recovery::job::Job), its orders become
//! commands for the hosts.
//!
//! ```text
//!  StartRanks, StartRound          all seats are taken          port reserved            all hosts have started
//!  ─────────────────────► Waiting ────────────────────► Opening ─────────────► Starting ───────────────────────► Started
//!                            ▲        a host is lost       │                      │
//!                            └─────────────────────────────┘                      │ one cannot start
//!                                            all hosts have ended their part      ▼
//!                         StartFailed ◄──────────────────────────────────── Abandoning
//! ```
//!
//! Where launchers keep copies of checkpoints for each other, two phases lie between Opening and Starting: in Gathering hosts
//! tell what they hold, in Bringing each gets its shards of the newest step that is whole over all of that. If a host cannot
//! get them, the next older whole step is brought. A host that is lost meanwhile leads back to Waiting.
//!
//! Where the number of hosts may change (`merge/world.rs`), Waiting may lead to Arranged, in which the leader has other seats
//! stored, and to Seating, in which hosts take them, before Opening.
//!
//! The job gets one `AttemptStarted` when every host has started its ranks and one `AttemptEnded` when every host has ended
//! its part. What hosts report of ranks before that is held back until then. A lost host counts as the exit of its ranks.
//!
//! Total: a report that does not fit the state changes nothing. Messages of an earlier attempt are recorded only.

mod checkpoints;
mod world;

pub use checkpoints::{COPIES_AMONG, SUMMED_WITHIN};

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeInclusive;

use crate::base::id::{Attempt, Pid, Rank};
use crate::base::time::{Mono, Span};
use crate::checkpoint::inventory::{Copy, StepKey};
use crate::hang::{ACTIVITY, PlaceGroup, Waits, fold};
use crate::model::entry::{ExitStatus, Fact, StartedRank};
use crate::model::observation::{Observation, Weight};
use crate::recovery::job::{Input, Order, StopWhy};

pub use world::WORLD_GROWS;

use super::resize::{Arranged, Limits};
use super::round::{Member, Seated};
use super::wire::{Command, Report};

/// The component of what is reported about hosts, as the journal has it.
pub const HOSTS: &str = "hosts";

/// SIGKILL: what processes of a host that is gone have in common with killed ones is that nothing of them is left.
const KILLED: ExitStatus = ExitStatus::Signal(9);

/// Inputs of one host that are held back at most; more are dropped and counted.
const HELD: usize = 4096;

/// What is to be done next, in order.
#[derive(Clone, Debug)]
pub enum Next {
    /// An input for the job.
    Job(Mono, Input),
    /// A command for the host at this seat.
    Command(u32, Command),
    /// An order that concerns the leader's launcher alone.
    Local(Order),
    /// Hosts have other seats from here on: the numbers of seats in later commands are those of [`Merge::seats`] now. Once that
    /// is stored, [`Merge::arranged`] goes on.
    Arranged(Box<Arranged>),
}

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    /// No attempt was ordered, or it is over.
    Idle,
    Waiting {
        since: Mono,
    },
    Arranged,
    Seating {
        since: Mono,
    },
    Opening,
    Gathering {
        port: u16,
        since: Mono,
    },
    Bringing {
        port: u16,
        step: StepKey,
        since: Mono,
    },
    Starting {
        port: u16,
    },
    Abandoning {
        error: String,
    },
    Started,
}

/// One host.
#[derive(Clone, Debug)]
struct Host {
    seated: Seated,
    here: bool,
    /// Whether its launcher knows its seat.
    knows: bool,
    started: Option<Vec<StartedRank>>,
    /// Orphans killed, and ranks that wait in their processes.
    ended: Option<(u32, Vec<Rank>)>,
    exited: BTreeSet<Rank>,
    /// Shards of checkpoints on it.
    holding: Option<Vec<Copy>>,
    /// Whether the shards of its ranks are there.
    brought: bool,
    held: VecDeque<(Mono, Input)>,
    evidence: Option<Evidence>,
    /// Nothing of its ranks, which send no heartbeats, does anything.
    idle: bool,
}

#[derive(Clone, Debug, Default)]
struct Evidence {
    file: Option<String>,
    groups: Vec<PlaceGroup>,
    waits: Vec<Waits>,
    summary: Vec<String>,
    took: Span,
}

/// The hosts of a job, as its leader sees them.
#[derive(Clone, Debug)]
pub struct Merge {
    hosts: Vec<Host>,
    phase: Phase,
    attempt: Attempt,
    in_process: bool,
    /// How long a lost host is waited for.
    patience: Span,
    /// Within what the number of hosts may change; the launcher that leads; and launchers that wait for a seat.
    limits: Limits,
    leader: String,
    waiting: Vec<Member>,
    /// Ranks of the last attempt that ran.
    ran: Option<u32>,
    /// Whether the seats are not stored yet.
    unstored: bool,
    /// When the ranks last started, and when they were last stopped for more hosts to take part.
    started_at: Option<Mono>,
    grow_asked: Option<Mono>,
    keeps_world: bool,
    /// Of so many hosts that wait it was said why they do.
    told_waiting: usize,
    /// Whether an end of the attempt is awaited.
    ending: bool,
    /// Whether evidence is awaited.
    collecting: bool,
    /// The host that was found to be waited for last.
    awaited: usize,
    dropped: u64,
    /// What hosts hold of checkpoints in this start.
    copies: Vec<Copy>,
    /// Steps that could not be brought to a host in this start.
    failed_steps: BTreeSet<StepKey>,
    /// Whether the newest step of another number of ranks was looked after in this start.
    other_world_done: bool,
}

impl Merge {
    /// All hosts of a round are there; nothing runs. The port of the ranks' store is reserved on the first seat's host.
    pub fn new(round: Vec<Seated>, patience: Span) -> Merge {
        let hosts = u32::try_from(round.len()).unwrap_or(u32::MAX);
        Merge {
            hosts: round.into_iter().map(Host::new).collect(),
            phase: Phase::Idle,
            attempt: Attempt(0),
            in_process: false,
            patience,
            limits: Limits::fixed(hosts),
            leader: String::new(),
            waiting: Vec::new(),
            ran: None,
            unstored: false,
            started_at: None,
            grow_asked: None,
            keeps_world: false,
            told_waiting: 0,
            ending: false,
            collecting: false,
            awaited: 0,
            dropped: 0,
            copies: Vec::new(),
            failed_steps: BTreeSet::new(),
            other_world_done: false,
        }
    }

    /// What another leader left, by its record: all hosts of its round, and an attempt that runs, or of which it is not
    /// known whether it started everywhere. Hosts report again what they have seen of it.
    pub fn resume(round: Vec<Seated>, patience: Span, attempt: Attempt, running: bool) -> Merge {
        let mut merge = Merge::new(round, patience);
        merge.attempt = attempt;
        // Another leader may have stored seats that hosts have not got.
        merge.hosts.iter_mut().for_each(|host| host.knows = !host.seated.member.moves);
        merge.phase = match running {
            true => Phase::Started,
            false => {
                let error = "the leader was lost before it was known that all ranks had started";
                Phase::Abandoning { error: error.to_owned() }
            }
        };
        merge.ran = running.then(|| merge.world());
        for host in merge.hosts.iter_mut().filter(|_| running) {
            host.started = Some(host.unseen());
        }
        merge
    }

    /// Ranks of the attempt, as far as they are known.
    pub fn ranks(&self) -> Vec<StartedRank> {
        self.hosts.iter().flat_map(|host| host.started.iter().flatten().cloned()).collect()
    }

    /// Has a start that the leader before did not bring about stopped on all hosts that are there.
    pub fn give_up_start(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        if let Phase::Abandoning { error } = &self.phase {
            let error = error.clone();
            self.abandon(error, next);
            self.end_if_over(at, next);
        }
    }

    /// Whether all ranks of the attempt have started.
    pub fn has_started(&self) -> bool {
        self.phase == Phase::Started
    }

    /// The hosts with the numbers of their ranks, in the order of their node ranks.
    pub fn places(&self) -> impl Iterator<Item = (String, RangeInclusive<u32>)> {
        self.hosts.iter().map(|host| {
            let Seated { member, seat } = &host.seated;
            (member.host.clone(), seat.first_rank..=seat.first_rank + member.ranks.saturating_sub(1))
        })
    }

    /// Whether no host is to stop or start ranks at the moment.
    pub fn is_settled(&self) -> bool {
        !self.ending && matches!(self.phase, Phase::Idle | Phase::Started)
    }

    /// Who has which seat, also on hosts that are lost.
    pub fn seats(&self) -> impl Iterator<Item = &Seated> {
        self.hosts.iter().map(|host| &host.seated)
    }

    /// The current attempt.
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Seats whose host is lost.
    pub fn lost_seats(&self) -> Vec<Seated> {
        self.hosts.iter().filter(|host| !host.here).map(|host| host.seated.clone()).collect()
    }

    /// For which hosts a start waits; none if it waits for none.
    pub fn waits_for(&self) -> Option<Vec<String>> {
        let waits = matches!(self.phase, Phase::Waiting { .. });
        waits.then(|| self.hosts.iter().filter(|host| !host.here).map(|host| host.named()).collect())
    }

    /// Reports of ranks that were dropped because too many were held back.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// An order of the job.
    pub fn order(&mut self, at: Mono, order: Order, next: &mut VecDeque<Next>) {
        match order {
            Order::StartRanks(attempt) => self.begin(at, attempt, false, next),
            Order::StartRound(attempt) => self.begin(at, attempt, true, next),
            Order::StopRanks { attempt, why } => {
                self.ending = true;
                self.forget_ends();
                self.to_all(&Command::Stop { attempt, why, save_after: None }, next);
                self.end_if_over(at, next);
            }
            Order::EndRank { attempt, rank } => {
                self.ending = true;
                let seat = self.seat_of(rank);
                let Some(host) = seat.and_then(|seat| self.host(seat)).filter(|host| host.here) else {
                    return self.end_if_over(at, next);
                };
                host.ended = None;
                next.extend(seat.map(|seat| Next::Command(seat, Command::EndRank { attempt, rank })));
            }
            Order::TakeEvidence(attempt) => {
                self.collecting = true;
                self.hosts.iter_mut().for_each(|host| host.evidence = None);
                self.to_all(&Command::TakeEvidence { attempt }, next);
            }
            Order::Finish { exit } => self.to_all(&Command::Finish { exit, summary: None }, next),
            order @ (Order::Consult(_) | Order::LookAgain { .. }) => next.push_back(Next::Local(order)),
        }
    }

    /// A report of the host at this seat.
    pub fn report(&mut self, at: Mono, seat: u32, report: Report, next: &mut VecDeque<Next>) {
        match report {
            Report::Opened { attempt, port } if attempt == self.attempt && self.phase == Phase::Opening => {
                self.opened(at, seat, port, next);
            }
            Report::Holding { attempt, copies } if attempt == self.attempt => {
                self.holds(at, seat, copies, next);
            }
            Report::Brought { attempt, step, error } if attempt == self.attempt => {
                self.brought(at, seat, &step, error, next);
            }
            Report::Seated { attempt, seat: has } if attempt == self.attempt => {
                self.has_seat(seat, &has, next);
            }
            Report::Opened { .. }
            | Report::Seated { .. }
            | Report::Holding { .. }
            | Report::Brought { .. }
            | Report::Looked { .. } => {}
            Report::Fact { fact } => self.fact(at, seat, fact, next),
            report => {
                if let Some(input) = report.input() {
                    self.pass(at, seat, input, next);
                }
            }
        }
    }

    /// The host at this seat is lost, with all that ran on it.
    pub fn lost(&mut self, at: Mono, seat: u32, how: &str, next: &mut VecDeque<Next>) {
        let attempt = self.attempt;
        if self.host(seat).is_none_or(|host| !host.here) {
            return;
        }
        if matches!(self.phase, Phase::Starting { .. }) {
            self.count_as_started(at, next);
        }
        let phase = self.phase.clone();
        let Some(host) = self.host(seat) else { return };
        host.here = false;
        let (named, started) = (host.named(), phase == Phase::Started);
        let lost = Fact::HostLost {
            attempt,
            host: host.seated.member.host.clone(),
            node_rank: host.seated.seat.group_rank,
            ranks: if started { host.running().map(|(rank, _)| rank).collect() } else { Vec::new() },
            named,
            how: how.to_owned(),
        };
        next.push_back(Next::Job(at, Input::Fact(lost)));
        host.held.clear();
        match phase {
            Phase::Idle | Phase::Waiting { .. } => {}
            Phase::Arranged
            | Phase::Seating { .. }
            | Phase::Opening
            | Phase::Gathering { .. }
            | Phase::Bringing { .. } => {
                self.phase = Phase::Waiting { since: at };
            }
            Phase::Starting { .. } | Phase::Abandoning { .. } => {}
            Phase::Started => {
                let after_stop = self.ending;
                for exit in self.exits_of(seat, attempt, after_stop) {
                    next.push_back(Next::Job(at, Input::Fact(exit)));
                }
            }
        }
        if let Some(host) = self.host(seat) {
            host.started = None;
            host.ended = Some((0, Vec::new()));
        }
        self.end_if_over(at, next);
        self.evidence_if_complete(at, next);
    }

    /// A launcher takes the seat of a lost host.
    pub fn taken(&mut self, at: Mono, seated: Seated, next: &mut VecDeque<Next>) {
        let seat = seated.seat.group_rank;
        let Some(host) = self.host(seat).filter(|host| !host.here) else { return };
        host.knows = !seated.member.moves;
        host.seated = seated;
        host.here = true;
        let detail = format!("{} has joined", host.named());
        next.push_back(Next::Job(at, Input::Fact(observed("host_joined", Weight::Info, detail))));
        self.open_if_all_here(at, next);
    }

    /// A start that waits for a lost host too long fails; checkpoints of a host that does not answer are not waited for.
    pub fn look(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        self.look_at_world(at, next);
        if let Phase::Waiting { since } = self.phase
            && at.since(since) >= self.patience
        {
            let error = format!("{} did not come back within {}", self.missing(), self.patience);
            self.fail(at, error, next);
        }
        self.look_at_checkpoints(at, next);
    }

    fn begin(&mut self, at: Mono, attempt: Attempt, in_process: bool, next: &mut VecDeque<Next>) {
        (self.attempt, self.in_process) = (attempt, in_process);
        (self.ending, self.collecting) = (false, false);
        self.failed_steps.clear();
        self.other_world_done = false;
        for host in &mut self.hosts {
            (host.started, host.ended, host.evidence, host.idle) = (None, None, None, false);
            host.exited.clear();
            host.held.clear();
        }
        self.phase = Phase::Waiting { since: at };
        if self.hosts.iter().any(|host| !host.here) {
            let detail = self.awaited();
            next.push_back(Next::Job(at, Input::Fact(observed("host_awaited", Weight::Warning, detail))));
        }
        self.open_if_all_here(at, next);
    }

    fn open_if_all_here(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        if !matches!(self.phase, Phase::Waiting { .. }) || self.awaits(|host| !host.here) {
            return;
        }
        if self.grow(at, next) || self.seat_hosts(at, next) {
            return;
        }
        self.open(next);
    }

    fn open(&mut self, next: &mut VecDeque<Next>) {
        self.phase = Phase::Opening;
        next.push_back(Next::Command(0, Command::Open { attempt: self.attempt }));
    }

    fn opened(&mut self, at: Mono, seat: u32, port: Result<u16, String>, next: &mut VecDeque<Next>) {
        match port {
            Ok(port) if self.peers().is_empty() => self.start(port, None, next),
            Ok(port) => self.gather(at, port, next),
            Err(error) => {
                let named = self.host(seat).map(|host| host.named()).unwrap_or_default();
                self.fail(at, format!("{named}: {error}"), next);
            }
        }
    }

    fn start(&mut self, port: u16, resume: Option<StepKey>, next: &mut VecDeque<Next>) {
        self.phase = Phase::Starting { port };
        self.copies = Vec::new();
        let first = self.host(0).map(|host| host.seated.member.address.clone());
        let start = Command::Start {
            attempt: self.attempt,
            in_process: self.in_process,
            master_addr: first.unwrap_or_default(),
            master_port: port,
            resume,
            before: self.ran.filter(|before| *before != self.world()),
        };
        self.to_all(&start, next);
    }

    fn fact(&mut self, at: Mono, seat: u32, fact: Fact, next: &mut VecDeque<Next>) {
        let current = self.attempt;
        match fact {
            Fact::AttemptStarted { attempt, ranks, .. } if attempt == current => {
                let Some(host) = self.host(seat) else { return };
                host.started = Some(ranks);
                self.started_if_all_have(at, next);
            }
            Fact::StartFailed { attempt, error } if attempt == current => {
                if matches!(self.phase, Phase::Starting { .. }) {
                    let named = self.host(seat).map(|host| host.named()).unwrap_or_default();
                    self.abandon(format!("{named}: {error}"), next);
                }
            }
            Fact::AttemptEnded { attempt, orphans_killed, waiting } if attempt == current => {
                let Some(host) = self.host(seat) else { return };
                host.ended = Some((orphans_killed, waiting));
                self.end_if_over(at, next);
            }
            Fact::EvidenceTaken { attempt, file, groups, waits, summary, took } if attempt == current => {
                let Some(host) = self.host(seat) else { return };
                host.evidence = Some(Evidence { file, groups, waits, summary, took });
                self.evidence_if_complete(at, next);
            }
            Fact::RanksHung { attempt, ref hang, .. } if attempt == current && hang.phase == ACTIVITY => {
                // Ranks without heartbeats are judged by what their processes do, each host by itself: those that wait for
                // another host do nothing.
                if let Some(host) = self.host(seat) {
                    host.idle = true;
                }
                if self.hosts.iter().all(|host| host.idle || !host.here) {
                    self.pass(at, seat, Input::Fact(fact), next);
                }
            }
            Fact::HangPassed { attempt, .. } if attempt == current => {
                if let Some(host) = self.host(seat) {
                    host.idle = false;
                }
                self.collecting = false;
                self.pass(at, seat, Input::Fact(fact), next);
            }
            Fact::StopRequested { .. } => {
                if matches!(self.phase, Phase::Waiting { .. }) {
                    // The job waits for a start that may never come.
                    let missing = self.missing();
                    self.fail(at, format!("asked to stop while {missing} was missing"), next);
                }
                if matches!(self.phase, Phase::Arranged | Phase::Seating { .. }) {
                    self.fail(at, "asked to stop while hosts got other ranks".to_owned(), next);
                }
                if matches!(self.phase, Phase::Gathering { .. } | Phase::Bringing { .. }) {
                    self.fail(at, "asked to stop while checkpoints were restored".to_owned(), next);
                }
                next.push_back(Next::Job(at, Input::Fact(fact)));
            }
            Fact::RankExited { attempt, rank, .. } if attempt == current => {
                if let Some(host) = self.host(seat) {
                    host.exited.insert(rank);
                }
                self.pass(at, seat, Input::Fact(fact), next);
            }
            fact => self.pass(at, seat, Input::Fact(fact), next),
        }
    }

    /// Passes on what is about ranks, in a start when all hosts have started.
    fn pass(&mut self, at: Mono, seat: u32, input: Input, next: &mut VecDeque<Next>) {
        if !self.of_the_attempt(&input) || matches!(self.phase, Phase::Started | Phase::Idle) {
            return next.push_back(Next::Job(at, input));
        }
        let Some(host) = self.host(seat) else { return };
        if host.held.len() < HELD {
            host.held.push_back((at, input));
        } else {
            self.dropped += 1;
        }
    }

    fn of_the_attempt(&self, input: &Input) -> bool {
        let attempt = match input {
            Input::Steps { attempt, .. } | Input::Role { attempt, .. } => Some(*attempt),
            Input::Fact(fact) => of_ranks(fact),
            _ => None,
        };
        attempt == Some(self.attempt)
    }

    /// A host is lost while ranks start. That is no failed start, which would fail again: it is the loss of a host on which they
    /// run, wherever they have got to.
    fn count_as_started(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        for host in self.hosts.iter_mut().filter(|host| host.started.is_none()) {
            host.started = Some(host.unseen());
        }
        self.started_if_all_have(at, next);
    }

    fn started_if_all_have(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        let Phase::Starting { port } = self.phase else { return };
        if self.awaits(|host| host.started.is_none()) {
            return;
        }
        let mut ranks: Vec<StartedRank> =
            self.hosts.iter().flat_map(|host| host.started.iter().flatten().cloned()).collect();
        ranks.sort_by_key(|started| started.rank);
        self.phase = Phase::Started;
        (self.started_at, self.ran) = (Some(at), Some(self.world()));
        let attempt = self.attempt;
        let started = Fact::AttemptStarted { attempt, master_port: port, ranks };
        next.push_back(Next::Job(at, Input::Fact(started)));
        for host in &mut self.hosts {
            next.extend(host.held.drain(..).map(|(at, input)| Next::Job(at, input)));
        }
    }

    /// The attempt does not come about: what was started is stopped again, then the job is told.
    fn abandon(&mut self, error: String, next: &mut VecDeque<Next>) {
        self.phase = Phase::Abandoning { error };
        self.ending = true;
        self.forget_ends();
        self.to_all(
            &Command::Stop { attempt: self.attempt, why: StopWhy::Dismissed, save_after: None },
            next,
        );
    }

    fn fail(&mut self, at: Mono, error: String, next: &mut VecDeque<Next>) {
        self.phase = Phase::Idle;
        for host in &mut self.hosts {
            host.held.clear();
        }
        let attempt = self.attempt;
        next.push_back(Next::Job(at, Input::Fact(Fact::StartFailed { attempt, error })));
    }

    fn end_if_over(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        if !self.ending || self.awaits(|host| host.ended.is_none()) {
            return;
        }
        self.ending = false;
        match &self.phase {
            Phase::Abandoning { error } => {
                let error = error.clone();
                self.fail(at, error, next);
            }
            Phase::Started | Phase::Idle => {
                let ends = || self.hosts.iter().filter_map(|host| host.ended.as_ref());
                let orphans_killed = ends().map(|(orphans, _)| *orphans).fold(0, u32::saturating_add);
                let mut waiting: Vec<Rank> =
                    ends().flat_map(|(_, waiting)| waiting.iter().copied()).collect();
                waiting.sort_unstable();
                let attempt = self.attempt;
                let ended = Fact::AttemptEnded { attempt, orphans_killed, waiting };
                next.push_back(Next::Job(at, Input::Fact(ended)));
            }
            Phase::Waiting { .. }
            | Phase::Arranged
            | Phase::Seating { .. }
            | Phase::Opening
            | Phase::Gathering { .. }
            | Phase::Bringing { .. }
            | Phase::Starting { .. } => {}
        }
    }

    fn evidence_if_complete(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        if !self.collecting || self.awaits(|host| host.here && host.evidence.is_none()) {
            return;
        }
        self.collecting = false;
        let mut all = Evidence::default();
        for host in &mut self.hosts {
            let named = host.named();
            let Some(Evidence { file, groups, waits, summary, took }) = host.evidence.take() else {
                continue;
            };
            all.file = all.file.or_else(|| file.clone());
            all.summary.extend(file.map(|file| format!("{named}: {file}")));
            all.groups.extend(groups);
            all.waits.extend(waits);
            all.summary.extend(summary);
            all.took = all.took.max(took);
        }
        let Evidence { file, groups, waits, summary, took } = all;
        let of_group =
            |group: PlaceGroup| group.ranks.into_iter().map(move |rank| (rank, group.place.clone()));
        let groups = fold(groups.into_iter().flat_map(of_group));
        let attempt = self.attempt;
        let taken = Fact::EvidenceTaken { attempt, file, groups, waits, summary, took };
        next.push_back(Next::Job(at, Input::Fact(taken)));
    }

    /// Ends that were reported count no more; lost hosts have ended for good.
    fn forget_ends(&mut self) {
        for host in &mut self.hosts {
            host.ended = (!host.here).then(|| (0, Vec::new()));
        }
    }

    fn exits_of(&mut self, seat: u32, attempt: Attempt, after_stop: bool) -> Vec<Fact> {
        let Some(host) = self.host(seat) else { return Vec::new() };
        let exit = |(rank, pid)| Fact::RankExited {
            attempt,
            rank,
            pid,
            status: KILLED,
            step: None,
            data: None,
            after_stop,
            stderr_tail: Vec::new(),
            stdout_tail: Vec::new(),
            stderr_times: Vec::new(),
            stdout_times: Vec::new(),
        };
        host.running().map(exit).collect()
    }

    fn to_all(&self, command: &Command, next: &mut VecDeque<Next>) {
        let here = self.hosts.iter().filter(|host| host.here);
        next.extend(here.map(|host| Next::Command(host.seated.seat.group_rank, command.clone())));
    }

    fn missing(&self) -> String {
        let missing = self.hosts.iter().filter(|host| !host.here).map(Host::named);
        missing.collect::<Vec<_>>().join(" and ")
    }

    /// Whether there is such a host, looked for where one was found last: all answers to a command together look at each host
    /// a few times, and not each answer at all hosts.
    fn awaits(&mut self, is_awaited: impl Fn(&Host) -> bool) -> bool {
        let hosts = self.hosts.iter().enumerate();
        let found = hosts.clone().skip(self.awaited).find(|(_, host)| is_awaited(host));
        let found = found.or_else(|| hosts.take(self.awaited).find(|(_, host)| is_awaited(host)));
        self.awaited = found.map_or(0, |(seat, _)| seat);
        found.is_some()
    }

    fn host(&mut self, seat: u32) -> Option<&mut Host> {
        self.hosts.get_mut(seat as usize)
    }

    fn seat_of(&self, rank: Rank) -> Option<u32> {
        let holds = |host: &&Host| {
            let Seated { member, seat } = &host.seated;
            (seat.first_rank..seat.first_rank + member.ranks).contains(&rank.0)
        };
        self.hosts.iter().find(holds).map(|host| host.seated.seat.group_rank)
    }
}

impl Host {
    fn new(seated: Seated) -> Host {
        Host {
            seated,
            here: true,
            knows: true,
            started: None,
            ended: None,
            exited: BTreeSet::new(),
            holding: None,
            brought: false,
            held: VecDeque::new(),
            evidence: None,
            idle: false,
        }
    }

    /// Ranks that were started and have not ended, in order.
    fn running(&self) -> impl Iterator<Item = (Rank, Pid)> {
        let pids: BTreeMap<Rank, Pid> =
            self.started.iter().flatten().map(|started| (started.rank, started.pid)).collect();
        pids.into_iter().filter(|(rank, _)| !self.exited.contains(rank))
    }

    /// Its ranks, of whose processes nothing is known.
    fn unseen(&self) -> Vec<StartedRank> {
        let first = self.seated.seat.first_rank;
        let started =
            |rank| StartedRank { rank: Rank(rank), local_rank: rank - first, pid: Pid(0), page: None };
        (first..first + self.seated.member.ranks).map(started).collect()
    }

    /// For people: "host b (node rank 1, ranks 2 to 3)".
    fn named(&self) -> String {
        let Seated { member, seat } = &self.seated;
        let last = seat.first_rank + member.ranks.saturating_sub(1);
        let ranks = if last == seat.first_rank {
            format!("rank {last}")
        } else {
            format!("ranks {} to {last}", seat.first_rank)
        };
        format!("host {} (node rank {}, {ranks})", member.host, seat.group_rank)
    }
}

/// The attempt of a fact about ranks that the job only understands when it knows them.
fn of_ranks(fact: &Fact) -> Option<Attempt> {
    match fact {
        Fact::RankConnected { attempt, .. }
        | Fact::RankRefused { attempt, .. }
        | Fact::RankRaised { attempt, .. }
        | Fact::RankEnding { attempt, .. }
        | Fact::RankExited { attempt, .. }
        | Fact::HostLost { attempt, .. }
        | Fact::RanksHung { attempt, .. }
        | Fact::HangPassed { attempt, .. } => Some(*attempt),
        _ => None,
    }
}

fn observed(event: &str, weight: Weight, detail: String) -> Fact {
    Fact::Observed(Observation {
        component: HOSTS.to_owned(),
        event: event.to_owned(),
        weight,
        detail,
        ..Observation::default()
    })
}

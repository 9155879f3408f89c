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
mod host;
mod reports;
mod starting;
mod world;

pub use checkpoints::{COPIES_AMONG, SUMMED_WITHIN};

use std::collections::{BTreeSet, VecDeque};
use std::ops::RangeInclusive;

use crate::base::id::{Attempt, Rank};
use crate::base::time::{Mono, Span};
use crate::checkpoint::inventory::{Copy, StepKey};
use crate::model::entry::{ExitStatus, Fact, StartedRank};
use crate::model::observation::{Observation, Weight};
use crate::recovery::job::{Input, Order};

use host::Host;
pub use world::WORLD_GROWS;

use super::resize::{Arranged, Limits};
use super::round::{Member, Seated};
use super::wire::Command;

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
    reported_waiting: usize,
    /// Whether an end of the attempt is awaited.
    ending: bool,
    /// Whether evidence is awaited.
    collecting: bool,
    /// The host that was found to be waited for last.
    awaited: usize,
    dropped: u64,
    /// What hosts hold of checkpoints in this start, a list of each: together they are 100 MB in a large job.
    copies: Vec<Vec<Copy>>,
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
            reported_waiting: 0,
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
        // That the host of the leader before is lost comes next.
        merge.phase = if running { Phase::Started } else { Phase::Starting { port: 0 } };
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
        if matches!(self.phase, Phase::Starting { .. }) {
            let error = "the leader was replaced before it was known that all ranks had started";
            self.abandon(error.to_owned(), next);
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

fn observed(event: &str, weight: Weight, detail: String) -> Fact {
    Fact::Observed(Observation {
        component: HOSTS.to_owned(),
        event: event.to_owned(),
        weight,
        detail,
        ..Observation::default()
    })
}

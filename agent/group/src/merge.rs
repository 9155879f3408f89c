//! The leader's view of all hosts: their events are combined for the one [`Job`](mainstay_recovery::job::Job), and its
//! commands go to the hosts.
//!
//! ```text
//!        Start                     all seats are taken          port reserved            all hosts have started
//!  ─────────────────────► Waiting ────────────────────► Opening ─────────────► Starting ───────────────────────► Started
//!                            ▲        a host is lost       │                      │
//!                            └─────────────────────────────┘                      │ one cannot start
//!                                            all hosts have ended their part      ▼
//!                         StartFailed ◄──────────────────────────────────── Abandoning
//! ```
//!
//! If launchers store copies of checkpoints for each other, two phases are between Opening and Starting. In Gathering
//! hosts report what they hold. In Bringing each host gets its shards of the newest step that is whole over all of
//! them. If a host cannot get them, the next older whole step is brought. A host that is lost meanwhile leads back to
//! Waiting.
//!
//! If hosts change (`merge/world.rs`), because their number may or because one is avoided, Waiting leads to Arranged, in
//! which the leader stores the changed seats, and to Seating, in which hosts take them, before Opening.
//!
//! The job gets one `AttemptStarted` when every host has started its ranks and one `AttemptEnded` when every host has
//! ended its part. Reports about ranks before that are held back until then. A lost host counts as the exit of its
//! ranks.
//!
//! Total: a report that does not fit the state changes nothing. Messages of an earlier attempt are only recorded.

mod checkpoints;
mod host;
mod world;

pub use checkpoints::{COPIES_AMONG, SUMMED_WITHIN};

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use mainstay_checkpoint::inventory::{Copy, StepKey};
use mainstay_hang::{ACTIVITY, PlaceGroup, Waits, fold};
use mainstay_model::entry::{ExitStatus, Fact, HostLoss, HostOfRanks, StartedRank};
use mainstay_model::id::{Attempt, Incident, Rank};
use mainstay_model::observation::HostsEvent;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::Verdict;
use mainstay_recovery::protocol::{Command, Event, StopWhy};

use host::Host;

use super::resize::{Arranged, Limits};
use super::round::{Member, Seated};

/// SIGKILL: like killed processes, those of a lost host leave nothing behind.
const KILLED: ExitStatus = ExitStatus::Signal(9);

/// The most inputs of one host that are held back. More are dropped and counted.
const HELD: usize = 4096;

/// An action to do next, in order.
#[derive(Clone, Debug)]
pub enum Next {
    /// An event for the job.
    Job(Mono, Event),
    /// A command for the host at this seat.
    Command(u32, Command),
    /// Hosts have other seats from now on: seat numbers in later commands are those of [`Merge::seats`] now. Once
    /// that is stored, [`Merge::arranged`] continues.
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
    /// How long a start waits for a lost host.
    patience: Span,
    /// The limits for the number of hosts; the launcher that leads; and the launchers that wait for a seat.
    limits: Limits,
    leader: String,
    waiting: Vec<Member>,
    /// The number of ranks of the last attempt that ran.
    ran: Option<u32>,
    /// Whether the seats still have to be stored.
    unstored: bool,
    /// When the ranks last started, and when they were last asked to stop so that more hosts can take part.
    started_at: Option<Mono>,
    grow_asked: Option<Mono>,
    keeps_world: bool,
    /// The number of waiting hosts for which the reason was last reported.
    reported_waiting: usize,
    /// Whether a host was already avoided in this start, and the last failure that implicated one.
    has_avoided: bool,
    last_implicating: Incident,
    /// Whether the end of the attempt is awaited.
    ending: bool,
    /// Whether evidence is awaited.
    collecting: bool,
    /// The host last found to be awaited.
    awaited: usize,
    dropped: u64,
    /// What each host holds of checkpoints in this start. All lists together are 100 MB in a large job.
    copies: Vec<Vec<Copy>>,
    /// Steps that could not be brought to a host in this start.
    failed_steps: BTreeSet<StepKey>,
    /// Whether the newest step of another number of ranks was already considered in this start.
    other_world_done: bool,
}

/// The evidence that hosts have collected.
#[derive(Clone, Debug, Default)]
struct Evidence {
    file: Option<String>,
    groups: Vec<PlaceGroup>,
    waits: Vec<Waits>,
    summary: Vec<String>,
    took: Span,
}

impl Merge {
    /// All hosts of a round are present; nothing runs. The port of the ranks' store is reserved on the first seat's
    /// host.
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
            has_avoided: false,
            last_implicating: Incident(0),
            ending: false,
            collecting: false,
            awaited: 0,
            dropped: 0,
            copies: Vec::new(),
            failed_steps: BTreeSet::new(),
            other_world_done: false,
        }
    }

    /// The state that another leader left, by its record: all hosts of its round, and an attempt that runs or may not
    /// have started everywhere. Hosts report again what they have seen of it.
    pub fn resume(round: Vec<Seated>, patience: Span, attempt: Attempt, running: bool) -> Merge {
        let mut merge = Merge::new(round, patience);
        merge.attempt = attempt;
        // Another leader may have stored seats that hosts have not received.
        merge.hosts.iter_mut().for_each(|host| host.knows = !host.seated.member.moves);
        // The loss of the former leader's host follows.
        merge.phase = if running { Phase::Started } else { Phase::Starting { port: 0 } };
        merge.ran = running.then(|| merge.world());
        for host in merge.hosts.iter_mut().filter(|_| running) {
            host.started = Some(host.unseen());
        }
        merge
    }

    /// The ranks of the attempt, as far as known.
    pub fn ranks(&self) -> Vec<StartedRank> {
        self.hosts.iter().flat_map(|host| host.started.iter().flatten().cloned()).collect()
    }

    /// Stops a start that the former leader did not complete, on all hosts that are present.
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

    /// The hosts with their ranks, in the order of their node ranks; empty if there is only one.
    pub fn hosts_of_ranks(&self) -> Vec<HostOfRanks> {
        let several = self.hosts.iter().filter(|_| self.hosts.len() > 1);
        let host_of_ranks = |host: &Host| {
            let Seated { member, seat } = &host.seated;
            let (node_rank, first_rank) = (seat.group_rank, Rank(seat.first_rank));
            HostOfRanks { host: member.host.clone(), node_rank, first_rank, ranks: member.ranks }
        };
        several.map(host_of_ranks).collect()
    }

    /// Whether no host is currently ordered to stop or start ranks.
    pub fn is_settled(&self) -> bool {
        !self.ending && matches!(self.phase, Phase::Idle | Phase::Started)
    }

    /// The members with their seats, including lost hosts.
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

    /// The hosts that a start waits for. `None` if it does not wait.
    pub fn waits_for(&self) -> Option<Vec<String>> {
        let waits = matches!(self.phase, Phase::Waiting { .. });
        waits.then(|| self.hosts.iter().filter(|host| !host.here).map(|host| host.named()).collect())
    }

    /// Counts a failure that implicates the host of its culprit, once, also if it is judged again.
    pub fn judged(&mut self, verdict: &Verdict) {
        if !verdict.implicates_host() || verdict.incident <= self.last_implicating {
            return;
        }
        self.last_implicating = verdict.incident;
        let seat = verdict.culprit.and_then(|culprit| self.seat_of(culprit));
        // Late evidence may arrive when another host has the rank.
        let is_it =
            |host: &&mut Host| verdict.host.as_ref().is_none_or(|name| *name == host.seated.member.host);
        if let Some(host) = seat.and_then(|seat| self.host(seat)).filter(is_it) {
            host.seated.member.implicated = host.seated.member.implicated.saturating_add(1);
        }
    }

    /// The number of reports about ranks that were dropped because too many were held back.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Carries out a command of the job.
    pub fn order(&mut self, at: Mono, command: Command, next: &mut VecDeque<Next>) {
        match command {
            Command::Start { attempt, in_process, .. } => self.begin(at, attempt, in_process, next),
            Command::Stop { .. } => {
                self.ending = true;
                self.forget_ends();
                self.to_all(&command, next);
                self.end_if_over(at, next);
            }
            Command::EndRank { rank, .. } => {
                self.ending = true;
                let seat = self.seat_of(rank);
                let Some(host) = seat.and_then(|seat| self.host(seat)).filter(|host| host.here) else {
                    return self.end_if_over(at, next);
                };
                host.ended = None;
                next.extend(seat.map(|seat| Next::Command(seat, command)));
            }
            Command::TakeEvidence { .. } => {
                self.collecting = true;
                self.hosts.iter_mut().for_each(|host| host.evidence = None);
                self.to_all(&command, next);
            }
            command => self.to_all(&command, next),
        }
    }

    /// Something happened on the host at this seat.
    pub fn step(&mut self, at: Mono, seat: u32, event: Event, next: &mut VecDeque<Next>) {
        match event {
            Event::Opened { attempt, port } if attempt == self.attempt && self.phase == Phase::Opening => {
                self.opened(at, seat, port, next);
            }
            Event::Holding { attempt, copies } if attempt == self.attempt => {
                self.holds(at, seat, copies, next);
            }
            Event::Brought { attempt, step, error } if attempt == self.attempt => {
                self.brought(at, seat, &step, error, next);
            }
            Event::Seated { attempt, seat: has } if attempt == self.attempt => {
                self.has_seat(seat, &has, next);
            }
            Event::Opened { .. }
            | Event::Seated { .. }
            | Event::Holding { .. }
            | Event::Brought { .. }
            | Event::Looked { .. } => {}
            Event::Fact(fact) => self.fact(at, seat, fact, next),
            event => self.pass(at, seat, event, next),
        }
    }

    fn fact(&mut self, at: Mono, seat: u32, fact: Fact, next: &mut VecDeque<Next>) {
        let current = self.attempt;
        match fact {
            Fact::AttemptStarted { attempt, ranks, .. } if attempt == current => {
                let Some(host) = self.host(seat) else { return };
                host.started = Some(ranks);
                self.started_if_all_have(at, next);
            }
            Fact::StartFailed { attempt, error, .. } if attempt == current => {
                if matches!(self.phase, Phase::Starting { .. }) {
                    let error = self.on_host(seat, error);
                    match self.hosts.len() {
                        // No other host has started ranks.
                        1 => self.fail(at, error, next),
                        _ => self.abandon(error, next),
                    }
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
                // Each host judges ranks without heartbeats itself, by the activity of their processes: ranks that
                // wait for another host do nothing.
                if let Some(host) = self.host(seat) {
                    host.idle = true;
                }
                if self.hosts.iter().all(|host| host.idle || !host.here) {
                    self.pass(at, seat, Event::Fact(fact), next);
                }
            }
            Fact::HangPassed { attempt, .. } if attempt == current => {
                if let Some(host) = self.host(seat) {
                    host.idle = false;
                }
                self.collecting = false;
                self.pass(at, seat, Event::Fact(fact), next);
            }
            Fact::StopRequested { .. } => {
                if matches!(self.phase, Phase::Waiting { .. }) {
                    // The job waits for a start that may never happen.
                    let missing = self.missing();
                    self.fail(at, format!("asked to stop while {missing} was missing"), next);
                }
                if matches!(self.phase, Phase::Arranged | Phase::Seating { .. }) {
                    self.fail(at, "asked to stop while hosts got other ranks".to_owned(), next);
                }
                if matches!(self.phase, Phase::Gathering { .. } | Phase::Bringing { .. }) {
                    self.fail(at, "asked to stop while checkpoints were restored".to_owned(), next);
                }
                next.push_back(Next::Job(at, Event::Fact(fact)));
            }
            Fact::RankExited { attempt, rank, .. } if attempt == current => {
                if let Some(host) = self.host(seat) {
                    host.exited.insert(rank);
                }
                self.pass(at, seat, Event::Fact(fact), next);
            }
            fact => self.pass(at, seat, Event::Fact(fact), next),
        }
    }

    /// Sentences with the name of the host after each address of one.
    fn with_host_names(&self, sentences: Vec<String>) -> Vec<String> {
        let members = self.hosts.iter().map(|host| &host.seated.member);
        let hosts: BTreeMap<&str, &str> = members.map(|member| (&*member.address, &*member.host)).collect();
        let named = |word: &str| match hosts.get(word).filter(|_| !word.is_empty()) {
            Some(host) => format!("{word} (host {host})"),
            None => word.to_owned(),
        };
        let sentence = |line: String| line.split(' ').map(named).collect::<Vec<_>>().join(" ");
        sentences.into_iter().map(sentence).collect()
    }

    /// Passes on events about ranks; during a start only after all hosts have started.
    fn pass(&mut self, at: Mono, seat: u32, event: Event, next: &mut VecDeque<Next>) {
        if !self.is_of_attempt(&event) || matches!(self.phase, Phase::Started | Phase::Idle) {
            return next.push_back(Next::Job(at, event));
        }
        let Some(host) = self.host(seat) else { return };
        if host.held.len() < HELD {
            host.held.push_back((at, event));
        } else {
            self.dropped += 1;
        }
    }

    fn is_of_attempt(&self, event: &Event) -> bool {
        let attempt = match event {
            Event::Steps { attempt, .. } | Event::Role { attempt, .. } => Some(*attempt),
            Event::Fact(fact) => attempt_of(fact),
            _ => None,
        };
        attempt == Some(self.attempt)
    }

    fn evidence_if_complete(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        if !self.collecting || self.awaits(|host| host.here && host.evidence.is_none()) {
            return;
        }
        self.collecting = false;
        let mut all = Evidence::default();
        let several = self.hosts.len() > 1;
        for host in &mut self.hosts {
            let named = host.named();
            let Some(Evidence { file, groups, waits, summary, took }) = host.evidence.take() else {
                continue;
            };
            all.file = all.file.or_else(|| file.clone());
            all.summary.extend(file.filter(|_| several).map(|file| format!("{named}: {file}")));
            all.groups.extend(groups);
            all.waits.extend(waits);
            all.summary.extend(summary);
            all.took = all.took.max(took);
        }
        let Evidence { file, groups, waits, summary, took } = all;
        let summary = self.with_host_names(summary);
        let of_group =
            |group: PlaceGroup| group.ranks.into_iter().map(move |rank| (rank, group.place.clone()));
        let groups = fold(groups.into_iter().flat_map(of_group));
        let attempt = self.attempt;
        let taken = Fact::EvidenceTaken { attempt, file, groups, waits, summary, took };
        next.push_back(Next::Job(at, Event::Fact(taken)));
    }

    /// The host at this seat is lost, with all that ran on it.
    pub fn lost(&mut self, at: Mono, seat: u32, (loss, how): (HostLoss, &str), next: &mut VecDeque<Next>) {
        let attempt = self.attempt;
        if self.host(seat).is_none_or(|host| !host.here) {
            return;
        }
        if matches!(self.phase, Phase::Starting { .. }) {
            self.count_as_started(at, next);
        }
        let phase = self.phase.clone();
        let Some(host) = self.host(seat) else { return };
        (host.here, host.lost) = (false, how.to_owned());
        let (named, started) = (host.named(), phase == Phase::Started);
        let lost = Fact::HostLost {
            attempt,
            host: host.seated.member.host.clone(),
            node_rank: host.seated.seat.group_rank,
            ranks: if started { host.running().map(|(rank, _)| rank).collect() } else { Vec::new() },
            named,
            loss,
            how: how.to_owned(),
        };
        next.push_back(Next::Job(at, Event::Fact(lost)));
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
                    next.push_back(Next::Job(at, Event::Fact(exit)));
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
        (host.here, host.lost) = (true, String::new());
        let detail = format!("{} has joined", host.named());
        next.push_back(Next::Job(at, observed(HostsEvent::HostJoined, detail, &[])));
        self.open_if_all_here(at, next);
    }

    /// A start on all hosts, from its order until all ranks run or it has failed.
    fn begin(&mut self, at: Mono, attempt: Attempt, in_process: bool, next: &mut VecDeque<Next>) {
        (self.attempt, self.in_process) = (attempt, in_process);
        (self.ending, self.collecting) = (false, false);
        self.failed_steps.clear();
        (self.other_world_done, self.has_avoided) = (false, false);
        for host in &mut self.hosts {
            (host.started, host.ended, host.evidence, host.idle) = (None, None, None, false);
            host.exited.clear();
            host.held.clear();
        }
        self.phase = Phase::Waiting { since: at };
        if self.hosts.iter().any(|host| !host.here) {
            let (detail, keeps_world) = self.awaited();
            let values = [("keeps_world", keeps_world.to_string())];
            next.push_back(Next::Job(at, observed(HostsEvent::HostAwaited, detail, &values)));
        }
        self.open_if_all_here(at, next);
    }

    fn open_if_all_here(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        if !matches!(self.phase, Phase::Waiting { .. }) || self.awaits(|host| !host.here) {
            return;
        }
        if self.grow(at, next) || self.avoid(at, next) || self.seat_hosts(at, next) {
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
                let error = self.on_host(seat, error);
                self.fail(at, error, next);
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

    /// A host was lost while ranks start. That is not a failed start, which would fail again. It counts as the loss
    /// of a host with running ranks, however far they have got.
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
        let hosts = self.hosts_of_ranks();
        let started = Fact::AttemptStarted { attempt, master_port: port, ranks, hosts };
        next.push_back(Next::Job(at, Event::Fact(started)));
        for host in &mut self.hosts {
            // Moves the buffer too: it is 2 KB for each host.
            let held = std::mem::take(&mut host.held);
            next.extend(held.into_iter().map(|(at, event)| Next::Job(at, event)));
        }
    }

    /// Abandons the attempt: what was started is stopped again, then it is reported to the job.
    fn abandon(&mut self, error: String, next: &mut VecDeque<Next>) {
        self.phase = Phase::Abandoning { error };
        self.ending = true;
        self.forget_ends();
        self.to_all(&Command::stop(self.attempt, StopWhy::Dismissed), next);
    }

    /// The error with its host, if there are several.
    fn on_host(&mut self, seat: u32, error: String) -> String {
        let named = self.host(seat).map(|host| host.named()).unwrap_or_default();
        if self.hosts.len() > 1 { format!("{named}: {error}") } else { error }
    }

    fn fail(&mut self, at: Mono, error: String, next: &mut VecDeque<Next>) {
        self.not_started(at, error, Vec::new(), next);
    }

    /// No host took the place of lost ones in time.
    fn fail_without(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        let lost = || self.hosts.iter().filter(|host| !host.here);
        let is_one = lost().count() == 1;
        let how = lost().filter(|host| !host.lost.is_empty()).map(|host| match is_one {
            true => format!("; it was lost: {}", host.lost),
            false => format!("; {} was lost: {}", host.named(), host.lost),
        });
        let error = format!(
            "{} did not come back within {}, and no other host took {} place{}",
            self.missing(),
            self.patience,
            if is_one { "its" } else { "their" },
            how.collect::<String>()
        );
        let missing = lost().map(|host| host.seated.member.host.clone()).collect();
        self.not_started(at, error, missing, next);
    }

    fn not_started(&mut self, at: Mono, error: String, missing: Vec<String>, next: &mut VecDeque<Next>) {
        self.phase = Phase::Idle;
        for host in &mut self.hosts {
            host.held.clear();
        }
        let attempt = self.attempt;
        next.push_back(Next::Job(at, Event::Fact(Fact::StartFailed { attempt, error, missing })));
    }

    /// A start that waits too long for a lost host fails. Checkpoints of a host that does not answer are not waited
    /// for.
    pub fn look(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        self.look_at_world(at, next);
        if let Phase::Waiting { since } = self.phase
            && at.since(since) >= self.patience
        {
            self.fail_without(at, next);
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
                next.push_back(Next::Job(at, Event::Fact(ended)));
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

    /// Forgets reported ends; lost hosts have ended for good.
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

    /// Whether the condition holds for any host. The search starts where one was found last: all answers to a command
    /// together visit each host a few times, instead of every host for each answer.
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

/// The attempt of a fact about ranks that the job understands only when it knows them.
fn attempt_of(fact: &Fact) -> Option<Attempt> {
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

fn observed(event: HostsEvent, detail: String, values: &[(&str, String)]) -> Event {
    Event::Fact(Fact::Observed(event.observed(detail, values)))
}

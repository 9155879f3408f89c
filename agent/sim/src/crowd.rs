//! The leader of a large job and the messages of all its followers: the core's own code of the leader, with followers
//! that answer as real ones do. Time is simulated, but the processor time of the leader is measured and included: a
//! message is handled after the one before.
//!
//! Each message is decoded from the bytes of a connection and encoded into bytes. System calls and the encryption of
//! connections are not included.

mod delivery;
mod follower;
mod messages;

use std::collections::BTreeMap;

use mainstay_group::lead::{Act, Expected, Here, Lead, LeaderSettings};
use mainstay_group::merge::Merge;
use mainstay_group::round::{Member, first};
use mainstay_group::wire::{Join, Up};
use mainstay_hang::{HangJudge, Limits};
use mainstay_model::entry::{Body, Entry, JobSpec};
use mainstay_model::id::{Attempt, BootId, JobId, Rank};
use mainstay_model::time::{Mono, Span, Stamp, Wall};
use mainstay_recovery::job::Job;
use mainstay_recovery::policy::{Budget, Settings};
use mainstay_recovery::protocol::{Command, Event};

use crate::random::Random;
use follower::{Follower, FollowerReport};

/// Nanoseconds.
pub const MS: u64 = 1_000_000;
/// Nanoseconds.
pub const SECOND: u64 = 1000 * MS;

/// How often the leader checks its hosts, as the real one does.
const LOOKS_EVERY: u64 = 100 * MS;

/// How often followers send heartbeats.
const BEATS_EVERY: u64 = 500 * MS;

/// The approximate duration of a step of the largest published runs: 16 million tokens at 400 TFLOP/s per GPU (Llama
/// 3, 405B).
const STEPS_EVERY: u64 = 6 * SECOND;

/// Sections that a rank enters or leaves in a step: data, forward, backward, optimizer and the step itself.
const CHANGES: u64 = 5;

/// An unchanged state is reported again after this time.
const AGAIN_EVERY: u64 = SECOND;

/// The job and the machines that it runs on.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Hosts.
    pub hosts: u32,
    /// Ranks per host.
    pub ranks: u32,
    /// Whether launchers keep copies of checkpoints for each other.
    pub copies: bool,
    /// Bytes per second that the leader's network card sends or receives.
    pub bytes_per_second: f64,
    /// The latency of a message between two hosts without queueing, in nanoseconds.
    pub latency: u64,
    /// The time that the store takes for a write, in nanoseconds.
    pub store: u64,
    /// The time that the agent takes to diagnose a failure, in nanoseconds.
    pub agent: u64,
    /// The time that a host takes for a command without its ranks' part, in nanoseconds.
    pub host: u64,
    /// Reads the processor time used so far, in nanoseconds.
    pub processor: fn() -> u64,
}

/// Counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Processor time of the leader, nanoseconds.
    pub processor: u64,
    /// Messages that the leader received, and their bytes.
    pub received: (u64, u64),
    /// Messages that the leader sent, and their bytes.
    pub sent: (u64, u64),
    /// Entries of the leader's journal, and their bytes.
    pub entries: (u64, u64),
    /// Records that the leader had stored, and their bytes.
    pub records: (u64, u64),
    /// The longest message, in bytes.
    pub longest: u64,
}

enum Happening {
    Beat(usize),
    Step(usize),
    Change(usize),
    Again(usize),
    Look,
    Up(usize, Vec<u8>),
    Deliver(usize, FollowerReport),
    Mine(FollowerReport),
    Answered(usize, FollowerReport),
    Stored(u64),
    Ruled,
    Wake,
}

/// The leader with its followers.
pub struct Crowd {
    plan: Plan,
    lead: Lead,
    hangs: HangJudge,
    followers: Vec<Follower>,
    random: Random,
    events: BTreeMap<(u64, u64), Happening>,
    numbers: u64,
    now: u64,
    /// The time that a read of the processor time takes, in nanoseconds, and the number of reads since the leader
    /// started its work.
    clock: (u64, u64),
    /// The times until which the leader and its network card in each direction are busy.
    busy: u64,
    sends: u64,
    receives: u64,
    /// Whether ranks train.
    trains: bool,
    seq: u64,
    buffer: Vec<u8>,
    counts: Counts,
    /// The attempt, the number of seats that have its start command, and when the last of them received it.
    reported: (Attempt, u32, u64),
    /// The time at which all hosts had their start command, by attempt.
    started: BTreeMap<Attempt, u64>,
    phases: Vec<(&'static str, u64)>,
    stored: Vec<u64>,
}

impl Crowd {
    /// A job that starts now. All followers are connected.
    pub fn new(plan: Plan, seed: u64) -> Crowd {
        let members: Vec<Member> = (0..plan.hosts).map(|host| member(&plan, host)).collect();
        let round = first(&members, plan.hosts).unwrap_or_default();
        let merge = Merge::new(round, Span::seconds(600));
        let at = Mono(SECOND);
        let world_size = plan.hosts * plan.ranks;
        let spec = JobSpec { world_size, local_world_size: plan.ranks, ..JobSpec::default() };
        let mut out = Vec::new();
        let policy = Settings::from(Budget { max_restarts: 100_000, window: None });
        let job = Job::begin(at, spec, policy, &mut out);
        let leader_settings = LeaderSettings {
            seat: 0,
            launcher: launcher(0),
            names: ("job".to_owned(), "launch".to_owned()),
            expected: Expected {
                leader: Join { hosts: (plan.hosts, plan.hosts), ..Join::default() },
                mixed: true,
            },
            lease: Span::seconds(10),
            looks_every: Span(LOOKS_EVERY),
            epoch: 1,
            newest_record: 1,
            has_store: true,
        };
        let mut hangs = HangJudge::new(Limits::default(), true, Rank(0), plan.ranks as usize, at);
        let of_each = |host| std::iter::repeat_n(host, plan.ranks as usize);
        hangs.judge_all((0..plan.hosts).flat_map(of_each).collect(), at);
        let mut crowd = Crowd {
            followers: (0..plan.hosts).map(|host| Follower::new(host, plan.ranks)).collect(),
            lead: Lead::new(at, job, merge, leader_settings),
            hangs,
            random: Random::new(seed),
            events: BTreeMap::new(),
            numbers: 0,
            now: at.0,
            clock: (cost_of(plan.processor), 0),
            busy: at.0,
            sends: at.0,
            receives: at.0,
            trains: false,
            seq: 0,
            buffer: Vec::new(),
            counts: Counts::default(),
            reported: (Attempt(0), 0, 0),
            started: BTreeMap::new(),
            phases: Vec::new(),
            stored: Vec::new(),
            plan,
        };
        let connections: Vec<(String, u64)> =
            (1..plan.hosts).map(|host| (launcher(host), u64::from(host))).collect();
        crowd.work(|crowd| {
            crowd.lead.gathered(&connections, Vec::new());
            crowd.lead.begin_with(at, out);
        });
        for host in 0..plan.hosts as usize {
            let first = |crowd: &mut Crowd, every: u64| crowd.now + crowd.below(every);
            let (beat, again) = (first(&mut crowd, BEATS_EVERY), first(&mut crowd, AGAIN_EVERY));
            if host > 0 {
                crowd.at(beat, Happening::Beat(host));
            }
            crowd.at(again, Happening::Again(host));
            // All ranks are at the same point of a step within some milliseconds.
            for change in 1..=CHANGES {
                let at = crowd.now + change * STEPS_EVERY / CHANGES + crowd.below(50 * MS);
                crowd.at(at, if change == CHANGES { Happening::Step(host) } else { Happening::Change(host) });
            }
        }
        let at = crowd.now;
        crowd.at(at + LOOKS_EVERY, Happening::Look);
        crowd
    }

    /// The counters so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The time at which all hosts had the command to start this attempt, in nanoseconds.
    pub fn started(&self, attempt: Attempt) -> Option<u64> {
        self.started.get(&attempt).copied()
    }

    /// The phases of the leader and their times since the last call.
    pub fn phases(&mut self) -> Vec<(&'static str, u64)> {
        std::mem::take(&mut self.phases)
    }

    /// The times at which the leader had records stored, in nanoseconds.
    pub fn stored(&self) -> &[u64] {
        &self.stored
    }

    /// The current time, in nanoseconds.
    pub fn now(&self) -> u64 {
        self.now.max(self.busy)
    }

    /// Whether all ranks run.
    pub fn runs(&self) -> bool {
        self.lead.merge().has_started()
    }

    /// Advances the time to `until`, or until `done` returns true.
    pub fn run_until(&mut self, until: u64, done: impl Fn(&Crowd) -> bool) {
        while !done(self) {
            let Some(((at, number), event)) = self.events.pop_first() else { return };
            if at > until {
                self.events.insert((at, number), event);
                self.now = until;
                return;
            }
            self.now = at;
            self.happens(event);
        }
    }

    /// Kills a rank on this host.
    pub fn kill(&mut self, host: usize) {
        self.trains = false;
        let now = self.now;
        self.phases.clear();
        self.at(now, Happening::Deliver(host, FollowerReport::Died));
    }

    fn below(&mut self, below: u64) -> u64 {
        self.random.below(usize::try_from(below).unwrap_or(usize::MAX)) as u64
    }

    fn at(&mut self, at: u64, event: Happening) {
        self.numbers += 1;
        self.events.insert((at, self.numbers), event);
    }

    fn happens(&mut self, event: Happening) {
        let now = self.now;
        match event {
            Happening::Beat(host) => {
                self.up(host, &Up::Beat { sent: Mono(now) });
                let jitter = self.below(20 * MS);
                self.at(now + BEATS_EVERY - 10 * MS + jitter, Happening::Beat(host));
            }
            Happening::Step(host) => {
                self.stepped(host);
                self.seen(host);
                let jitter = self.below(4 * MS);
                self.at(now + STEPS_EVERY - 2 * MS + jitter, Happening::Step(host));
            }
            Happening::Change(host) => {
                self.seen(host);
                let jitter = self.below(4 * MS);
                self.at(now + STEPS_EVERY - 2 * MS + jitter, Happening::Change(host));
            }
            Happening::Again(host) => {
                self.seen(host);
                self.at(now + AGAIN_EVERY, Happening::Again(host));
            }
            Happening::Look => {
                // The timer of the launcher waits while the launcher is busy.
                let next = now.max(self.busy) + LOOKS_EVERY;
                self.work(|crowd| {
                    let at = Mono(crowd.busy);
                    crowd.lead.look(at, None);
                    if crowd.trains {
                        let found = crowd.hangs.judge(at, None, &[]);
                        assert!(found.is_none(), "no rank hangs: {found:?}");
                    }
                });
                self.at(next, Happening::Look);
            }
            Happening::Up(host, bytes) => self.work(|crowd| crowd.receive(host, &bytes)),
            Happening::Deliver(0, answer) | Happening::Mine(answer) => self.mine(answer),
            Happening::Deliver(host, answer) | Happening::Answered(host, answer) => self.answer(host, answer),
            Happening::Stored(number) => self.work(|crowd| crowd.lead.stored(Mono(crowd.busy), number)),
            Happening::Ruled => self.deliver(Event::AgentEvidence(None)),
            Happening::Wake => self.deliver(Event::Wake),
        }
    }

    fn deliver(&mut self, event: Event) {
        self.work(|crowd| crowd.lead.step(Mono(crowd.busy), event));
    }

    /// Does work of the leader and what follows from it, and measures the time.
    fn work(&mut self, what: impl FnOnce(&mut Crowd)) {
        self.busy = self.busy.max(self.now);
        self.clock.1 = 0;
        let (from, began) = (self.busy, (self.plan.processor)());
        what(self);
        self.settle(from, began);
        let took = self.used_since(began);
        self.counts.processor += took;
        self.busy = from + took;
    }

    /// Processor time of the leader since then, without the reads of the clock: a read takes a large part of the time
    /// of a short message, and the real leader does not do it.
    fn used_since(&mut self, began: u64) -> u64 {
        let (cost, reads) = &mut self.clock;
        *reads += 1;
        (self.plan.processor)().saturating_sub(began).saturating_sub(*cost * *reads)
    }

    fn settle(&mut self, from: u64, began: u64) {
        let now = Mono(from);
        while let Some(act) = self.lead.poll(now, &NothingToRead) {
            match act {
                Act::Send(connection, down) => {
                    let at = from + self.used_since(began);
                    self.down(at, connection as usize, down);
                }
                Act::Record(at, body) => self.record(at, body),
                Act::Obey(Command::Consult(_)) => self.at(from + self.plan.agent, Happening::Ruled),
                Act::Obey(Command::Wake { at }) => self.at(at.0.max(from), Happening::Wake),
                Act::Obey(command) => {
                    self.starts(from, &command);
                    let at = from + self.plan.host;
                    for answer in self.followers[0].obey(&command) {
                        self.at(at, Happening::Mine(answer));
                    }
                }
                Act::Store(number, record) => {
                    let bytes = serde_json::to_vec(&record).map_or(0, |bytes| bytes.len() as u64);
                    self.counts.records = (self.counts.records.0 + 1, self.counts.records.1 + bytes);
                    self.stored.push(from);
                    let at = from + self.used_since(began) + self.plan.store;
                    self.at(at, Happening::Stored(number));
                }
                Act::Seen(_, ranks) => ranks.iter().for_each(|seen| self.hangs.seen_elsewhere(now, seen)),
                Act::Finished(..) | Act::Close(_) | Act::Print(_) | Act::Meet { .. } => {}
                Act::Campaign | Act::StepDown(_) => unreachable!("the store does not fail here"),
            }
        }
    }

    fn record(&mut self, at: Mono, body: Body) {
        self.seq += 1;
        let entry = Entry {
            seq: self.seq,
            at: Stamp { mono: at, wall: Wall(0) },
            boot: BootId("b".to_owned()),
            job: Some(JobId("job".to_owned())),
            origin_seq: None,
            body,
        };
        self.buffer.clear();
        // The entry is encoded as in the journal.
        let _ = serde_json::to_writer(&mut self.buffer, &entry);
        self.counts.entries = (self.counts.entries.0 + 1, self.counts.entries.1 + self.buffer.len() as u64);
        self.lead.keep_recent(&entry);
    }
}

/// The leader keeps more entries than a round records, so that nothing is read back from its journal.
struct NothingToRead;

impl Here for NothingToRead {
    fn save_after(&self) -> Option<u64> {
        None
    }

    fn entries_after(&self, _have: u64, _most: usize) -> Option<Vec<Entry>> {
        unreachable!("followers are further behind than the leader keeps its journal")
    }
}

/// The time that a read of this clock takes, in nanoseconds: the median, since one of many reads is interrupted.
fn cost_of(clock: fn() -> u64) -> u64 {
    let mut reads: Vec<u64> = (0..1001).map(|_| clock()).collect();
    for n in (1..reads.len()).rev() {
        reads[n] -= reads[n - 1];
    }
    reads[1..].sort_unstable();
    reads[reads.len() / 2]
}

/// The name of a launcher, as long as a real one.
pub(crate) fn launcher(host: u32) -> String {
    format!("node{host:05}-1f3c8a6e-{host:08x}")
}

fn member(plan: &Plan, host: u32) -> Member {
    let address = format!("10.{}.{}.{}", host / 65_536, host / 256 % 256, host % 256);
    Member {
        launcher: launcher(host),
        host: format!("node{host:05}"),
        node_rank: Some(host),
        ranks: plan.ranks,
        replicas: if plan.copies { format!("{address}:41234") } else { String::new() },
        listens: format!("{address}:40123"),
        leads: host == 0,
        domain: format!("rack-{}", host / 16),
        moves: true,
        prepares: true,
        implicated: 0,
        address,
    }
}

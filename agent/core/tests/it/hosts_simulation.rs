//! Several hosts under one job, simulated: the real job, merge, rounds and numbered messages over a network that delays,
//! repeats and loses, with hosts that crash and come back at any moment. Each seed can be run again:
//! `MAINSTAY_SEED=17 cargo test -p mainstay-core --test it hosts_simulation`. `MAINSTAY_SEEDS` sets how many are run.
#![allow(clippy::indexing_slicing, reason = "a panic in a test is its report")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use mainstay_core::base::id::{Attempt, Rank};
use mainstay_core::base::time::{Mono, Span};
use mainstay_core::checkpoint::inventory::{Copy, Medium, Shard, StepKey};
use mainstay_core::model::entry::{Body, ExitStatus, Fact, JobSpec};
use mainstay_core::recovery::hosts::merge::{Merge, Next};
use mainstay_core::recovery::hosts::round::{Seated, first};
use mainstay_core::recovery::hosts::sequence::{Inbox, Outbox, Received};
use mainstay_core::recovery::hosts::wire::{Command, Report, Seat};
use mainstay_core::recovery::job::{Input, Job, Order, Output, StopWhy};
use mainstay_core::recovery::policy::{Budget, Settings};

use crate::support::cluster::{Chance, exited, members, restart_of, seeds, started};

/// Seeds of a usual run of the suite: some seconds without optimisation.
const SEEDS: u64 = 10_000;

/// More steps than any run needs that ends at all.
const MOST_STEPS: u32 = 20_000;

/// The hands of one launcher: what it runs, and both directions of its stream.
struct Host {
    seated: Seated,
    /// Ranks that run or wait in their processes, with the attempt in which they run.
    living: BTreeMap<Rank, Attempt>,
    waiting: BTreeSet<Rank>,
    attempt: Option<Attempt>,
    /// The launcher's end of the stream.
    reports: Outbox<Report>,
    commands_in: Inbox,
    /// The leader's end.
    commands: Outbox<Command>,
    reports_in: Inbox,
    /// Messages under way.
    up: VecDeque<(u64, Report)>,
    down: VecDeque<(u64, Command)>,
    connected: bool,
    crashed: bool,
    finished: Option<i32>,
    /// Whether it has what its ranks have saved; one that took another's place has not.
    holds: bool,
    /// What it brought to where its ranks are.
    brought: Option<(Attempt, StepKey)>,
}

/// The step of the simulated job's checkpoints.
fn step_key(step: u64, world: u32) -> StepKey {
    StepKey { step, job: "job".to_owned(), run: "run@1".to_owned(), attempt: 0, world }
}

impl Host {
    fn new(seated: Seated) -> Host {
        Host {
            seated,
            living: BTreeMap::new(),
            waiting: BTreeSet::new(),
            attempt: None,
            reports: Outbox::new(100_000),
            commands_in: Inbox::default(),
            commands: Outbox::new(100_000),
            reports_in: Inbox::default(),
            up: VecDeque::new(),
            down: VecDeque::new(),
            connected: true,
            crashed: false,
            finished: None,
            holds: true,
            brought: None,
        }
    }

    /// Its own ranks' shards of steps 1 to 3; and on the first host a copy of each shard of step 1.
    fn copies(&self) -> Vec<Copy> {
        let Seat { world_size: world, group_rank, .. } = self.seated.seat;
        let copy = |step, rank, own| Copy {
            holder: format!("h{group_rank}:1"),
            medium: Medium::Memory,
            own,
            verified: true,
            shard: Shard {
                of: step_key(step, world),
                rank,
                root: format!("{step}.{rank}"),
                bytes: 1,
                created: 0,
                piece: None,
            },
        };
        let own =
            self.ranks().filter(|_| self.holds).flat_map(|rank| (1..4).map(move |step| (step, rank.0, true)));
        let kept = (0..world).filter(|_| group_rank == 0).map(|rank| (1, rank, false));
        own.chain(kept).map(|(step, rank, own)| copy(step, rank, own)).collect()
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let first = self.seated.seat.first_rank;
        (first..first + self.seated.member.ranks).map(Rank)
    }

    fn report(&mut self, report: Report) {
        let number = self.reports.push(report.clone()).expect("room");
        if self.connected {
            self.up.push_back((number, report));
        }
    }

    fn fact(&mut self, fact: Fact) {
        self.report(Report::Fact { fact });
    }

    fn exited(&mut self, rank: Rank, status: ExitStatus, after_stop: bool) {
        let Some(attempt) = self.living.remove(&rank) else { return };
        self.waiting.remove(&rank);
        self.fact(exited(attempt, rank, status, after_stop));
    }

    fn end_attempt(&mut self, attempt: Attempt) {
        let waiting = self.waiting.iter().copied().collect();
        self.fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting });
    }
}

struct World {
    chance: Chance,
    now: Mono,
    job: Job,
    merge: Merge,
    next: VecDeque<Next>,
    hosts: Vec<Host>,
    timers: BTreeSet<Mono>,
    consulted: bool,
    /// Restarts that stand in the journal.
    counted: BTreeSet<Attempt>,
    /// Whether faults are still brought about.
    faults: bool,
    in_process: bool,
    ended: Option<i32>,
    port: u16,
    ports: BTreeSet<u16>,
    /// From which step the ranks of each attempt went on.
    resumed: BTreeMap<Attempt, Option<StepKey>>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut chance = Chance(seed);
        let hosts = 1 + chance.below(4) as u32;
        let members = members(&mut chance, hosts, 3, seed.is_multiple_of(2));
        let round = first(&members, hosts).expect("all are there");
        let spec = JobSpec { world_size: round[0].seat.world_size, ..JobSpec::default() };
        let budget = Budget { max_restarts: 3, window: None };
        let mut out = Vec::new();
        let job = Job::begin(Mono(1), spec, Settings::from(budget), &mut out);
        let merge = Merge::new(round.clone(), Span::seconds(5));
        let mut world = World {
            in_process: chance.one_in(2),
            chance,
            now: Mono(1),
            job,
            merge,
            next: VecDeque::new(),
            hosts: round.into_iter().map(Host::new).collect(),
            timers: BTreeSet::new(),
            consulted: false,
            counted: BTreeSet::new(),
            faults: true,
            ended: None,
            port: 1024,
            ports: BTreeSet::new(),
            resumed: BTreeMap::new(),
        };
        world.take(Mono(1), out);
        world.settle();
        world
    }

    /// What the job said goes to the journal or to the hosts.
    fn take(&mut self, at: Mono, out: Vec<Output>) {
        for output in out {
            match output {
                Output::Record(Body::Decision(decision)) => {
                    self.counted.extend(restart_of(&decision.action));
                }
                Output::Record(Body::Fact(Fact::JobEnded { exit, .. })) => {
                    assert_eq!(self.ended, None, "the job ends once");
                    self.ended = Some(exit);
                }
                Output::Record(_) => {}
                Output::Order(order) => self.merge.order(at, order, &mut self.next),
            }
        }
    }

    fn settle(&mut self) {
        while let Some(next) = self.next.pop_front() {
            match next {
                Next::Job(at, input) => {
                    let mut out = Vec::new();
                    self.job.step(at.max(self.now), input, &mut out);
                    self.take(self.now, out);
                }
                Next::Command(seat, command) => {
                    let host = &mut self.hosts[seat as usize];
                    let number = host.commands.push(command.clone()).expect("room");
                    if host.connected {
                        host.down.push_back((number, command));
                    }
                }
                Next::Local(Order::Consult(_)) => self.consulted = true,
                Next::Local(Order::LookAgain { at }) => {
                    self.timers.insert(at);
                }
                Next::Local(other) => panic!("{other:?} is for one host alone"),
                Next::Arranged(_) => panic!("as many hosts are there always"),
            }
        }
    }

    fn obey(&mut self, seat: usize, command: Command) {
        let fails = self.faults && self.chance.one_in(40);
        let all: Vec<(usize, Rank)> = self
            .hosts
            .iter()
            .enumerate()
            .flat_map(|(seat, host)| host.living.keys().map(move |rank| (seat, *rank)))
            .collect();
        let (in_process_possible, port) = (self.in_process, self.port);
        let host = &mut self.hosts[seat];
        match command {
            Command::Open { attempt } => {
                self.port += 1;
                let port = if fails { Err("no port".to_owned()) } else { Ok(port) };
                host.report(Report::Opened { attempt, port });
            }
            Command::Gather { attempt, .. } => {
                let copies = host.copies();
                host.report(Report::Holding { attempt, copies });
            }
            Command::Bring { attempt, step } => {
                let error = fails.then(|| "its memory is faulty".to_owned());
                host.brought = error.is_none().then(|| (attempt, step.clone()));
                host.report(Report::Brought { attempt, step, error });
            }
            Command::Start { attempt, in_process, master_port, resume, .. } => {
                let same = self.resumed.entry(attempt).or_insert_with(|| resume.clone());
                assert_eq!(*same, resume, "all hosts go on from one step in {attempt}");
                if let Some(step) = resume {
                    assert_eq!(host.brought, Some((attempt, step)), "the shards are there before the ranks");
                }
                assert!(
                    host.attempt.is_none_or(|before| before < attempt),
                    "an attempt starts once on a host"
                );
                assert!(attempt.0 == 0 || self.counted.contains(&attempt), "{attempt} was counted by nobody");
                self.ports.insert(master_port);
                host.attempt = Some(attempt);
                if !in_process {
                    assert!(
                        host.living.is_empty(),
                        "ranks of {:?} still live at the start of {attempt}",
                        host.living
                    );
                }
                assert!(
                    host.living.keys().all(|rank| host.waiting.contains(rank)),
                    "a rank that does not wait lives at the start of {attempt}"
                );
                if fails {
                    return host.fact(Fact::StartFailed { attempt, error: "no memory".to_owned() });
                }
                for rank in host.ranks().collect::<Vec<_>>() {
                    let twice = all.iter().any(|(of, other)| *of != seat && *other == rank);
                    assert!(!twice, "{rank} runs on two hosts");
                    host.living.insert(rank, attempt);
                }
                host.waiting.clear();
                let fact = started(attempt, master_port, host.ranks());
                host.fact(fact);
            }
            Command::Stop { attempt, why, .. } => {
                if host.attempt.is_none_or(|of| of <= attempt) {
                    let gather = why == StopWhy::Fault && in_process_possible;
                    for rank in host.ranks().collect::<Vec<_>>() {
                        if gather && host.living.contains_key(&rank) {
                            host.waiting.insert(rank);
                        } else {
                            host.exited(rank, ExitStatus::Signal(15), true);
                        }
                    }
                }
                host.end_attempt(attempt);
            }
            Command::EndRank { attempt, rank } => {
                host.exited(rank, ExitStatus::Signal(9), true);
                host.end_attempt(attempt);
            }
            Command::Seat { .. } | Command::TakeEvidence { .. } | Command::SaveDue { .. } => {}
            Command::Finish { exit, .. } => host.finished = Some(exit),
        }
    }

    /// One thing happens: whatever is possible now, chosen by chance.
    fn step(&mut self) {
        self.now = self.now.after(Span(1_000_000));
        let seat = self.chance.below(self.hosts.len());
        match self.chance.below(if self.faults { 15 } else { 12 }) {
            0..=3 => self.deliver_up(seat),
            4..=7 => self.deliver_down(seat),
            8 => self.reconnect(seat),
            9 if self.consulted => {
                self.consulted = false;
                self.next.push_back(Next::Job(self.now, Input::Ruling(None)));
            }
            10 => {
                if let Some(due) = self.timers.pop_first() {
                    self.now = self.now.max(due);
                    self.next.push_back(Next::Job(self.now, Input::LookAgain));
                }
                self.merge.look(self.now, &mut self.next);
            }
            11 => self.come_back(seat),
            12 if self.chance.one_in(6) => self.rank_dies(seat),
            13 if seat != 0 && self.chance.one_in(6) => self.hosts[seat].disconnect(),
            14 if seat != 0 && self.chance.one_in(40) => {
                // Its ranks die with the launcher.
                let host = &mut self.hosts[seat];
                host.disconnect();
                host.living.clear();
                host.waiting.clear();
                host.crashed = true;
            }
            _ => {}
        }
        self.settle();
    }

    fn deliver_up(&mut self, seat: usize) {
        let again = self.faults && self.chance.one_in(10);
        let host = &mut self.hosts[seat];
        let Some((number, report)) = host.up.pop_front() else { return };
        if again {
            host.up.push_front((number, report.clone()));
        }
        match host.reports_in.receive(number) {
            Received::New => self.merge.report(self.now, seat as u32, report, &mut self.next),
            Received::Again => {}
            Received::Gap => panic!("a connection keeps the order"),
        }
        let host = &mut self.hosts[seat];
        if !self.chance.one_in(3) {
            host.reports.acknowledged(host.reports_in.have());
        }
    }

    fn deliver_down(&mut self, seat: usize) {
        let host = &mut self.hosts[seat];
        if host.crashed {
            return;
        }
        let Some((number, command)) = host.down.pop_front() else { return };
        match host.commands_in.receive(number) {
            Received::New => self.obey(seat, command),
            Received::Again => {}
            Received::Gap => panic!("a connection keeps the order"),
        }
        let host = &mut self.hosts[seat];
        if !self.chance.one_in(3) {
            host.commands.acknowledged(host.commands_in.have());
        }
    }

    fn reconnect(&mut self, seat: usize) {
        let host = &mut self.hosts[seat];
        if host.connected || host.crashed {
            return;
        }
        host.connected = true;
        host.reports.acknowledged(host.reports_in.have());
        host.commands.acknowledged(host.commands_in.have());
        host.up = host.reports.unacknowledged().map(|(number, report)| (number, report.clone())).collect();
        host.down = host.commands.unacknowledged().map(|(number, of)| (number, of.clone())).collect();
    }

    /// The leader takes a crashed host for lost; later a new launcher comes.
    fn come_back(&mut self, seat: usize) {
        let host = &mut self.hosts[seat];
        if !host.crashed || self.ended.is_some() {
            return;
        }
        if !self.merge.lost_seats().contains(&host.seated) {
            return self.merge.lost(self.now, seat as u32, "it crashed", &mut self.next);
        }
        let seated = host.seated.clone();
        *host = Host { holds: false, ..Host::new(seated.clone()) };
        self.merge.taken(self.now, seated, &mut self.next);
    }

    fn rank_dies(&mut self, seat: usize) {
        let host = &mut self.hosts[seat];
        let living: Vec<Rank> =
            host.living.keys().copied().filter(|rank| !host.waiting.contains(rank)).collect();
        if let Some(rank) = living.get(self.chance.below(living.len())) {
            self.hosts[seat].exited(*rank, ExitStatus::Signal(9), false);
        }
    }

    /// All ranks of an attempt that runs are done.
    fn finish_ranks(&mut self) {
        for host in &mut self.hosts {
            let living: Vec<Rank> =
                host.living.keys().copied().filter(|rank| !host.waiting.contains(rank)).collect();
            living.into_iter().for_each(|rank| host.exited(rank, ExitStatus::Code(0), false));
        }
    }

    fn is_over(&self) -> bool {
        self.ended.is_some() && self.hosts.iter().all(|host| host.finished.is_some() || host.crashed)
    }
}

impl Host {
    fn disconnect(&mut self) {
        self.connected = false;
        self.up.clear();
        self.down.clear();
    }
}

fn run(seed: u64) {
    let mut world = World::new(seed);
    let quiet_after = 100 + world.chance.below(1500) as u32;
    for step in 0..MOST_STEPS {
        if step == quiet_after {
            world.faults = false;
        }
        if step > quiet_after && step % 50 == 0 {
            world.finish_ranks();
        }
        world.step();
        if world.is_over() {
            break;
        }
    }
    assert!(
        world.is_over(),
        "it does not end: ended {:?}, waits for {:?}",
        world.ended,
        world.merge.waits_for()
    );
    for host in world.hosts.iter().filter(|host| !host.crashed) {
        assert_eq!(host.finished, world.ended, "all launchers exit with the same status");
        assert!(host.living.is_empty(), "ranks outlive the job: {:?}", host.living);
    }
    let attempts = world.job.summary(world.now).attempts;
    assert!(world.ports.len() <= attempts as usize, "no port is used in two rounds");
    assert_eq!(world.merge.dropped(), 0);
}

#[test]
fn no_limit_is_broken_over_faults_of_all_kinds() {
    seeds(SEEDS, run);
}

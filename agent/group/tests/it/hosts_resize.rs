//! Simulates a job whose number of hosts changes: hosts are lost at any moment, return as new launchers and wait. The
//! real job and merge decide. `MAINSTAY_SEED=17 cargo test -p mainstay-group --test it hosts_resize` repeats a seed.
#![allow(clippy::indexing_slicing, reason = "a panic in a test is its report")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey};
use mainstay_group::merge::{Merge, Next};
use mainstay_group::resize::{Arranged, Limits};
use mainstay_group::round::{Member, Seated, first, vacant};
use mainstay_model::entry::{Body, ExitStatus, Fact, HostLoss, JobSpec};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::observation::HostsEvent;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::job::{Job, Output};
use mainstay_recovery::policy::{Budget, Settings};
use mainstay_recovery::protocol::{Command, Event, Seat, StopWhy};

use crate::support::cluster::{Chance, exited, restart_of, seeds, started};

/// Seeds in a usual run of the suite: some seconds without optimisation.
const SEEDS: u64 = 5_000;

const MOST_STEPS: u32 = 20_000;

const SHRINK_AFTER: Span = Span::millis(20);
const GROW_AFTER: Span = Span::millis(40);
const PATIENCE: Span = Span::seconds(2);

/// A launcher with its ranks.
#[derive(Default)]
struct Launcher {
    seat: Option<Seat>,
    ranks: u32,
    living: BTreeMap<Rank, Attempt>,
    waiting: BTreeSet<Rank>,
    down: VecDeque<Command>,
    up: VecDeque<Event>,
    finished: Option<i32>,
}

impl Launcher {
    fn ranks(&self) -> Vec<Rank> {
        let first = self.seat.as_ref().expect("a seat").first_rank;
        (first..first + self.ranks).map(Rank).collect()
    }

    fn fact(&mut self, fact: Fact) {
        self.up.push_back(Event::Fact(fact));
    }

    fn end(&mut self, attempt: Attempt) {
        let waiting = self.waiting.iter().copied().collect();
        self.fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting });
    }

    fn exit(&mut self, rank: Rank, status: ExitStatus, after_stop: bool) {
        let Some(attempt) = self.living.remove(&rank) else { return };
        self.waiting.remove(&rank);
        self.fact(exited(attempt, rank, status, after_stop));
    }
}

fn member(name: &str, ranks: u32, domain: String) -> Member {
    Member {
        launcher: name.to_owned(),
        host: name.to_owned(),
        ranks,
        address: name.to_owned(),
        replicas: format!("{name}:1"),
        domain,
        moves: true,
        ..Member::default()
    }
}

fn shard(step: u64, world: u32, rank: u32) -> Copy {
    let of = StepKey { step, job: "job".into(), run: "run@1".into(), attempt: 0, world };
    let shard =
        Shard { key: of, rank, root: format!("{step}.{world}.{rank}"), bytes: 1, created: 0, piece: None };
    Copy { holder: format!("h{rank}").into(), medium: Medium::Memory, own: true, verified: true, shard }
}

struct World {
    chance: Chance,
    now: Mono,
    job: Job,
    merge: Merge,
    next: VecDeque<Next>,
    limits: Limits,
    launchers: BTreeMap<String, Launcher>,
    /// The seated launchers by seat, as the leader knows them.
    seats: Vec<Seated>,
    /// Launchers that wait for a seat, as the leader knows them.
    spares: Vec<Member>,
    /// All seats that were ever stored. New seats take effect once they are stored.
    stored: Vec<(String, Seat)>,
    storing: bool,
    timers: BTreeSet<Mono>,
    consulted: bool,
    counted: BTreeSet<Attempt>,
    /// How many times the job was asked to stop its ranks so that waiting hosts take part.
    grown: u32,
    /// How many times a host was exchanged because failures had implicated it.
    avoided: u32,
    worlds: BTreeSet<u32>,
    faults: bool,
    in_process: bool,
    ended: Option<i32>,
    born: u32,
    port: u16,
}

impl World {
    fn new(seed: u64) -> World {
        let mut chance = Chance(seed);
        let most = 2 + chance.below(4) as u32;
        let least = 1 + chance.below(most as usize) as u32;
        let alike = chance.one_in(2);
        let multiple = if alike { [1, 1, 2][chance.below(3)] } else { 1 };
        let limits =
            Limits { hosts: (least, most), multiple, shrink_after: SHRINK_AFTER, grow_after: GROW_AFTER };
        let mut members = Vec::new();
        for host in 0..most {
            let ranks = if alike { 2 } else { 1 + chance.below(3) as u32 };
            let member = member(&format!("l{host}"), ranks, format!("d{}", chance.below(2)));
            // Failures have implicated half of the hosts that do not lead.
            members.push(Member { implicated: host % 4, ..member });
        }
        members[0].leads = true;
        let seats = first(&members, most).expect("all are there");
        let spec = JobSpec { world_size: seats[0].seat.world_size, ..JobSpec::default() };
        let budget = Budget { max_restarts: 1000, window: None };
        let mut out = Vec::new();
        let job = Job::begin(Mono(1), spec, Settings::from(budget), &mut out);
        let launcher = |at: &Seated| {
            let launcher =
                Launcher { seat: Some(at.seat.clone()), ranks: at.member.ranks, ..Launcher::default() };
            (at.member.launcher.clone(), launcher)
        };
        let mut world = World {
            in_process: chance.one_in(2),
            chance,
            now: Mono(1),
            job,
            merge: Merge::new(seats.clone(), PATIENCE).within(limits, "l0"),
            next: VecDeque::new(),
            limits,
            launchers: seats.iter().map(launcher).collect(),
            stored: Vec::new(),
            seats,
            spares: Vec::new(),
            storing: false,
            timers: BTreeSet::new(),
            consulted: false,
            counted: BTreeSet::new(),
            grown: 0,
            avoided: 0,
            worlds: BTreeSet::new(),
            faults: true,
            ended: None,
            born: most,
            port: 1024,
        };
        world.take(out);
        world.settle();
        world
    }

    fn take(&mut self, out: Vec<Output>) {
        for output in out {
            match output {
                Output::Record(Body::Decision(decision)) => self.counted.extend(restart_of(&decision.action)),
                Output::Record(Body::Fact(Fact::Observed(seen))) if HostsEvent::WorldGrows.is(&seen) => {
                    self.grown += 1;
                }
                Output::Record(Body::Fact(Fact::JobEnded { exit, .. })) => {
                    assert_eq!(self.ended, None, "the job ends once");
                    self.ended = Some(exit);
                }
                Output::Record(_) => {}
                Output::Command(Command::Consult(_)) => self.consulted = true,
                Output::Command(Command::Wake { at }) => {
                    self.timers.insert(at);
                }
                Output::Command(command) => self.merge.order(self.now, command, &mut self.next),
            }
        }
    }

    fn settle(&mut self) {
        while let Some(next) = self.next.pop_front() {
            match next {
                Next::Job(at, input) => {
                    let mut out = Vec::new();
                    self.job.step(at.max(self.now), input, &mut out);
                    self.take(out);
                }
                Next::Command(seat, command) => {
                    let name = &self.seats[seat as usize].member.launcher;
                    // A lost launcher receives nothing.
                    if let Some(launcher) = self.launchers.get_mut(name) {
                        launcher.down.push_back(command);
                    }
                }
                Next::Arranged(arranged) => self.arranged(*arranged),
            }
        }
    }

    fn arranged(&mut self, Arranged { seats, benched }: Arranged) {
        let world = seats[0].seat.world_size;
        let (least, most) = self.limits.hosts;
        assert!((least..=most).contains(&(seats.len() as u32)), "{} of {least} to {most} hosts", seats.len());
        assert!(world.is_multiple_of(self.limits.multiple), "{world} ranks");
        assert!(seats.iter().any(|at| at.member.launcher == "l0"), "the leader has a seat");
        assert!(self.merge.seats().eq(seats.iter()), "merge and leader have the same seats");
        let is_new = |at: &&Seated| self.spares.iter().any(|spare| spare.launcher == at.member.launcher);
        if let ([avoided], true) = (&benched[..], world == self.seats[0].seat.world_size)
            && avoided.is_avoided()
        {
            let new: Vec<&Seated> = seats.iter().filter(is_new).collect();
            assert!(new.len() == 1 && !new[0].member.is_avoided(), "{avoided:?} for {new:?}");
            self.avoided += 1;
        }
        self.spares.retain(|spare| seats.iter().all(|at| at.member.launcher != spare.launcher));
        for member in benched {
            // It ends its ranks when it is told that it has no seat.
            if let Some(launcher) = self.launchers.get_mut(&member.launcher) {
                let living: Vec<Rank> = launcher.living.keys().copied().collect();
                living.into_iter().for_each(|rank| launcher.exit(rank, ExitStatus::Signal(9), true));
                (launcher.seat, launcher.up, launcher.down) = Default::default();
            }
            self.spares.push(member);
        }
        self.seats = seats;
        self.storing = true;
    }

    fn obey(&mut self, name: &str, command: Command) {
        let fails = self.faults && self.chance.one_in(60);
        let elsewhere: Vec<Rank> = self
            .launchers
            .iter()
            .filter(|(other, _)| *other != name)
            .flat_map(|(_, launcher)| launcher.living.keys().copied())
            .collect();
        let in_process = self.in_process;
        let stored = self.stored.clone();
        self.port += 1;
        let port = self.port;
        let launcher = self.launchers.get_mut(name).expect("it is there");
        match command {
            Command::Seat { attempt, seat } => {
                let known = (name.to_owned(), seat.clone());
                assert!(stored.contains(&known), "seats are stored before they are sent");
                // Ranks that wait in their processes are ended.
                let all: Vec<Rank> = launcher.living.keys().copied().collect();
                assert!(all.iter().all(|rank| launcher.waiting.contains(rank)), "no rank runs");
                all.into_iter().for_each(|rank| launcher.exit(rank, ExitStatus::Signal(9), true));
                launcher.seat = Some(seat.clone());
                launcher.up.push_back(Event::Seated { attempt, seat });
            }
            Command::Open { attempt } => {
                assert_eq!(launcher.ranks()[0], Rank(0), "rank 0's host opens the port");
                launcher.up.push_back(Event::Opened { attempt, port: Ok(port) });
            }
            Command::Gather { attempt, .. } => {
                // Step 1 of each world size, as if each host had the shards of all ranks.
                let copies = (1..=9).flat_map(|world| (0..world).map(move |rank| shard(1, world, rank)));
                launcher.up.push_back(Event::Holding { attempt, copies: copies.collect() });
            }
            Command::Bring { attempt, step } => {
                launcher.up.push_back(Event::Brought { attempt, step, error: None });
            }
            Command::Start { attempt, in_process, master_port, before, resume, .. } => {
                let world = launcher.seat.as_ref().expect("a seat").world_size;
                let resumed = resume.map(|step| step.world);
                assert!(
                    resumed.is_none_or(|of| of == world),
                    "a step of {resumed:?} ranks is not whole in {world}"
                );
                assert_ne!(before, Some(world), "`before` is set only if the number of ranks changed");
                assert!(attempt.0 == 0 || self.counted.contains(&attempt) || self.grown > 0, "{attempt}");
                if !in_process {
                    assert!(launcher.living.is_empty(), "{:?} still live", launcher.living);
                }
                if fails {
                    return launcher.fact(Fact::start_failed(attempt, "no memory".to_owned()));
                }
                for rank in launcher.ranks() {
                    assert!(!elsewhere.contains(&rank), "{rank} runs on two hosts");
                    launcher.living.insert(rank, attempt);
                }
                let ranks = launcher.ranks();
                assert_eq!(launcher.living.len(), ranks.len(), "no rank has a number of another seat");
                launcher.waiting.clear();
                launcher.fact(started(attempt, master_port, ranks.into_iter()));
            }
            Command::Stop { attempt, why, .. } => {
                let all: Vec<(Rank, Attempt)> =
                    launcher.living.iter().map(|(rank, of)| (*rank, *of)).collect();
                for (rank, of) in all {
                    if why == StopWhy::Fault && in_process && of <= attempt {
                        launcher.waiting.insert(rank);
                    } else {
                        launcher.exit(rank, ExitStatus::Signal(15), true);
                    }
                }
                launcher.end(attempt);
            }
            Command::EndRank { attempt, rank } => {
                launcher.exit(rank, ExitStatus::Signal(9), true);
                launcher.end(attempt);
            }
            Command::Consult(_)
            | Command::AskPolicy { .. }
            | Command::Wake { .. }
            | Command::TakeEvidence { .. }
            | Command::AskToSave { .. }
            | Command::SaveDue { .. }
            | Command::Look { .. } => {}
            Command::Finish { exit, .. } => launcher.finished = Some(exit),
        }
    }

    fn step(&mut self) {
        self.now = self.now.after(Span::millis(1));
        let names: Vec<String> = self.launchers.keys().cloned().collect();
        let name = names[self.chance.below(names.len())].clone();
        match self.chance.below(if self.faults { 14 } else { 12 }) {
            0..=3 => self.deliver_up(&name),
            4..=7 => {
                if let Some(command) = self.launchers.get_mut(&name).and_then(|of| of.down.pop_front()) {
                    self.obey(&name, command);
                }
            }
            8 if self.consulted => {
                self.consulted = false;
                self.next.push_back(Next::Job(self.now, Event::AgentEvidence(None)));
            }
            9 => {
                if let Some(due) = self.timers.pop_first() {
                    self.now = self.now.max(due);
                    self.next.push_back(Next::Job(self.now, Event::Wake));
                }
                self.merge.look(self.now, &mut self.next);
            }
            10 if self.storing => {
                self.storing = false;
                self.store();
                for at in &self.seats {
                    // A launcher without a seat receives its welcome.
                    let launcher = self.launchers.get_mut(&at.member.launcher);
                    if let Some(launcher) = launcher.filter(|launcher| launcher.seat.is_none()) {
                        launcher.seat = Some(at.seat.clone());
                    }
                }
                self.merge.arranged(self.now, &mut self.next);
            }
            11 => self.comes(),
            12 if self.chance.one_in(6) => self.rank_dies(&name),
            13 if name != "l0" && self.chance.one_in(25) => self.crash(&name),
            _ => {}
        }
        self.settle();
    }

    fn store(&mut self) {
        self.stored.extend(self.seats.iter().map(|at| (at.member.launcher.clone(), at.seat.clone())));
    }

    fn deliver_up(&mut self, name: &str) {
        let Some(report) = self.launchers.get_mut(name).and_then(|of| of.up.pop_front()) else { return };
        // Reports of a launcher without a seat are ignored.
        if let Some(seat) = self.seats.iter().position(|at| at.member.launcher == name) {
            self.merge.step(self.now, seat as u32, report, &mut self.next);
        }
    }

    fn crash(&mut self, name: &str) {
        self.launchers.remove(name);
        self.spares.retain(|spare| spare.launcher != name);
        self.merge.set_waiting(self.spares.clone());
        if let Some(seat) = self.seats.iter().position(|at| at.member.launcher == name) {
            self.merge.lost(self.now, seat as u32, (HostLoss::Unreachable, "it crashed"), &mut self.next);
        }
    }

    /// A new launcher joins: it takes the seat of a lost host, or waits.
    fn comes(&mut self) {
        // One more than have seats.
        if self.launchers.len() > self.limits.hosts.1 as usize
            || !self.chance.one_in(8)
            || self.ended.is_some()
        {
            return;
        }
        self.born += 1;
        let lost = self.merge.lost_seats();
        let ranks = lost.first().map_or(2, |at| at.member.ranks);
        let new = member(&format!("l{}", self.born), ranks, format!("d{}", self.chance.below(2)));
        let new = Member { implicated: self.born % 4, ..new };
        let mut launcher = Launcher { ranks, ..Launcher::default() };
        match vacant(&lost, &new) {
            Some(seat) if !self.storing => {
                let at = Seated { member: new.clone(), seat: self.seats[seat as usize].seat.clone() };
                launcher.seat = Some(at.seat.clone());
                self.launchers.insert(new.launcher.clone(), launcher);
                self.seats[seat as usize] = at.clone();
                self.store();
                self.merge.taken(self.now, at, &mut self.next);
            }
            _ => {
                self.launchers.insert(new.launcher.clone(), launcher);
                self.spares.push(new);
                self.merge.set_waiting(self.spares.clone());
            }
        }
    }

    fn rank_dies(&mut self, name: &str) {
        let launcher = self.launchers.get_mut(name).expect("it is there");
        let living: Vec<Rank> =
            launcher.living.keys().copied().filter(|rank| !launcher.waiting.contains(rank)).collect();
        if let Some(rank) = living.get(self.chance.below(living.len())) {
            launcher.exit(*rank, ExitStatus::Signal(9), false);
        }
    }

    fn finish_ranks(&mut self) {
        self.worlds.insert(self.launchers.values().map(|of| of.living.len() as u32).sum());
        for launcher in self.launchers.values_mut() {
            let living: Vec<Rank> =
                launcher.living.keys().copied().filter(|rank| !launcher.waiting.contains(rank)).collect();
            living.into_iter().for_each(|rank| launcher.exit(rank, ExitStatus::Code(0), false));
        }
    }

    fn is_over(&self) -> bool {
        let seated = |name: &str| self.seats.iter().any(|at| at.member.launcher == name);
        self.ended.is_some() && self.launchers.iter().all(|(name, of)| of.finished.is_some() || !seated(name))
    }
}

/// Runs a seed. Returns how often the job was asked to grow, whether it shrank, how often it avoided a host, and its exit
/// status.
fn run(seed: u64) -> (u32, bool, u32, i32) {
    let mut world = World::new(seed);
    // Checkpoints can be loaded only by the same number of ranks.
    let keeps = seed.is_multiple_of(5);
    world.merge.keep_world(keeps);
    let size = world.seats[0].seat.world_size;
    let quiet_after = 300 + world.chance.below(2500) as u32;
    let before = world.seats.len();
    let mut shrank = false;
    for step in 0..MOST_STEPS {
        world.faults = step < quiet_after;
        shrank |= world.seats.len() < before;
        assert!(!keeps || world.seats[0].seat.world_size == size, "the number of ranks does not change");
        // Running ranks finish after a while.
        if step > quiet_after && step % 200 == 0 {
            world.finish_ranks();
        }
        world.step();
        if world.is_over() {
            break;
        }
    }
    assert!(world.is_over(), "it does not end: {:?}, waits for {:?}", world.ended, world.merge.waits_for());
    assert!(world.launchers.values().all(|of| of.living.is_empty()), "ranks outlive the job");
    (world.grown, shrank, world.avoided, world.ended.expect("it has ended"))
}

#[test]
fn all_limits_hold_while_hosts_come_and_go() {
    let ends = seeds(SEEDS, run);
    if ends.len() > 100 {
        assert!(ends.iter().any(|(grown, ..)| *grown > 0), "some jobs grow");
        assert!(ends.iter().any(|(_, shrank, ..)| *shrank), "some jobs shrink");
        assert!(ends.iter().any(|(.., avoided, _)| *avoided > 0), "some jobs avoid a host");
        assert!(
            ends.iter().filter(|(.., exit)| *exit == 0).count() > ends.len() / 4,
            "many jobs end with status 0"
        );
    }
}

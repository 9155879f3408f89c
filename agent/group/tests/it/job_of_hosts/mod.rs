//! A simulated job on several hosts: the real code of leading and following launchers, the job and the merge, with
//! simulated machines, clocks, network and coordination store. Everything may fail at any moment. Messages are late,
//! repeated, or held up in one direction. Connections end. Launchers are killed between any two acts. Machines lose
//! their power, stall, and return. Clocks drift. The store stalls and is wiped.
//!
//! To run a seed again: `MAINSTAY_SEED=17 cargo test -p mainstay-group --test it job_of_hosts`. `MAINSTAY_SEEDS` sets
//! the number of seeds, and `MAINSTAY_TRACE=1` prints the events.
#![allow(clippy::indexing_slicing, reason = "a panic in a test is its report")]

mod acts;
mod checks;
mod elections;
mod faults;
mod hands;
mod launcher;
mod network;
mod news;
mod scenarios;
mod store;

use std::collections::{BTreeMap, BTreeSet};

use mainstay_checkpoint::inventory::StepKey;
use mainstay_group::clock::Mapping;
use mainstay_group::follow::{Follow, Leads};
use mainstay_group::lead::{self, Expected, Lead};
use mainstay_group::merge::Merge;
use mainstay_group::record::Record;
use mainstay_group::resize::Limits;
use mainstay_group::round::{Member, Seated, first};
use mainstay_group::wire::Join;
use mainstay_model::entry::JobSpec;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Span, Stamp};
use mainstay_recovery::job::Job;
use mainstay_recovery::policy::{Budget, Settings};
use mainstay_recovery::protocol::{Command, Event};

use crate::support::cluster::{Chance, members, seeds};
use faults::Fault;
use launcher::{Brain, Launcher};
use network::{Connection, Machine};
use store::{Answer, Ask, LeaderKey, Store};

/// Nanoseconds since the start of the simulation.
type Time = u64;

const MS: Time = 1_000_000;
const SECOND: Time = 1000 * MS;

/// The lease of launchers.
const LEASE: Time = 10 * SECOND;
const LEASE_SPAN: Span = Span(LEASE);

/// The `--nnodes` of all launchers. The number of seats differs.
const HOSTS: (u32, u32) = (1, 64);

/// Hosts have different numbers of ranks here.
fn expected() -> Expected {
    Expected { leader: Join { hosts: HOSTS, ..Join::default() }, mixed: true }
}

/// The budget of restarts.
const BUDGET: u32 = 6;

/// The time that a start waits for a lost host.
const PATIENCE: Span = Span::seconds(60);

/// The interval at which a launcher checks its hosts and timers.
const LOOKS_EVERY: Time = 500 * MS;

/// A job ends within this time after the last fault.
const ENDS_WITHIN: Time = 900 * SECOND;

/// The number of seeds in a usual run of the suite.
const SEEDS: u64 = 20_000;

enum Happening {
    Up(u64),
    Down(u64),
    Connects(usize),
    Connected {
        follower: usize,
        leader: usize,
    },
    NotConnected {
        follower: usize,
        leader: usize,
        refused: bool,
    },
    Closed(usize),
    Asked {
        launcher: usize,
        asked: Time,
        ask: Ask,
    },
    Answered {
        launcher: usize,
        asked: Time,
        revision: u64,
        answer: Answer,
    },
    Asks(usize),
    Looks(usize),
    Beats(usize),
    Ruled(usize),
    Does {
        launcher: usize,
        command: Box<Command>,
        by: Option<(u64, usize)>,
    },
    Respawns(usize),
    Fault(Fault),
    Quiet,
    RanksFinish,
    /// A test waits for this time.
    Nothing,
}

struct World {
    chance: Chance,
    now: Time,
    events: BTreeMap<(Time, u64), Happening>,
    numbers: u64,
    machines: Vec<Machine>,
    launchers: Vec<Launcher>,
    store: Store,
    connections: BTreeMap<u64, Connection>,
    newest_connection: u64,
    /// Directions in which no message passes, and the events that wait for them.
    blocked: BTreeSet<(usize, usize)>,
    held_up: Vec<Happening>,
    /// Whether faults are injected.
    faults: bool,
    /// A launcher crashes at one in this number of acts; 0: never.
    crash_one_in: u64,
    /// Whether launchers that ended are started again, as a scheduler does.
    respawns: bool,
    in_process: bool,
    /// The numbers of hosts with which the job can run.
    limits: Limits,
    port: u16,
    quiet_since: Option<Time>,
    traces: bool,
    /// The number of leaders so far.
    leaders: u32,
    /// The attempts of restarts that a leader decided.
    counted: BTreeSet<Attempt>,
    /// How often ranks were stopped to add hosts. This is no failure and costs no budget.
    grown: u32,
    started_by: BTreeMap<Attempt, usize>,
    given: BTreeMap<(Attempt, Rank), usize>,
    ports: BTreeMap<u16, Attempt>,
    resumed: BTreeMap<Attempt, Option<StepKey>>,
    /// The leader that acted in each epoch.
    acted: BTreeMap<u64, usize>,
    elected: BTreeMap<u64, usize>,
    /// The exit status of the job.
    exit: Option<i32>,
    /// A leader ended the job without the store, after waiting for it in vain.
    ended_unstored: bool,
}

fn settings() -> Settings {
    Settings::from(Budget { max_restarts: BUDGET, window: None })
}

/// Half of the jobs can continue with fewer or more hosts.
fn limits(chance: &mut Chance, hosts: u32, most: u32) -> Limits {
    if chance.one_in(2) {
        return Limits::fixed(hosts);
    }
    Limits {
        hosts: (1 + chance.below(hosts as usize) as u32, most),
        multiple: 1 + chance.below(2) as u32,
        shrink_after: Span::seconds(chance.below(20) as u64),
        grow_after: Span::seconds(chance.below(30) as u64),
    }
}

impl World {
    /// A job that starts on this number of hosts, and `spares` additional launchers.
    fn new(seed: u64, hosts: u32, spares: u32) -> World {
        let mut chance = Chance(seed);
        let mut members = members(&mut chance, hosts, 2, seed.is_multiple_of(2));
        members.iter_mut().for_each(|member| member.moves = true);
        let drifts = seed.is_multiple_of(3);
        let machine = |launcher: usize, chance: &mut Chance| Machine {
            up: true,
            stalled: 0,
            offset: SECOND * (1 + chance.below(1_000_000) as u64),
            drift: if drifts { 1000 - chance.below(2000) as i64 } else { 0 },
            launcher,
        };
        let machines = (0..(hosts + spares) as usize).map(|of| machine(of, &mut chance)).collect();
        let mut round = first(&members, hosts).expect("all are there");
        // In some jobs failures have implicated every third host.
        let has_lemons = seed.is_multiple_of(6);
        let implicated = |host: u32| if has_lemons { host % 3 } else { 0 };
        for Seated { member, seat } in round.iter_mut().filter(|_| has_lemons) {
            (member.node_rank, member.implicated) = (None, implicated(seat.group_rank));
        }
        let record = Record {
            at: Stamp::default(),
            seats: round.clone(),
            leader: members[0].launcher.clone(),
            job: "job".to_owned(),
            launch: "launch".to_owned(),
            attempt: Attempt(0),
            running: false,
            carried: None,
            ended: None,
        };
        let mut world = World {
            in_process: chance.one_in(2),
            limits: limits(&mut chance, hosts, hosts + spares),
            chance,
            now: SECOND,
            events: BTreeMap::new(),
            numbers: 0,
            machines,
            launchers: Vec::new(),
            store: Store::begun_by(0, record),
            connections: BTreeMap::new(),
            newest_connection: 0,
            blocked: BTreeSet::new(),
            held_up: Vec::new(),
            faults: false,
            crash_one_in: 0,
            respawns: true,
            port: 1024,
            quiet_since: None,
            traces: std::env::var_os("MAINSTAY_TRACE").is_some(),
            leaders: 1,
            counted: BTreeSet::new(),
            grown: 0,
            started_by: BTreeMap::new(),
            given: BTreeMap::new(),
            ports: BTreeMap::new(),
            resumed: BTreeMap::new(),
            acted: BTreeMap::new(),
            elected: BTreeMap::from([(1, 0)]),
            exit: None,
            ended_unstored: false,
        };
        for seated in &round {
            let member = seated.member.clone();
            let me = world.launch(member.launcher.clone(), seated.seat.group_rank as usize, member);
            world.launchers[me].seat = Some(seated.seat.clone());
            world.launchers[me].holds = true;
        }
        for spare in hosts..hosts + spares {
            let like = world.chance.below(members.len());
            let ranks = members[if has_lemons { members.len().min(3) - 1 } else { like }].ranks;
            let host = format!("h{spare}");
            let prepares = world.chance.one_in(2);
            world.launch(
                format!("l{spare}"),
                spare as usize,
                Member {
                    launcher: format!("l{spare}"),
                    address: host.clone(),
                    host,
                    ranks,
                    moves: true,
                    // Its code runs while it waits.
                    prepares,
                    replicas: format!("{spare}:1"),
                    implicated: implicated(spare + 1),
                    ..Member::default()
                },
            );
        }
        world.begin(Merge::new(round, PATIENCE));
        world
    }

    fn begin(&mut self, merge: Merge) {
        let mut out = Vec::new();
        let now = self.clock(0);
        let world_size = self.launchers[0].seat.as_ref().expect("it has one").world_size;
        let job = Job::begin(now, JobSpec { world_size, ..JobSpec::default() }, settings(), &mut out);
        let seats: Vec<_> = merge.seats().cloned().collect();
        let leader_settings = lead::LeaderSettings {
            seat: 0,
            launcher: self.launchers[0].name.clone(),
            names: ("job".to_owned(), "launch".to_owned()),
            expected: expected(),
            lease: LEASE_SPAN,
            looks_every: Span(LOOKS_EVERY),
            epoch: 1,
            newest_record: 1,
            has_store: true,
        };
        let merge = merge.within(self.limits, &leader_settings.launcher);
        let mut lead = Lead::new(now, job, merge, leader_settings);
        lead.gathered(&[], Vec::new());
        lead.begin_with(now, out);
        self.launchers[0].brain = Brain::Leads(Box::new(lead));
        self.launchers[0].client.leads_in = Some(1);
        let key = LeaderKey { launcher: 0, epoch: 1 };
        for seated in seats.iter().skip(1) {
            let me = seated.seat.group_rank as usize;
            let leads = Leads { launcher: "l0".to_owned(), host: "h0".to_owned(), epoch: 1 };
            let at = self.clock(me);
            let name = self.launchers[me].name.clone();
            let clock = Mapping::default();
            let follow = Follow::new(at, name, leads, seated.seat.clone(), LEASE_SPAN, clock, false);
            self.launchers[me].brain = Brain::Follows(Box::new(follow));
            self.launchers[me].client.leader = Some(key.clone());
        }
        for launcher in &mut self.launchers {
            launcher.client.highest_epoch = 1;
        }
        self.settle(0);
        for me in 1..self.launchers.len() {
            self.reconnect(me);
        }
    }

    /// Starts a launcher on a machine.
    fn launch(&mut self, name: String, machine: usize, member: Member) -> usize {
        let me = self.launchers.len();
        self.launchers.push(Launcher::new(name, machine, member));
        self.machines[machine].launcher = me;
        self.launchers[me].client.answered_at(self.now);
        let soon = |world: &mut World| world.now + MS * (1 + world.chance.below(500) as Time);
        let (looks, asks, beats) = (soon(self), soon(self), soon(self));
        self.at(looks, Happening::Looks(me));
        self.at(asks, Happening::Asks(me));
        self.at(beats, Happening::Beats(me));
        me
    }

    fn at(&mut self, at: Time, event: Happening) {
        self.numbers += 1;
        self.events.insert((at.max(self.now), self.numbers), event);
    }

    /// The launcher that an event concerns. The event waits while the launcher's machine stalls.
    fn whose(&self, event: &Happening) -> Option<usize> {
        match event {
            Happening::Connects(me)
            | Happening::Connected { follower: me, .. }
            | Happening::NotConnected { follower: me, .. }
            | Happening::Closed(me)
            | Happening::Answered { launcher: me, .. }
            | Happening::Asks(me)
            | Happening::Looks(me)
            | Happening::Beats(me)
            | Happening::Ruled(me)
            | Happening::Does { launcher: me, .. } => Some(*me),
            _ => None,
        }
    }

    /// Processes the next event.
    fn step(&mut self) {
        let Some(((at, _), event)) = self.events.pop_first() else { return };
        self.now = at;
        if let Some(me) = self.whose(&event) {
            let stalled = self.machines[self.launchers[me].machine].stalled;
            if stalled > self.now {
                return self.at(stalled, event);
            }
            if !self.launchers[me].runs() {
                return;
            }
        }
        self.happens(event);
    }

    fn happens(&mut self, event: Happening) {
        match event {
            Happening::Up(connection) => self.arrives_up(connection),
            Happening::Down(connection) => self.arrives_down(connection),
            Happening::Connects(me) => self.connects(me),
            Happening::Connected { follower, leader } => {
                self.connected(follower, leader);
                self.launchers[follower].connects = false;
                self.reconnect(follower);
            }
            Happening::NotConnected { follower, leader, refused } => {
                let wants = self.launchers[follower].wants(leader);
                self.launchers[follower].connects = false;
                match wants {
                    true => self.lost_leader(follower, "it does not answer", refused),
                    false => self.reconnect(follower),
                }
            }
            // Events of a connection that another one has replaced are ignored.
            Happening::Closed(me) if self.launchers[me].connection.is_some() => {}
            Happening::Closed(me) => self.lost_leader(me, "it was ended here", false),
            Happening::Asked { launcher, asked, ask } => self.asked(launcher, asked, ask),
            Happening::Answered { launcher, asked, revision, answer } => {
                self.answered(launcher, asked, revision, answer);
            }
            Happening::Asks(me) => {
                self.ask(me, Ask::Look);
                self.at(self.next_question(), Happening::Asks(me));
            }
            Happening::Looks(me) => {
                self.at(self.now + LOOKS_EVERY, Happening::Looks(me));
                self.look(me);
            }
            Happening::Beats(me) => {
                self.beat(me);
                self.at(self.now + SECOND, Happening::Beats(me));
            }
            Happening::Ruled(me) => {
                let now = self.clock(me);
                if let Brain::Leads(lead) = &mut self.launchers[me].brain {
                    lead.step(now, Event::AgentEvidence(None));
                }
                self.settle(me);
            }
            Happening::Does { launcher, command, by } => self.does(launcher, *command, by),
            Happening::Respawns(machine) => self.respawn(machine),
            Happening::Fault(fault) => self.fail(fault),
            Happening::Quiet => self.be_quiet(),
            Happening::Nothing => {}
            Happening::RanksFinish => {
                self.ranks_finish();
                self.at(self.now + 3 * SECOND, Happening::RanksFinish);
            }
        }
    }
}

/// Runs a seed. Returns the number of leaders, or 0 if all launchers with a seat were lost.
fn run(seed: u64) -> u32 {
    let mut chance = Chance(seed ^ 0x5eed);
    let (hosts, spares) = (2 + chance.below(4) as u32, chance.below(3) as u32);
    let mut world = World::new(seed, hosts, spares);
    world.faults = true;
    world.plan_faults(&mut chance);
    world.until_over()
}

#[test]
fn no_fault_breaks_an_invariant() {
    let leaders = seeds(SEEDS, run);
    let (count, lost) = (leaders.len(), leaders.iter().filter(|leaders| **leaders == 0).count());
    let most = leaders.iter().max();
    assert!(count < 100 || most > Some(&2), "no run replaces its leader twice");
    assert!(lost <= count / 10, "{lost} of {count} jobs lost all of their launchers");
}

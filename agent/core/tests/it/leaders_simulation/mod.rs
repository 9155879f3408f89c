//! Leaders that are lost, stalled and replaced, simulated: the real job, merge, record and numbered messages over a simulated
//! store and network. Any host may crash at any moment, the leader too; hosts are cut off from each other and from the store;
//! the store is away, or loses all it has. Each seed can be run again:
//! `MAINSTAY_SEED=17 cargo test -p mainstay-core --test it leaders_simulation`. `MAINSTAY_SEEDS` sets how many are run.
#![allow(clippy::indexing_slicing, reason = "a panic in a test is its report")]

mod hands;
mod host;
mod network;
mod office;

use std::collections::{BTreeMap, BTreeSet};

use mainstay_core::base::id::Attempt;
use mainstay_core::base::time::{Mono, Span};
use mainstay_core::model::entry::{Body, JobSpec};
use mainstay_core::recovery::hosts::merge::{Merge, Next};
use mainstay_core::recovery::hosts::round::first;
use mainstay_core::recovery::job::{Input, Job, Order, Output};
use mainstay_core::recovery::policy::{Budget, Settings};

use crate::support::cluster::{Chance, members, restart_of, seeds};
use host::{Host, Leader, leader};
use office::{Store, record};

/// Seeds of a usual run of the suite: some seconds without optimisation.
const SEEDS: u64 = 10_000;

/// More steps than any run needs that ends at all.
const MOST_STEPS: u32 = 40_000;

/// Restarts that the job has.
const BUDGET: u32 = 3;

/// How long a start waits for a lost host.
const PATIENCE: Span = Span::seconds(5);

struct World {
    chance: Chance,
    now: Mono,
    store: Store,
    highest_epoch: u64,
    hosts: Vec<Host>,
    /// Restarts that some leader has decided.
    counted: BTreeSet<Attempt>,
    /// Which leader started an attempt.
    started_by: BTreeMap<Attempt, String>,
    faults: bool,
    in_process: bool,
    port: u16,
    leaders: u32,
}

impl World {
    fn new(seed: u64) -> World {
        let mut chance = Chance(seed);
        let hosts = 2 + chance.below(3) as u32;
        let members = members(&mut chance, hosts, 2, seed.is_multiple_of(2));
        let round = first(&members, hosts).expect("all are there");
        let mut out = Vec::new();
        let spec = JobSpec { world_size: round[0].seat.world_size, ..JobSpec::default() };
        let job = Job::begin(Mono(1), spec, settings(), &mut out);
        let mut hosts: Vec<Host> =
            round.iter().cloned().map(|seated| Host::new(seated, (0, 1), "l0")).collect();
        let record = record(0, &round, None, false);
        hosts[0].leads = Some(Box::new(leader(job, Merge::new(round, PATIENCE), 1)));
        let mut world = World {
            in_process: chance.one_in(2),
            chance,
            now: Mono(1),
            store: Store {
                away: false,
                leader: Some((0, 1)),
                record: Some(record.clone()),
                record_epoch: 1,
                read: Some(record),
            },
            highest_epoch: 1,
            hosts,
            counted: BTreeSet::new(),
            started_by: BTreeMap::new(),
            faults: true,
            port: 1024,
            leaders: 1,
        };
        world.take(0, out);
        world.settle(0);
        world
    }

    /// What the job of this leader said.
    fn take(&mut self, me: usize, out: Vec<Output>) {
        for output in out {
            match output {
                Output::Record(Body::Decision(decision)) => {
                    self.counted.extend(restart_of(&decision.action));
                }
                Output::Record(_) => {}
                Output::Order(order) => {
                    let Some(leader) = &mut self.hosts[me].leads else { return };
                    match order {
                        Order::StartRanks(_) | Order::StartRound(_) => leader.held.push_back(order),
                        Order::Finish { exit } => {
                            leader.over = Some(exit);
                            leader.held.push_back(order);
                        }
                        order => leader.merge.order(self.now, order, &mut leader.next),
                    }
                }
            }
        }
    }

    fn settle(&mut self, me: usize) {
        while let Some(next) = self.hosts[me].leads.as_mut().and_then(|leader| leader.next.pop_front()) {
            match next {
                Next::Job(at, input) => {
                    let mut out = Vec::new();
                    let now = self.now;
                    let Some(leader) = &mut self.hosts[me].leads else { return };
                    leader.job.step(at.max(now), input, &mut out);
                    self.take(me, out);
                }
                Next::Command(seat, command) => self.command(me, seat as usize, command),
                Next::Local(Order::Consult(_)) => self.leader(me).consulted = true,
                Next::Local(Order::LookAgain { at }) => {
                    self.leader(me).timers.insert(at);
                }
                Next::Local(other) => panic!("{other:?} is for one host alone"),
                Next::Arranged(_) => panic!("as many hosts are there always"),
            }
        }
    }

    fn leader(&mut self, me: usize) -> &mut Leader {
        self.hosts[me].leads.as_mut().expect("it leads")
    }

    /// One thing happens: whatever is possible now, chosen by chance.
    fn step(&mut self) {
        self.now = self.now.after(Span(1_000_000));
        let seat = self.chance.below(self.hosts.len());
        match self.chance.below(if self.faults { 22 } else { 16 }) {
            0..=3 => self.deliver_up(seat),
            4..=7 => self.deliver_down(seat),
            8 => self.reconnect(seat),
            9 => self.read_store(seat),
            10 => self.write_record(seat),
            11 => self.lease_ends(),
            12 => self.elect(seat),
            13 => self.think(seat),
            14 => self.come_back(seat),
            15 => self.end_trouble(seat),
            16 if self.chance.one_in(6) => self.rank_dies(seat),
            17 if self.chance.one_in(6) => self.hosts[seat].disconnect(),
            18 if self.chance.one_in(30) && self.another_lives(seat) => self.hosts[seat].crash(),
            19 if self.chance.one_in(20) && !self.hosts[seat].crashed => self.hosts[seat].stalled = true,
            20 if self.chance.one_in(10) => self.hosts[seat].cut = true,
            21 if self.chance.one_in(20) => {
                self.store.away = true;
                // A replaced leader that does not know it, and a store that forgets who replaced it, are too much at once:
                // the epochs of both may be the same then.
                let leaders = self.hosts.iter().filter(|host| host.leads.is_some()).count();
                if self.chance.one_in(3) && leaders < 2 {
                    (self.store.leader, self.store.record, self.store.record_epoch) = (None, None, 0);
                }
            }
            _ => {}
        }
        for seat in 0..self.hosts.len() {
            self.settle(seat);
            // A launcher that is gone, or leads no more, ends its connections.
            if self.hosts[self.hosts[seat].follows.0].leads.is_none() {
                self.hosts[seat].disconnect();
            }
        }
    }

    /// Whether there is another host that can go on with the job.
    fn another_lives(&self, seat: usize) -> bool {
        let up_to_date = |of: usize, host: &Host| {
            host.leads.as_ref().is_none_or(|leader| self.store.leader == Some((of, leader.epoch)))
        };
        let mut others = self.hosts.iter().enumerate().filter(|(of, _)| *of != seat);
        others.any(|(of, host)| !host.crashed && up_to_date(of, host))
    }

    /// Time passes for a leader.
    fn think(&mut self, seat: usize) {
        let now = self.now;
        if !self.hosts[seat].runs() {
            return;
        }
        let Some(leader) = &mut self.hosts[seat].leads else { return };
        if std::mem::take(&mut leader.consulted) {
            leader.next.push_back(Next::Job(now, Input::Ruling(None)));
        }
        if let Some(due) = leader.timers.pop_first() {
            self.now = self.now.max(due);
            let now = self.now;
            let leader = self.leader(seat);
            leader.next.push_back(Next::Job(now, Input::LookAgain));
        }
        let now = self.now;
        let leader = self.leader(seat);
        leader.merge.look(now, &mut leader.next);
    }

    /// The end in the store is seen by those that no leader tells.
    fn is_over(&self) -> bool {
        let ended = self.store.read.as_ref().and_then(|record| record.ended);
        let over = |host: &Host| {
            host.finished.is_some() || host.crashed || (ended.is_some() && host.leads.is_none())
        };
        self.hosts.iter().any(|host| host.finished.is_some()) && self.hosts.iter().all(over)
    }

    fn told(&self) -> String {
        let hosts = self.hosts.iter().map(|host| {
            let leads = host.leads.as_ref().map(|leader| {
                (
                    leader.epoch,
                    leader.merge.waits_for(),
                    leader.held.clone(),
                    leader.over,
                    leader.merge.attempt(),
                )
            });
            format!(
                "\n{} crashed {} connected {} follows {:?} attempt {:?} living {:?} leads {leads:?}",
                host.seated.member.host,
                host.crashed,
                host.connected,
                host.follows,
                host.attempt,
                host.living
            )
        });
        format!("{:?} {}", self.store.leader, hosts.collect::<String>())
    }
}

fn settings() -> Settings {
    Settings::from(Budget { max_restarts: BUDGET, window: None })
}

/// Runs a seed; how many leaders there were, or 0 if all launchers were lost.
fn run(seed: u64) -> u32 {
    let mut world = World::new(seed);
    let quiet_after = 200 + world.chance.below(2500) as u32;
    for step in 0..MOST_STEPS {
        if step == quiet_after {
            world.faults = false;
        }
        if step > quiet_after && step % 50 == 0 {
            world.finish_ranks();
        }
        world.step();
        if world.hosts.iter().all(|host| host.crashed) {
            // Leaders that stepped down were the last: the scheduler starts the job again.
            return 0;
        }
        if world.is_over() {
            break;
        }
    }
    assert!(world.is_over(), "it does not end: {}", world.told());
    let finished: BTreeSet<i32> = world.hosts.iter().filter_map(|host| host.finished).collect();
    assert_eq!(finished.len(), 1, "all launchers exit with the same status");
    for host in world.hosts.iter().filter(|host| host.finished.is_some()) {
        assert!(host.living.is_empty(), "ranks outlive the job: {:?}", host.living);
    }
    world.leaders
}

#[test]
fn no_limit_is_broken_while_leaders_come_and_go() {
    let leaders = seeds(SEEDS, run);
    let (count, lost) = (leaders.len(), leaders.iter().filter(|leaders| **leaders == 0).count());
    let most = leaders.iter().max();
    assert!(count < 100 || most > Some(&2), "leaders are replaced in these runs, and replaced again");
    assert!(lost <= count / 20, "{lost} of {count} jobs lost all of their launchers");
}

//! A launcher: the pure code that leads or follows, its connection and its exit.

use std::collections::{BTreeMap, BTreeSet};

use mainstay_group::clock::Mapping;
use mainstay_group::follow::{Follow, Leads, concerns_all};
use mainstay_group::lead::{Here, Lead};
use mainstay_group::round::Member;
use mainstay_group::wire::{Down, Join, PROTOCOL, Up};
use mainstay_model::entry::{Entry, Fact};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Stamp, Wall};
use mainstay_recovery::protocol::{Command, Event, Seat, StopWhy};

use super::network::Wire;
use super::store::{Ask, Client, LeaderKey};
use super::{HOSTS, Happening, LEASE_SPAN, MS, SECOND, World};

/// The status of a launcher that hands its host back.
const HANDS_BACK: i32 = 75;

pub enum Brain {
    Leads(Box<Lead>),
    Follows(Box<Follow>),
    /// It has no seat and waits for one from this leader.
    Waits(Option<LeaderKey>),
    Gone,
}

/// The journal of a launcher, for the code that leads.
struct Journal<'a>(&'a [Entry]);

impl Here for Journal<'_> {
    fn save_after(&self) -> Option<u64> {
        None
    }

    fn entries_after(&self, have: u64, most: usize) -> Option<Vec<Entry>> {
        Some(self.0.iter().skip(have as usize).take(most).cloned().collect())
    }
}

pub struct Launcher {
    pub name: String,
    pub machine: usize,
    pub member: Member,
    pub brain: Brain,
    pub client: Client,
    /// The connection to its leader.
    pub connection: Option<u64>,
    /// Whether it is about to connect.
    pub connects: bool,
    pub seat: Option<Seat>,
    /// Ranks that run or wait in their processes, with the attempt in which they run.
    pub living: BTreeMap<Rank, Attempt>,
    pub waiting: BTreeSet<Rank>,
    pub attempt: Attempt,
    pub had_ranks: bool,
    /// The step whose shards it brought to its ranks; whether it holds the shards that its ranks saved.
    pub brought: Option<(Attempt, mainstay_checkpoint::inventory::StepKey)>,
    pub holds: bool,
    pub journal: Vec<Entry>,
    pub timers: BTreeSet<Mono>,
    pub exit: Option<i32>,
    /// When its newest command will be done.
    pub busy_until: u64,
    pub over_since: Option<u64>,
}

impl Launcher {
    pub fn new(name: String, machine: usize, member: Member) -> Launcher {
        Launcher {
            name,
            machine,
            member,
            brain: Brain::Waits(None),
            client: Client::default(),
            connection: None,
            connects: false,
            seat: None,
            living: BTreeMap::new(),
            waiting: BTreeSet::new(),
            attempt: Attempt(0),
            had_ranks: false,
            brought: None,
            holds: false,
            journal: Vec::new(),
            timers: BTreeSet::new(),
            exit: None,
            busy_until: 0,
            over_since: None,
        }
    }

    pub fn runs(&self) -> bool {
        !matches!(self.brain, Brain::Gone)
    }

    /// Whether it accepts connections: each running launcher does.
    pub fn listens(&self) -> bool {
        self.runs()
    }

    /// Whether it would connect to this leader.
    pub fn wants(&self, leader: usize) -> bool {
        self.runs() && self.connects && self.client.leader.as_ref().is_some_and(|key| key.launcher == leader)
    }

    pub fn leads(&self) -> Option<&Lead> {
        match &self.brain {
            Brain::Leads(lead) if !lead.is_deposed() => Some(lead),
            _ => None,
        }
    }

    pub fn join(&self) -> Join {
        let (have, have_of) = match &self.brain {
            Brain::Follows(follow) => {
                let (have, of) = follow.have();
                (have, of.to_owned())
            }
            _ => ((0, 0), String::new()),
        };
        Join {
            protocol: PROTOCOL,
            launcher: self.name.clone(),
            host: self.member.host.clone(),
            address: self.member.address.clone(),
            node_rank: self.member.node_rank,
            ranks: self.member.ranks,
            replicas: self.member.replicas.clone(),
            implicated: self.member.implicated,
            domain: self.member.domain.clone(),
            listens: self.member.listens.clone(),
            moves: self.member.moves,
            prepares: self.member.prepares,
            hosts: HOSTS,
            have,
            have_of,
            ..Join::default()
        }
    }

    pub fn ranks(&self) -> Vec<Rank> {
        let first = self.seat.as_ref().map_or(0, |seat| seat.first_rank);
        (first..first + self.member.ranks).map(Rank).collect()
    }

    pub fn leader_now(&self) -> Option<Leads> {
        match &self.brain {
            Brain::Follows(follow) => Some(follow.leader().clone()),
            _ => None,
        }
    }
}

impl World {
    pub fn clock(&self, launcher: usize) -> Mono {
        self.machines[self.launchers[launcher].machine].clock(self.now)
    }

    pub fn stamp(&self, launcher: usize) -> Stamp {
        let wall = i64::try_from(self.now).expect("small");
        Stamp { mono: self.clock(launcher), wall: Wall(wall) }
    }

    pub fn named(&self, key: &LeaderKey) -> Leads {
        let leader = &self.launchers[key.launcher];
        Leads { launcher: leader.name.clone(), host: leader.member.host.clone(), epoch: key.epoch }
    }

    /// Carries out the acts of the launcher's code. The launcher may crash at each of them.
    pub fn settle(&mut self, me: usize) {
        loop {
            let now = self.clock(me);
            let crashes = self.crashes_now(me);
            let Launcher { brain, journal, .. } = &mut self.launchers[me];
            match brain {
                Brain::Leads(lead) => {
                    let Some(act) = lead.poll(now, &Journal(journal)) else { break };
                    if crashes {
                        return self.crash(me);
                    }
                    self.act_of_leader(me, act);
                }
                Brain::Follows(follow) => {
                    let Some(act) = follow.poll() else { break };
                    if crashes {
                        return self.crash(me);
                    }
                    self.act_of_follower(me, act);
                }
                Brain::Waits(_) | Brain::Gone => return,
            }
        }
    }

    /// Something happened on this launcher's host.
    pub fn saw(&mut self, me: usize, event: Event) {
        let at = self.clock(me);
        match &mut self.launchers[me].brain {
            Brain::Leads(lead) if lead.is_deposed() => {
                if is_end(&event) {
                    return self.ends(me, HANDS_BACK);
                }
            }
            Brain::Leads(lead) => lead.step(at, event),
            Brain::Follows(follow) if follow.is_cut_off() && is_end(&event) => {
                return self.ends(me, HANDS_BACK);
            }
            Brain::Follows(follow) => {
                assert!(!matches!(&event, Event::Fact(fact) if !concerns_all(fact)));
                follow.step(at, event);
            }
            Brain::Waits(_) | Brain::Gone => return,
        }
        self.settle(me);
    }

    pub fn stop_and_hand_back(&mut self, me: usize) {
        if self.launchers[me].living.is_empty() {
            return self.ends(me, HANDS_BACK);
        }
        let attempt = self.launchers[me].attempt;
        self.will_do(me, Command::Stop { attempt, why: StopWhy::Requested, save_after: None }, None);
    }

    pub fn heard_from_follower(&mut self, me: usize, connection: u64, up: Up) {
        let now = self.clock(me);
        match (&mut self.launchers[me].brain, up) {
            // Answered by the task of the connection.
            (_, Up::Beat { sent }) => self.send_down(connection, Wire::Message(Down::Beat { sent, at: now })),
            (Brain::Leads(lead), Up::Join(join)) => lead.joined(now, connection, &join),
            (Brain::Leads(lead), up) => lead.receive(now, connection, up),
            _ => {}
        }
        self.settle(me);
    }

    pub fn follower_gone(&mut self, me: usize, connection: u64, why: &str) {
        let now = self.clock(me);
        if let Brain::Leads(lead) = &mut self.launchers[me].brain {
            lead.gone(now, connection, why.to_owned());
        }
        self.settle(me);
    }

    /// The connection to the leader is established.
    pub fn opened(&mut self, me: usize) {
        self.trace(|world| format!("{} is connected", world.launchers[me].name));
        if let Brain::Follows(follow) = &mut self.launchers[me].brain {
            follow.connected();
        }
        self.beat(me);
        self.settle(me);
    }

    pub fn beat(&mut self, me: usize) {
        let sent = self.clock(me);
        if let Some(connection) = self.launchers[me].connection {
            self.send_up(connection, Wire::Message(Up::Beat { sent }));
        }
    }

    pub fn heard_from_leader(&mut self, me: usize, down: Down) {
        let received = self.clock(me);
        match &mut self.launchers[me].brain {
            Brain::Follows(follow) => follow.receive(received, down),
            Brain::Waits(Some(key)) => match down {
                Down::Welcome { seat, epoch, .. } => {
                    let key = key.clone();
                    let leads = Leads { epoch, ..self.named(&key) };
                    let launcher = &mut self.launchers[me];
                    let (name, clock) = (launcher.name.clone(), Mapping::default());
                    launcher.seat = Some(seat.clone());
                    let follow = Follow::new(received, name, leads, seat, LEASE_SPAN, clock, true);
                    launcher.brain = Brain::Follows(Box::new(follow));
                    self.ask(me, Ask::Say { seated: true, misses: None });
                }
                // It continues like one that has lost its seat, and is ready when it gets one.
                Down::Waiting { spare: Some(spare), .. } => {
                    let key = key.clone();
                    let leads = self.named(&key);
                    let launcher = &mut self.launchers[me];
                    let (name, clock) = (launcher.name.clone(), Mapping::default());
                    let follow = Follow::new(received, name, leads, spare.seat, LEASE_SPAN, clock, true);
                    launcher.brain = Brain::Follows(Box::new(follow.waiting()));
                }
                Down::Refused { .. } => self.ends(me, HANDS_BACK),
                _ => {}
            },
            Brain::Waits(None) | Brain::Leads(_) | Brain::Gone => {}
        }
        self.settle(me);
    }

    /// The connection to the leader failed or was lost.
    pub fn lost_leader(&mut self, me: usize, why: &str, refused: bool) {
        self.trace(|world| format!("{} has no connection: {why}", world.launchers[me].name));
        let now = self.clock(me);
        if let Brain::Follows(follow) = &mut self.launchers[me].brain {
            follow.disconnected(now, why, refused);
        }
        self.settle(me);
        self.reconnect(me);
    }

    pub fn close_to_leader(&mut self, me: usize) -> bool {
        let Some(connection) = self.launchers[me].connection.take() else { return false };
        self.end_as_follower(connection);
        true
    }

    pub fn reconnect(&mut self, me: usize) {
        let launcher = &mut self.launchers[me];
        if launcher.runs() && launcher.connection.is_none() && !launcher.connects {
            launcher.connects = true;
            let at = self.now + 50 * MS + MS * self.chance.below(300) as u64;
            self.at(at, Happening::Connects(me));
        }
    }

    /// Connects to the leader.
    pub fn connects(&mut self, me: usize) {
        let launcher = &self.launchers[me];
        let leader = match &launcher.brain {
            Brain::Follows(follow) => Some(self.launcher_named(&follow.leader().launcher)),
            Brain::Waits(Some(key)) => Some(key.launcher),
            _ => None,
        };
        match leader.filter(|_| launcher.connection.is_none()) {
            Some(leader) => self.connect(me, leader),
            None => self.launchers[me].connects = false,
        }
    }

    pub fn launcher_named(&self, name: &str) -> usize {
        self.launchers.iter().position(|launcher| launcher.name == name).expect("it is known")
    }

    /// A launcher checks its connections, the store and its timers.
    pub fn look(&mut self, me: usize) {
        self.look_at_connections(me);
        self.look_at_store(me);
        let (now, silent) = (self.clock(me), self.silent_for(me));
        let is_other = |key: &LeaderKey| key.launcher != me;
        let led = self.launchers[me].client.leader.as_ref().is_some_and(is_other);
        let due = self.launchers[me].timers.first().is_some_and(|at| *at <= now);
        if due {
            self.launchers[me].timers.pop_first();
        }
        match &mut self.launchers[me].brain {
            Brain::Leads(lead) => {
                if due && !lead.is_deposed() {
                    lead.step(now, Event::Wake);
                }
                lead.look(now, silent);
            }
            Brain::Follows(follow) => follow.look(now, silent, led),
            Brain::Waits(_) | Brain::Gone => {}
        }
        self.settle(me);
        self.reports_the_end(me);
    }

    /// A leader whose job is over waits up to 5 s for its followers, then writes the end to the store. It exits within
    /// 8 s.
    pub fn reports_the_end(&mut self, me: usize) {
        let now = self.now;
        let launcher = &mut self.launchers[me];
        let (Some(exit), Brain::Leads(lead)) = (launcher.exit, &mut launcher.brain) else { return };
        if lead.is_deposed() {
            return;
        }
        let since = *launcher.over_since.get_or_insert(now);
        if lead.awaits_followers() && now - since < 5 * SECOND {
            return;
        }
        if launcher.client.leads_in.is_some() && launcher.client.ends.is_none() {
            launcher.client.ends = Some(exit);
            lead.close_all();
            self.settle(me);
            self.look_at_store(me);
        } else if now - since >= 8 * SECOND {
            self.ends(me, exit);
        }
    }

    /// The launcher exits with its ranks.
    pub fn ends(&mut self, me: usize, exit: i32) {
        self.trace(|world| format!("{} exits with {exit}", world.launchers[me].name));
        self.check_exit(me, exit);
        self.resign(me);
        self.launchers[me].exit = Some(exit);
        self.gone(me);
    }

    /// The launcher is killed with its ranks.
    pub fn crash(&mut self, me: usize) {
        self.trace(|world| format!("{} is killed", world.launchers[me].name));
        self.launchers[me].exit = None;
        self.gone(me);
    }

    fn gone(&mut self, me: usize) {
        let launcher = &mut self.launchers[me];
        launcher.brain = Brain::Gone;
        launcher.living.clear();
        launcher.waiting.clear();
        launcher.timers.clear();
        (launcher.client.campaigns, launcher.client.leads_in) = (false, None);
        launcher.connection = None;
        self.end_all_of(me);
        self.will_respawn(me);
    }
}

fn is_end(event: &Event) -> bool {
    matches!(event, Event::Fact(Fact::AttemptEnded { .. }))
}

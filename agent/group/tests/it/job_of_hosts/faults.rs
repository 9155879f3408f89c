//! The simulated faults and their times.

use mainstay_group::round::Member;

use super::launcher::Brain;
use super::network::STORE;
use super::{Chance, Happening, LEASE, MS, SECOND, Time, World};

#[derive(Clone, Debug)]
pub enum Fault {
    /// A rank of this machine dies.
    RankDies(usize),
    /// The launcher on this machine is killed.
    LauncherDies(usize),
    /// The machine loses its power for this time.
    PowerCut(usize, Time),
    /// Nothing on the machine runs for this time, as in a hang of its kernel.
    Stalls(usize, Time),
    /// No message passes from the first machine (or the store) to the second for this time.
    Blocked(usize, usize, Time),
    Unblocked(usize, usize),
    /// The connection between the machine's launcher and its leader ends.
    Disconnects(usize),
    /// The store does not answer for this time.
    StoreAway(Time),
    StoreBack,
    /// The store loses all data.
    StoreWiped,
    PowerBack(usize),
}

impl World {
    /// Plans random faults over 10 s to 2 min, and then the end of all faults.
    pub fn plan_faults(&mut self, chance: &mut Chance) {
        let lasts = SECOND * (10 + chance.below(110) as Time);
        let count = 1 + chance.below(8);
        for _ in 0..count {
            let at = self.now + MS * chance.below((lasts / MS) as usize) as Time;
            let machine = chance.below(self.machines.len());
            let other = match chance.below(self.machines.len() + 1) {
                other if other == self.machines.len() || other == machine => STORE,
                other => other,
            };
            let longest = if chance.one_in(2) { 3_000 } else { 40_000 };
            let long = MS * chance.below(longest) as Time;
            let fault = match chance.below(11) {
                0 | 1 => Fault::RankDies(machine),
                2 => Fault::LauncherDies(machine),
                3 => Fault::PowerCut(machine, long),
                4 => Fault::Stalls(machine, long),
                5 => Fault::Blocked(machine, other, long),
                6 => Fault::Blocked(other, machine, long),
                7 => {
                    self.at(at, Happening::Fault(Fault::Blocked(machine, other, long)));
                    Fault::Blocked(other, machine, long)
                }
                8 => Fault::Disconnects(machine),
                9 => Fault::StoreAway(long),
                _ => Fault::StoreWiped,
            };
            self.at(at, Happening::Fault(fault));
        }
        self.crash_one_in = if chance.one_in(3) { 300 } else { 0 };
        self.at(self.now + lasts, Happening::Quiet);
    }

    pub fn fail(&mut self, fault: Fault) {
        let now = self.now;
        self.trace(|_| format!("{fault:?}"));
        match fault {
            Fault::RankDies(machine) => self.rank_dies(self.machines[machine].launcher),
            Fault::LauncherDies(machine) => {
                let launcher = self.machines[machine].launcher;
                if self.launchers[launcher].runs() {
                    self.crash(launcher);
                }
            }
            Fault::PowerCut(machine, long) => {
                self.machines[machine].up = false;
                let launcher = self.machines[machine].launcher;
                if self.launchers[launcher].runs() {
                    self.crash(launcher);
                }
                self.at(now + long, Happening::Fault(Fault::PowerBack(machine)));
            }
            Fault::PowerBack(machine) => {
                self.machines[machine].up = true;
                self.at(now + SECOND, Happening::Respawns(machine));
            }
            Fault::Stalls(machine, long) => self.machines[machine].stalled = now + long,
            Fault::Blocked(from, to, long) => {
                self.blocked.insert((from, to));
                self.at(now + long, Happening::Fault(Fault::Unblocked(from, to)));
            }
            Fault::Unblocked(from, to) => {
                self.blocked.remove(&(from, to));
                self.release();
            }
            Fault::Disconnects(machine) => {
                let launcher = self.machines[machine].launcher;
                if let Some(connection) = self.launchers[launcher].connection.take() {
                    self.end_as_follower(connection);
                    self.lost_leader(launcher, "it was reset", false);
                }
            }
            Fault::StoreAway(long) => {
                self.store.away = true;
                self.at(now + long, Happening::Fault(Fault::StoreBack));
            }
            Fault::StoreBack => self.store.away = false,
            Fault::StoreWiped => {
                // After a wipe, only what the launchers last read is left. If one that has not read the newest record
                // takes over, none can correct it. Two failures at once that lose the only copies are out of scope.
                let newest = self.store.record.clone();
                let knows = |launcher: &super::Launcher| {
                    let read = Some((launcher.client.highest_epoch, launcher.client.record.clone()));
                    let leads = launcher.leads().map(|lead| Some(lead.epoch()));
                    let up_to_date =
                        leads.map_or(read == newest, |epoch| epoch == newest.as_ref().map(|of| of.0));
                    !launcher.runs() || up_to_date
                };
                let leads = self.launchers.iter().filter(|launcher| launcher.leads().is_some()).count();
                if leads == 1 && self.store.ended.is_none() && self.launchers.iter().all(knows) {
                    self.trace(|_| "all knew what the store had".to_owned());
                    self.store.wipe();
                }
            }
        }
    }

    /// Delivers the events that were held up.
    fn release(&mut self) {
        for event in std::mem::take(&mut self.held_up) {
            let at = self.after_a_while();
            self.at(at, event);
        }
    }

    /// Ends all faults and repairs what failed.
    pub fn be_quiet(&mut self) {
        self.trace(|_| "quiet".to_owned());
        self.faults = false;
        self.crash_one_in = 0;
        self.quiet_since = Some(self.now);
        self.store.away = false;
        self.blocked.clear();
        self.release();
        for machine in &mut self.machines {
            machine.stalled = 0;
        }
        for machine in 0..self.machines.len() {
            if !std::mem::replace(&mut self.machines[machine].up, true) {
                self.at(self.now + SECOND, Happening::Respawns(machine));
            }
        }
        self.at(self.now + 20 * SECOND, Happening::RanksFinish);
    }

    pub fn crashes_now(&mut self, me: usize) -> bool {
        let others = self.launchers.iter().enumerate();
        let another = |(of, launcher): (usize, &super::Launcher)| {
            of != me && launcher.runs() && launcher.seat.is_some()
        };
        self.crash_one_in > 0 && self.chance.one_in(self.crash_one_in) && others.into_iter().any(another)
    }

    /// A launcher has ended. The scheduler starts another one on its machine.
    pub fn will_respawn(&mut self, me: usize) {
        let machine = self.launchers[me].machine;
        if self.respawns && self.machines[machine].launcher == me {
            let at = self.now + SECOND + MS * self.chance.below(4000) as Time;
            self.at(at, Happening::Respawns(machine));
        }
    }

    pub fn respawn(&mut self, machine: usize) {
        let before = &self.launchers[self.machines[machine].launcher];
        let done = self.exit.is_some() || self.store.ended.is_some();
        if before.runs() || done || !self.machines[machine].up || self.launchers.len() >= 60 {
            return;
        }
        let name = format!("{}+", before.name);
        let member = Member { launcher: name.clone(), leads: false, ..before.member.clone() };
        self.trace(|_| format!("{name} is started on {machine}"));
        self.launch(name, machine, member);
    }

    /// Whether any launcher can continue the job.
    fn goes_on(&self) -> bool {
        self.launchers.iter().any(|launcher| match &launcher.brain {
            Brain::Leads(_) => launcher.exit.is_none(),
            Brain::Follows(follow) => launcher.exit.is_none() && !follow.waits_for_a_seat(),
            Brain::Waits(_) | Brain::Gone => false,
        })
    }

    /// Runs until the job is over. Returns the number of leaders, or 0 if all launchers with a seat were lost.
    pub fn until_over(mut self) -> u32 {
        loop {
            if !self.goes_on() && self.exit.is_none() {
                // The scheduler starts the job again.
                return 0;
            }
            let running = self.launchers.iter().any(|launcher| launcher.runs() && launcher.seat.is_some());
            if self.exit.is_some() && !running {
                return self.leaders;
            }
            let quiet = self.quiet_since.map_or(0, |since| self.now - since);
            assert!(quiet < super::ENDS_WITHIN + LEASE, "it does not end: {}", self.reported());
            self.step();
        }
    }
}

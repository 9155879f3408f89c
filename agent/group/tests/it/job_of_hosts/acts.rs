//! The acts of a launcher for its code: messages, entries of its journal, and requests to the store.

use mainstay_group::electors::Missed;
use mainstay_group::follow::{self, CutOff};
use mainstay_group::lead::{self, Lead};
use mainstay_group::wire::Down;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::{Attempt, BootId, JobId};
use mainstay_model::observation::HostsEvent;
use mainstay_model::time::{Mono, Stamp, Wall};
use mainstay_recovery::protocol::{Command, StopWhy};

use super::launcher::Brain;
use super::network::Wire;
use super::store::Ask;
use super::{Happening, World};
use crate::support::cluster::restart_of;

impl World {
    pub fn act_of_leader(&mut self, me: usize, act: lead::Act) {
        self.trace(|world| format!("{} {}", world.launchers[me].name, leaders_line(&act)));
        match act {
            lead::Act::Send(connection, down) => {
                if let Down::Command { command: Command::Finish { exit, .. }, .. } = down {
                    self.check_told_end(me, exit);
                }
                self.send_down(connection, Wire::Message(down));
            }
            lead::Act::Close(connection) => self.end_as_leader(connection),
            lead::Act::Record(at, body) => self.record(me, at, None, body),
            lead::Act::Obey(Command::Consult(_)) => {
                let at = self.after_a_while();
                self.at(at, Happening::Ruled(me));
            }
            lead::Act::Obey(Command::Wake { at }) => {
                self.launchers[me].timers.insert(at);
            }
            lead::Act::Obey(command) => {
                if let Command::Finish { exit, .. } = command {
                    self.check_told_end(me, exit);
                }
                let epoch = self.launchers[me].leads().map_or(0, Lead::epoch);
                self.acts_in(epoch, me, &command);
                self.will_do(me, command, Some((epoch, me)));
            }
            lead::Act::Store(number, mut record) => {
                record.at = self.stamp(me);
                self.write(me, number, *record);
            }
            lead::Act::Campaign => {
                (self.launchers[me].client.leads_in, self.launchers[me].client.campaigns) = (None, true);
            }
            lead::Act::StepDown(lead::SteppedDown::Ended { exit }) => self.ends(me, exit),
            lead::Act::StepDown(_) => {
                self.resign(me);
                self.launchers[me].client.campaigns = false;
                self.stop_and_hand_back(me);
            }
            lead::Act::Print(_) | lead::Act::Finished(..) | lead::Act::Seen(..) | lead::Act::Meet { .. } => {}
        }
    }

    pub fn act_of_follower(&mut self, me: usize, act: follow::Act) {
        self.trace(|world| format!("{} {}", world.launchers[me].name, followers_line(&act)));
        match act {
            follow::Act::Send(up) => {
                if let Some(connection) = self.launchers[me].connection {
                    self.send_up(connection, Wire::Message(up));
                }
            }
            follow::Act::Close => {
                if self.close_to_leader(me) {
                    // The task of the connection reports it and makes a new connection.
                    let at = self.after_a_while();
                    self.at(at, Happening::Closed(me));
                }
            }
            follow::Act::Obey(command) => {
                let leads = self.launchers[me].leader_now().expect("it follows");
                let by = self.launcher_named(&leads.launcher);
                self.acts_in(leads.epoch, by, &command);
                self.will_do(me, command, Some((leads.epoch, by)));
            }
            follow::Act::Entry { seq, at, body, .. } => self.record(me, at.mono, Some(seq), body),
            follow::Act::Campaign => self.launchers[me].client.campaigns = true,
            follow::Act::StandDown => self.launchers[me].client.campaigns = false,
            follow::Act::RemoveLeader => {
                let leads = self.launchers[me].leader_now().expect("it follows");
                let key = self.launchers[me].client.leader.clone();
                if let Some(leader) = key.filter(|key| self.launchers[key.launcher].name == leads.launcher) {
                    self.ask(me, Ask::Remove { leader });
                }
            }
            follow::Act::LookAtLeader => {
                let leads = self.launchers[me].leader_now().expect("it follows");
                if self.launchers[me].client.has_vote {
                    let look = Command::Look { launcher: leads.launcher, address: String::new() };
                    self.will_do(me, look, None);
                }
            }
            follow::Act::MissLeader(misses) => {
                let key = self.launchers[me].client.leader.clone().filter(|_| misses);
                let misses = key.map(|key| Missed {
                    launcher: self.launchers[key.launcher].name.clone(),
                    epoch: key.epoch,
                });
                self.ask(me, Ask::Say { seated: true, misses });
            }
            follow::Act::Connect => {
                self.close_to_leader(me);
                self.reconnect(me);
            }
            follow::Act::CutOff(why) => {
                if why == CutOff::NoRecord {
                    self.check_nobody_can_lead(me);
                }
                self.stop_and_hand_back(me);
            }
            follow::Act::LeftSeat => {
                self.launchers[me].seat = None;
                self.ask(me, Ask::Say { seated: false, misses: None });
                if !self.launchers[me].living.is_empty() {
                    let attempt = self.launchers[me].attempt;
                    let why = StopWhy::Dismissed;
                    self.will_do(me, Command::Stop { attempt, why, save_after: None }, None);
                }
            }
            follow::Act::TookSeat => self.ask(me, Ask::Say { seated: true, misses: None }),
            follow::Act::Print(_) | follow::Act::Meet { .. } => {}
        }
    }

    fn record(&mut self, me: usize, at: Mono, origin_seq: Option<u64>, body: Body) {
        if origin_seq.is_none() {
            if let Body::Decision(decision) = &body {
                self.counted.extend(restart_of(&decision.action));
            }
            if let (Body::Fact(Fact::Observed(seen)), Some(lead)) = (&body, self.launchers[me].leads())
                && HostsEvent::WorldGrows.is(seen)
            {
                self.grown += 1;
                self.counted.insert(Attempt(lead.merge().attempt().0 + 1));
            }
        }
        let launcher = &mut self.launchers[me];
        let entry = Entry {
            seq: launcher.journal.len() as u64 + 1,
            at: Stamp { mono: at, wall: Wall(0) },
            boot: BootId(String::new()),
            job: Some(JobId("job".to_owned())),
            origin_seq,
            body,
        };
        if let Brain::Leads(lead) = &mut launcher.brain {
            lead.keep_recent(&entry);
        }
        launcher.journal.push(entry);
    }
}

fn leaders_line(act: &lead::Act) -> String {
    match act {
        lead::Act::Send(to, Down::Entry { seq, .. }) => format!("-> {to} entry {seq}"),
        act => short(act),
    }
}

fn followers_line(act: &follow::Act) -> String {
    match act {
        follow::Act::Entry { seq, .. } => format!("has entry {seq}"),
        act => short(act),
    }
}

fn short(what: &impl std::fmt::Debug) -> String {
    format!("{what:?}").chars().take(180).collect()
}

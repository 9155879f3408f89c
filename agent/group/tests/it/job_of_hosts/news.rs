//! News from the store for a launcher: who leads, that it was elected, what is stored, and that the job has ended.

use std::sync::Arc;

use mainstay_group::follow::Leads;
use mainstay_group::lead::{self, Lead};
use mainstay_group::predecessor::Predecessor;
use mainstay_group::record::Record;
use mainstay_group::succession::Adopted;
use mainstay_model::entry::JobSpec;
use mainstay_model::time::Span;

use super::launcher::Brain;
use super::store::LeaderKey;
use super::{LEASE_SPAN, LOOKS_EVERY, PATIENCE, World, expected, settings};

impl World {
    /// The store names the leader.
    pub fn told_of_leader(&mut self, me: usize, leader: Option<LeaderKey>) {
        self.launchers[me].client.leader.clone_from(&leader);
        let (Some(key), now) = (leader, self.clock(me)) else { return };
        let named = self.named(&key);
        let launcher = &mut self.launchers[me];
        let newest = launcher.journal.len() as u64;
        match &mut launcher.brain {
            Brain::Leads(lead) => lead.led_by(&named.launcher, &named.host, named.epoch),
            Brain::Follows(follow) => follow.led_by(now, named, newest),
            Brain::Waits(known) if *known != Some(key.clone()) => {
                launcher.brain = Brain::Waits(Some(key));
                self.close_to_leader(me);
                self.reconnect(me);
            }
            Brain::Waits(_) | Brain::Gone => {}
        }
        self.settle(me);
    }

    /// The store no longer knows this leader.
    pub fn forgotten(&mut self, me: usize, epoch: u64) {
        self.launchers[me].client.leads_in = None;
        let leader = self.launchers[me].client.leader.clone().map(|key| self.named(&key));
        if let Brain::Leads(lead) = &mut self.launchers[me].brain {
            lead.forgotten(epoch);
            if let Some(Leads { launcher, host, epoch }) = leader {
                lead.led_by(&launcher, &host, epoch);
            }
        }
        self.settle(me);
    }

    pub fn stored(&mut self, me: usize, number: u64) {
        let now = self.clock(me);
        if let Brain::Leads(lead) = &mut self.launchers[me].brain {
            lead.stored(now, number);
        }
        self.settle(me);
    }

    pub fn told_of_the_end(&mut self, me: usize, exit: i32) {
        let ends = match &mut self.launchers[me].brain {
            Brain::Follows(follow) => !follow.is_connected() && !follow.is_cut_off(),
            Brain::Waits(_) => true,
            Brain::Leads(lead) => {
                lead.ended(exit);
                false
            }
            Brain::Gone => false,
        };
        self.settle(me);
        if ends {
            self.ends(me, exit);
        }
    }

    /// The store has elected this launcher.
    pub fn elected(&mut self, me: usize, epoch: u64, last: Option<u64>, record: Option<Arc<Record>>) {
        let now = self.clock(me);
        match &mut self.launchers[me].brain {
            Brain::Leads(lead) if !lead.is_deposed() => lead.elected(epoch, last),
            Brain::Follows(follow) => {
                let takes_over = follow.takes_over(now, record.as_deref());
                match record.filter(|_| takes_over) {
                    Some(record) => self.take_over(me, epoch, &record),
                    None => self.resign(me),
                }
            }
            _ => self.resign(me),
        }
        self.settle(me);
    }

    fn take_over(&mut self, me: usize, epoch: u64, record: &Record) {
        self.trace(|world| format!("{} takes over in {epoch}", world.launchers[me].name));
        let now = self.stamp(me);
        let launcher = &mut self.launchers[me];
        let Brain::Follows(follow) = std::mem::replace(&mut launcher.brain, Brain::Gone) else { return };
        let seat = launcher.seat.as_ref().map_or(0, |seat| seat.group_rank);
        let adopted = Adopted::from_record(record, seat, launcher.member.clone(), launcher.attempt, now);
        let seat = adopted.me;
        let world_size = record.seats[0].seat.world_size;
        let spec = JobSpec { world_size, ..JobSpec::default() };
        let (job, merge) = adopted.resume(now.mono, spec, settings(), PATIENCE);
        let leader_settings = lead::LeaderSettings {
            seat,
            launcher: launcher.name.clone(),
            names: (record.job.clone(), record.launch.clone()),
            expected: expected(),
            lease: LEASE_SPAN,
            looks_every: Span(LOOKS_EVERY),
            epoch,
            newest_record: 1,
            has_store: true,
        };
        let merge = merge.within(self.limits, &leader_settings.launcher);
        let mut lead = Lead::new(now.mono, job, merge, leader_settings);
        let since = follow.since() as usize;
        let newest = launcher.journal.len() as u64;
        let before = follow.leader().launcher.clone();
        lead.replaces(Predecessor::new(before, &launcher.journal[since.min(newest as usize)..], newest));
        lead.continue_from(now.mono, &adopted, record.ended, follow.into_log());
        launcher.brain = Brain::Leads(Box::new(lead));
        launcher.exit = record.ended.or(launcher.exit);
        self.leaders += 1;
        self.close_to_leader(me);
        if self.launchers[me].exit.is_some() {
            self.reports_the_end(me);
        }
    }

    /// Most of the members that have a vote miss the leader.
    pub fn leader_is_missed(&mut self, me: usize) {
        if let Brain::Follows(follow) = &mut self.launchers[me].brain {
            follow.leader_is_missed();
        }
        self.settle(me);
    }
}

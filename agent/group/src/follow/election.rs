//! Changes of the leader: when a follower stands for election, whether it can lead, whom it follows next, and when it
//! stops following.

use super::{Act, CutOff, Follow, Leads, REPORTS};
use crate::clock::Mapping;
use crate::lost::LivenessMonitor;
use crate::record::Record;
use crate::sequence::{Inbox, Outbox};
use crate::succession::{OnElection, OnLeader};
use mainstay_model::time::{Mono, Span};

/// How many leases a launcher that the store answers waits for another leader.
const LEASES: u64 = 3;

/// A leader is dead when its host has refused this many connections after a successful one. A single refusal may come
/// from a firewall that is being reloaded.
const REFUSALS: u32 = 2;

impl Follow {
    /// A launcher without a seat does not know the job well enough to lead it.
    pub(super) fn campaign(&mut self) {
        if !self.waits && !self.cannot_lead {
            self.acts.push_back(Act::Campaign);
        }
    }

    /// A leader was connected, and no process listens at its port any more: it is dead, because it holds the port as
    /// long as it is alive. Its lease would last some seconds longer.
    pub(super) fn refused(&mut self) {
        let Some(refusals) = &mut self.refusals else { return };
        *refusals += 1;
        if *refusals == REFUSALS {
            self.acts.push_back(Act::RemoveLeader);
        }
    }

    /// The store names a leader. `newest`: the newest entry of the local journal.
    pub fn led_by(&mut self, now: Mono, leader: Leads, newest: u64) {
        match self.standing().on_leader(&self.me, &leader.launcher, leader.epoch) {
            OnLeader::NewEpoch => {
                (self.leader.epoch, self.cannot_lead) = (leader.epoch, false);
                // What was published concerns the epoch before.
                self.miss_leader(false);
            }
            OnLeader::Follow => {
                let message = format!("host {} leads the job now (epoch {})", leader.host, leader.epoch);
                self.acts.push_back(Act::Print(message));
                (self.open, self.gone, self.since, self.past) = (false, Some(now), newest, 0);
                (self.outbox, self.inbox) = (Outbox::new(REPORTS), Inbox::default());
                (self.clock, self.catches_up, self.stops) = (Mapping::default(), true, false);
                (self.refusals, self.leader, self.cannot_lead) = (None, leader, false);
                self.vital = LivenessMonitor::expected(now, self.lease);
                self.miss_leader(false);
                self.acts.push_back(Act::Connect);
            }
            OnLeader::Nothing | OnLeader::StepDown => {}
        }
    }

    /// Whether this launcher, which was elected, takes over with this record of the lost leader. If not, it returns
    /// the office to the store: the leader is alive after all, or another launcher knows more of the job.
    pub fn takes_over(&mut self, now: Mono, record: Option<&Record>) -> bool {
        if self.cut_off || self.waits {
            return false;
        }
        if self.standing().on_election(self.is_connected(), None) != OnElection::TakeOver {
            return false;
        }
        let has_seat = |record: &Record| record.seats.iter().any(|seated| seated.member.launcher == self.me);
        match record.map(has_seat) {
            Some(true) => return true,
            // Another host may have its ranks by now.
            Some(false) if self.runs => self.cut_off(CutOff::Replaced),
            // It has joined only recently, or the store was wiped before it read the record.
            Some(false) | None => self.leave_office_to_others(now),
        }
        false
    }

    /// Launchers that have followed for longer have a record with their seats.
    fn leave_office_to_others(&mut self, now: Mono) {
        (self.cannot_lead, self.gone) = (true, Some(now));
        self.acts.push_back(Act::StandDown);
        let message = "this host was elected, but has no record of the job in which it has a place; it waits for another \
                    host to lead";
        self.acts.push_back(Act::Print(message.to_owned()));
    }

    /// To be called as time passes. A follower that is cut off from the leader ends: others may have its ranks by
    /// now. While the store answers, the leader may be lost before its lease has expired: a store that elects its own
    /// leader extends leases. `silent`: how long the store has not answered; `led`: whether it names another leader.
    pub fn look(&mut self, now: Mono, silent: Option<Span>, led: bool) {
        if !self.cut_off && !self.waits && silent.is_none() {
            self.look_at_leader(now);
        }
        let Some(gone) = self.gone.filter(|_| !self.cut_off).map(|since| now.since(since)) else { return };
        if gone < self.lease {
            return;
        }
        let waits = match silent {
            Some(silent) => silent < self.lease,
            // Some followers do not stand for election. The others do as long as no launcher leads.
            None => {
                (!led && !self.waits && !self.cannot_lead) || gone.0 < LEASES.saturating_mul(self.lease.0)
            }
        };
        if waits && silent.is_none() && !led {
            // The launcher that was last named as the leader may have returned the office, even if it still answers.
            self.campaign();
        }
        if !waits {
            let elects = silent.is_none() && !led;
            self.cut_off(if elects && self.cannot_lead { CutOff::NoRecord } else { CutOff::NoLeader });
        }
    }

    /// Stops following.
    pub fn cut_off(&mut self, why: CutOff) {
        self.cut_off = true;
        self.acts.push_back(Act::StandDown);
        self.acts.push_back(Act::CutOff(why));
    }
}

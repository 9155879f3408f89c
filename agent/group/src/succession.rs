//! How a launcher reacts to news about the leader: it follows, continues to lead, takes over, or steps down. Pure:
//! the launcher acts on the result, and so does the simulation of changing leaders.

use mainstay_model::entry::JobSpec;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_recovery::job::{HandoverState, Job};
use mainstay_recovery::policy::Settings;

use super::merge::Merge;
use super::record::Record;
use super::round::{Member, Seated};

/// The role that a launcher believes it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeadershipRole<'a> {
    /// It leads.
    Leads {
        /// The epoch of its orders.
        epoch: u64,
    },
    /// It follows another launcher.
    Follows {
        /// The leader.
        leader: &'a str,
        /// Orders of a lower epoch are refused.
        epoch: u64,
    },
}

/// The reaction when the store names a leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLeader {
    /// Already known, or older than what is known.
    Nothing,
    /// The leader that it follows was elected again: orders of its earlier epochs are refused.
    NewEpoch,
    /// Another leader: follow it from now on.
    Follow,
    /// It no longer leads: its ranks are stopped.
    StepDown,
}

/// The reaction to being elected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnElection {
    /// Its leader is alive after all: return the office.
    GiveBack,
    /// Continue from the record of the lost leader.
    TakeOver,
    /// It has led all the time, and the store lost that: write its contents again.
    LeadAgain,
    /// Another launcher has led in the meantime: its own state is outdated.
    StepDown,
}

impl LeadershipRole<'_> {
    /// The store names `leader` with `epoch`; `me` is this launcher.
    pub fn on_leader(self, me: &str, leader: &str, epoch: u64) -> OnLeader {
        match self {
            _ if leader == me => OnLeader::Nothing,
            LeadershipRole::Leads { epoch: mine } if epoch > mine => OnLeader::StepDown,
            LeadershipRole::Follows { epoch: known, .. } if epoch <= known => OnLeader::Nothing,
            LeadershipRole::Follows { leader: known, .. } if known == leader => OnLeader::NewEpoch,
            LeadershipRole::Follows { .. } => OnLeader::Follow,
            LeadershipRole::Leads { .. } => OnLeader::Nothing,
        }
    }

    /// This launcher was elected. `connected`: to the leader that it follows; `last`: the epoch of the record in the
    /// store.
    pub fn on_election(self, connected: bool, last: Option<u64>) -> OnElection {
        match self {
            LeadershipRole::Leads { epoch } if last.is_some_and(|last| last > epoch) => OnElection::StepDown,
            LeadershipRole::Leads { .. } => OnElection::LeadAgain,
            LeadershipRole::Follows { .. } if connected => OnElection::GiveBack,
            LeadershipRole::Follows { .. } => OnElection::TakeOver,
        }
    }

    /// Whether to obey an order of this epoch. A lower epoch belongs to a leader that was replaced.
    pub fn obeys(self, order: u64) -> bool {
        match self {
            LeadershipRole::Leads { epoch } | LeadershipRole::Follows { epoch, .. } => order >= epoch,
        }
    }
}

/// The state from which a launcher takes over.
#[derive(Clone, Debug)]
pub struct Adopted {
    /// The seats of all members.
    pub seats: Vec<Seated>,
    /// The newest attempt that may have started anywhere.
    pub attempt: Attempt,
    /// Whether all of its ranks have started.
    pub running: bool,
    /// The seat of the lost leader, if it is another host.
    pub lost: Option<Seated>,
    /// The seat of the launcher that takes over.
    pub me: u32,
    carried: Option<HandoverState>,
}

impl Adopted {
    /// Adopts a record. `seat` and `member` are this launcher's, which may have got its seat after the record was
    /// written. `here` is the newest attempt that it knows, which the leader may have started after it wrote the
    /// record.
    pub fn from_record(record: &Record, seat: u32, member: Member, here: Attempt, now: Stamp) -> Adopted {
        let mut seats = record.seats.clone();
        // Changed seats are stored before hosts are informed.
        let known = seats.iter().find(|seated| seated.member.launcher == member.launcher);
        let seat = known.map_or(seat, |seated| seated.seat.group_rank);
        if let Some(mine) = seats.get_mut(seat as usize) {
            mine.member = member;
        }
        let attempt = record.attempt.max(here);
        let mut carried = record.carried_here(now);
        if let Some(carried) = &mut carried {
            carried.attempt = attempt;
        }
        let lost = seats.iter().find(|seated| seated.member.launcher == record.leader).cloned();
        let running = record.running && record.attempt >= here;
        Adopted { seats, attempt, running, lost, me: seat, carried }
    }

    /// The job and its hosts, as far as the record contains them. Hosts report again what they have seen.
    pub fn resume(
        &self,
        at: Mono,
        spec: JobSpec,
        policy: impl Into<Settings>,
        patience: Span,
    ) -> (Job, Merge) {
        let merge = Merge::resume(self.seats.clone(), patience, self.attempt, self.running);
        let world_size = self.seats.first().map_or(spec.world_size, |seated| seated.seat.world_size);
        let spec = JobSpec { world_size, ..spec };
        let ranks: Vec<Rank> = merge.ranks().iter().map(|started| started.rank).collect();
        (Job::resume(at, spec, policy, self.carried.clone(), &ranks), merge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOLLOWS: LeadershipRole<'_> = LeadershipRole::Follows { leader: "a", epoch: 3 };

    #[test]
    fn a_follower_follows_the_leader_with_a_higher_epoch() {
        let reaction = |leader, epoch| FOLLOWS.on_leader("me", leader, epoch);
        assert_eq!(reaction("a", 3), OnLeader::Nothing);
        assert_eq!(reaction("a", 4), OnLeader::NewEpoch);
        assert_eq!(reaction("b", 4), OnLeader::Follow);
        assert_eq!(reaction("b", 3), OnLeader::Nothing, "it is older than what is known");
        assert_eq!(reaction("me", 4), OnLeader::Nothing, "its own election is told by itself");
    }

    #[test]
    fn a_leader_steps_down_for_a_higher_epoch_only() {
        let leads = LeadershipRole::Leads { epoch: 3 };
        assert_eq!(leads.on_leader("me", "b", 4), OnLeader::StepDown);
        assert_eq!(leads.on_leader("me", "b", 2), OnLeader::Nothing);
        assert_eq!(leads.on_election(false, Some(4)), OnElection::StepDown);
        assert_eq!(leads.on_election(false, Some(3)), OnElection::LeadAgain);
        assert_eq!(leads.on_election(false, None), OnElection::LeadAgain, "the store was wiped");
    }

    #[test]
    fn a_follower_takes_over_only_from_a_lost_leader() {
        assert_eq!(FOLLOWS.on_election(true, Some(3)), OnElection::GiveBack);
        assert_eq!(FOLLOWS.on_election(false, Some(3)), OnElection::TakeOver);
    }

    #[test]
    fn orders_of_a_leader_that_was_replaced_are_refused() {
        assert!(FOLLOWS.obeys(3) && FOLLOWS.obeys(4) && !FOLLOWS.obeys(2));
    }
}

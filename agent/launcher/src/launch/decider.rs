//! The decider of the job: this launcher, or the leader on another host.
//!
//! Every event on this host goes through `step`, and every action for this host comes out as a [`Task`].

mod launcher;

use mainstay_group::wire::Command;
use mainstay_model::id::{Pid, Rank};
use mainstay_model::time::Mono;
use mainstay_progress::monitor::Pace;
use mainstay_recovery::job::{Job, Order, Summary};

use crate::hosts::Token;
use crate::launch::following::Following;
use crate::launch::hang::Judge;
use crate::launch::leading::Leading;

/// The decider.
#[derive(Debug)]
pub(super) enum Decider {
    Leading(Box<Leading>),
    Following(Box<Following>),
    /// While a follower becomes the leader, and after the end.
    Gone,
}

/// A task for this launcher.
#[derive(Clone, Debug)]
pub(super) enum Task {
    /// An order of the job that concerns only the leader's launcher.
    Order(Order),
    /// An order of a leader.
    Command(Command),
}

impl Decider {
    /// The job, if it is decided here.
    pub(super) fn job(&self) -> Option<&Job> {
        match self {
            Decider::Leading(leading) => Some(leading.lead.job()),
            Decider::Following(_) | Decider::Gone => None,
        }
    }

    pub(super) fn job_mut(&mut self) -> Option<&mut Job> {
        match self {
            Decider::Leading(leading) => Some(leading.lead.job_mut()),
            Decider::Following(_) | Decider::Gone => None,
        }
    }

    /// The process of the coordination store that runs on this host.
    pub(super) fn store_process(&self) -> Option<Pid> {
        match self {
            Decider::Leading(leading) => leading.remote.as_ref()?.store_session.store_process(),
            Decider::Following(following) => following.store_session.store_process(),
            Decider::Gone => None,
        }
    }

    /// Whether launchers of other hosts take part, or may.
    pub(super) fn has_other_hosts(&self) -> bool {
        match self {
            Decider::Leading(leading) => leading.remote.is_some(),
            Decider::Following(_) => true,
            Decider::Gone => false,
        }
    }

    pub(super) fn pace(&self, rank: Rank) -> Pace {
        self.job().map(|job| job.pace(rank)).unwrap_or_default()
    }

    /// The proof that this launcher and the others of the job show each other.
    pub(super) fn token(&self) -> Option<Token> {
        match self {
            Decider::Leading(leading) => Some(leading.remote.as_ref()?.store_session.token.clone()),
            Decider::Following(following) => Some(following.store_session.token.clone()),
            Decider::Gone => None,
        }
    }

    /// Sets which ranks are judged here: those of all hosts if this launcher leads.
    pub(super) fn judge_hangs_with(&self, judge: &mut Judge, at: Mono) {
        match self {
            Decider::Leading(leading) if leading.remote.is_some() => {
                judge.judge_all(leading.lead.seats(), at)
            }
            Decider::Following(following) => {
                judge.judged_by_leader(following.follow.seat().group_world_size);
            }
            Decider::Leading(_) | Decider::Gone => {}
        }
    }

    /// How the job went, if this launcher or its leader has accounted it to the end.
    pub(super) fn summary(&self, at: Mono, exit: i32) -> Option<Summary> {
        match self {
            Decider::Leading(leading) if leading.lead.is_deposed() => {
                Some(Summary { exit, reason: self.reason(), ..leading.lead.job().summary(at) })
            }
            Decider::Following(following) => following.summary.clone(),
            Decider::Leading(_) | Decider::Gone => self.job().map(|job| job.summary(at)),
        }
    }

    /// Why this launcher ends before the job, or without knowing how the job ended.
    pub(super) fn reason(&self) -> String {
        let cut_off = match self {
            Decider::Following(following) => following.cut_off.clone(),
            Decider::Leading(_) => Some("another launcher leads the job, or this host is cut off".to_owned()),
            Decider::Gone => None,
        };
        cut_off.unwrap_or_else(|| "the leader of the job was lost".to_owned())
    }
}

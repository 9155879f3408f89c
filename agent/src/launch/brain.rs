//! The decider of the job: this launcher alone, this launcher for several hosts, or the leader on another host.
//!
//! Every event on this host goes through `step`, and every action for this host comes out as a [`Task`]. With one host the
//! job is driven directly.

mod launcher;

use mainstay_core::base::id::{Pid, Rank};
use mainstay_core::base::time::Mono;
use mainstay_core::progress::goodput::Ledger;
use mainstay_core::progress::monitor::Pace;
use mainstay_core::recovery::hosts::wire::Command;
use mainstay_core::recovery::job::{Job, Order, Summary};

use crate::hosts::Token;
use crate::launch::following::Following;
use crate::launch::leading::Leading;

/// The decider.
#[derive(Debug)]
pub(super) enum Brain {
    Alone(Box<Job>),
    Leading(Box<Leading>),
    Following(Box<Following>),
    /// While a follower becomes the leader, and after the end.
    Gone,
}

/// A task for this launcher.
#[derive(Clone, Debug)]
pub(super) enum Task {
    /// An order of the job on this host alone, or one that means the same on each host.
    Order(Order),
    /// An order of a leader.
    Command(Command),
}

impl Brain {
    /// The job, if it is decided here.
    pub(super) fn job(&self) -> Option<&Job> {
        match self {
            Brain::Alone(job) => Some(job),
            Brain::Leading(leading) => Some(leading.lead.job()),
            Brain::Following(_) | Brain::Gone => None,
        }
    }

    pub(super) fn job_mut(&mut self) -> Option<&mut Job> {
        match self {
            Brain::Alone(job) => Some(job),
            Brain::Leading(leading) => Some(leading.lead.job_mut()),
            Brain::Following(_) | Brain::Gone => None,
        }
    }

    /// The process of the coordination store that runs on this host.
    pub(super) fn store_process(&self) -> Option<Pid> {
        match self {
            Brain::Leading(leading) => leading.meeting.store_process(),
            Brain::Following(following) => following.meeting.store_process(),
            Brain::Alone(_) | Brain::Gone => None,
        }
    }

    pub(super) fn pace(&self, rank: Rank) -> Pace {
        self.job().map(|job| job.pace(rank)).unwrap_or_default()
    }

    /// The proof that this launcher and the others of the job show each other.
    pub(super) fn token(&self) -> Option<Token> {
        match self {
            Brain::Leading(leading) => Some(leading.meeting.token.clone()),
            Brain::Following(following) => Some(following.meeting.token.clone()),
            Brain::Alone(_) | Brain::Gone => None,
        }
    }

    /// How the job went.
    pub(super) fn summary(&self, at: Mono, exit: i32) -> Summary {
        let reported = match self {
            Brain::Leading(leading) if leading.lead.is_deposed() => {
                let reason = "another launcher leads the job, or this host is cut off".to_owned();
                Some(Summary { exit, reason, ..leading.lead.job().summary(at) })
            }
            Brain::Following(following) => following.summary.clone(),
            Brain::Alone(_) | Brain::Leading(_) | Brain::Gone => self.job().map(|job| job.summary(at)),
        };
        reported.unwrap_or_else(|| {
            let cut_off = match self {
                Brain::Following(following) => following.cut_off.clone(),
                _ => None,
            };
            let reason = cut_off.unwrap_or_else(|| "the leader of the job was lost".to_owned());
            let books = Ledger::open(at).books(at);
            Summary { exit, reason, attempts: 0, books, incidents: Vec::new(), saving: None }
        })
    }
}

//! What people order for the job, and how it goes into the journal: who, what and why, before anything is done.

use mainstay_core::base::id::Rank;
use mainstay_core::model::entry::Fact;
use mainstay_core::model::observation::{Observation, Weight};
use mainstay_core::recovery::job::{ORDERS, RANK_EXCLUDED, RESTART_ORDERED};
use tokio::sync::oneshot;

use crate::act::rank_processes::RankProcess;
use crate::launch::drill::Injected;
use crate::launch::shell::Launcher;

/// An order with who gave it.
#[derive(Debug)]
pub struct Ordered {
    /// The user, on the kernel's word.
    pub uid: u32,
    /// Why.
    pub reason: String,
    /// What.
    pub order: JobOrder,
    /// Done, or refused.
    pub answer: oneshot::Sender<Result<(), Refused>>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum JobOrder {
    /// All ranks are stopped and started anew.
    Restart,
    /// The job ends.
    Stop,
    /// The GPU of a rank is not used by the job any more.
    Exclude(Rank),
    /// Something is done to a rank, for a drill.
    Inject(Injected, Rank),
}

/// Why an order is not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is nothing to do it to.
    #[error("not now: {0}")]
    NotNow(&'static str),
    /// The job takes no injected faults.
    #[error("this job takes no injected faults: start it with `mainstay run --allow-inject`")]
    NotAllowed,
    /// The rank does not run.
    #[error("{0} does not run")]
    NoSuchRank(Rank),
    /// It cannot be done in this job.
    #[error("{0}")]
    NotHere(String),
}

/// The order as it stands in the journal.
fn observed(uid: u32, reason: &str, order: JobOrder) -> Fact {
    let (event, what) = match order {
        JobOrder::Restart => (RESTART_ORDERED, "to restart all ranks".to_owned()),
        JobOrder::Stop => ("stop_ordered", "to stop the job".to_owned()),
        JobOrder::Exclude(rank) => (RANK_EXCLUDED, format!("to use the GPU of {rank} no more")),
        JobOrder::Inject(fault, rank) => ("fault_injected", format!("to {fault} {rank}, for a drill")),
    };
    let mut values = vec![("uid".to_owned(), uid.to_string()), ("reason".to_owned(), reason.to_owned())];
    if let JobOrder::Inject(fault, _) = order {
        values.push(("fault".to_owned(), fault.word().to_owned()));
    }
    if let JobOrder::Exclude(rank) | JobOrder::Inject(_, rank) = order {
        values.push(("rank".to_owned(), rank.0.to_string()));
    }
    Fact::Observed(Observation {
        component: ORDERS.to_owned(),
        event: event.to_owned(),
        weight: Weight::Warning,
        detail: format!("user {uid} ordered {what}: {reason}"),
        values: values.into_iter().collect(),
    })
}

impl Launcher {
    /// Carries out what a person orders. It goes into the journal before it is done.
    pub(super) fn ordered(&mut self, ordered: Ordered) {
        let Ordered { uid, reason, order, answer } = ordered;
        // Whoever ordered may have gone; it is done all the same.
        let _ = answer.send(self.obey(uid, &reason, order));
    }

    fn obey(&mut self, uid: u32, reason: &str, order: JobOrder) -> Result<(), Refused> {
        let runs = |rank: &RankProcess| rank.exit.is_none();
        let of = |wanted: Rank| self.ranks.iter().find(|rank| rank.rank == wanted && runs(rank));
        let being_stopped = self.stop.is_some() || !self.ranks.iter().any(runs);
        match order {
            JobOrder::Restart | JobOrder::Exclude(_) if being_stopped => {
                Err(Refused::NotNow("no ranks run, or they are being stopped already"))
            }
            JobOrder::Stop if self.asked_by.is_some() || self.leave_within.is_some() => {
                Err(Refused::NotNow("the job is being stopped already"))
            }
            JobOrder::Inject(..) if !self.settings.allow_inject => Err(Refused::NotAllowed),
            JobOrder::Inject(_, rank) | JobOrder::Exclude(rank) if of(rank).is_none() => {
                Err(Refused::NoSuchRank(rank))
            }
            JobOrder::Restart => {
                self.fact(observed(uid, reason, order));
                Ok(())
            }
            JobOrder::Stop => {
                self.fact(observed(uid, reason, order));
                self.asked_by = Some(nix::libc::SIGTERM);
                let (by, exit) = (format!("user {uid} ({reason})"), 128 + nix::libc::SIGTERM);
                self.fact(Fact::StopRequested { by, exit });
                Ok(())
            }
            JobOrder::Exclude(rank) => {
                let left = of(rank).map(|process| self.crew.devices_without(process.local_rank));
                let left = left.ok_or(Refused::NoSuchRank(rank))?.map_err(Refused::NotHere)?;
                self.fact(observed(uid, reason, order));
                self.crew.devices = Some(left);
                Ok(())
            }
            JobOrder::Inject(fault, rank) => {
                self.can_inject(fault, rank)?;
                self.fact(observed(uid, reason, order));
                self.inject(fault, rank);
                Ok(())
            }
        }
    }
}

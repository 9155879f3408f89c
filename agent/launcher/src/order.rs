//! Orders of people for the job. An order goes into the journal with who, what and why, before it is carried out.

use mainstay_model::entry::Fact;
use mainstay_model::id::Rank;
use mainstay_model::observation::{Observation, Weight};
use mainstay_recovery::job::{ORDERS, RANK_EXCLUDED, RESTART_ORDERED};
use tokio::sync::oneshot;

use crate::drill::Injected;

/// An order with who gave it.
#[derive(Debug)]
pub struct Ordered {
    /// The user, as reported by the kernel.
    pub uid: u32,
    /// The reason.
    pub reason: String,
    /// The order.
    pub order: JobOrder,
    /// Done, or refused.
    pub answer: oneshot::Sender<Result<(), Refused>>,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum JobOrder {
    /// All ranks are stopped and started again.
    Restart,
    /// The job ends.
    Stop,
    /// The job no longer uses the GPU of a rank.
    Exclude(Rank),
    /// A fault is injected into a rank, for a drill.
    Inject(Injected, Rank),
}

/// Why an order is not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is nothing to apply it to.
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

/// The event of an order to stop the job.
pub(crate) const STOP_ORDERED: &str = "stop_ordered";

/// The order of `who`, with the user `uid`, as the journal records it.
pub(crate) fn observed(who: &str, uid: u32, reason: &str, order: JobOrder) -> Fact {
    let (event, what) = match order {
        JobOrder::Restart => (RESTART_ORDERED, "to restart all ranks".to_owned()),
        JobOrder::Stop => (STOP_ORDERED, "to stop the job".to_owned()),
        JobOrder::Exclude(rank) => (RANK_EXCLUDED, format!("to stop using the GPU of {rank}")),
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
        detail: format!("{who} ordered {what}: {reason}"),
        values: values.into_iter().collect(),
    })
}

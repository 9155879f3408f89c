//! What people order for the job, and how it goes into the journal: who, what and why, before anything is done.

use mainstay_core::entry::Fact;
use mainstay_core::id::Rank;
use mainstay_core::observation::{Observation, Weight};
use tokio::sync::oneshot;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobOrder {
    /// All ranks are stopped and started anew.
    Restart,
    /// The job ends.
    Stop,
    /// Something is done to a rank, for a drill.
    Inject(Injected, Rank),
}

/// What is done to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injected {
    /// The signal by which it is done.
    pub signal: i32,
    /// Its word in the journal.
    pub word: &'static str,
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
}

/// The order as it stands in the journal.
pub(super) fn observed(uid: u32, reason: &str, order: JobOrder) -> Fact {
    let (event, what) = match order {
        JobOrder::Restart => ("restart_ordered", "to restart all ranks".to_owned()),
        JobOrder::Stop => ("stop_ordered", "to stop the job".to_owned()),
        JobOrder::Inject(fault, rank) => ("fault_injected", format!("to {} {rank}, for a drill", fault.word)),
    };
    let mut values = vec![("uid".to_owned(), uid.to_string()), ("reason".to_owned(), reason.to_owned())];
    if let JobOrder::Inject(fault, rank) = order {
        values.extend([("fault".to_owned(), fault.word.to_owned()), ("rank".to_owned(), rank.0.to_string())]);
    }
    Fact::Observed(Observation {
        component: "job.orders".to_owned(),
        event: event.to_owned(),
        weight: Weight::Warning,
        detail: format!("user {uid} ordered {what}: {reason}"),
        values: values.into_iter().collect(),
    })
}

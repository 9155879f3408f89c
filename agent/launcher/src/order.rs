//! Orders of people for the job. An order goes into the journal with who, what and why, before it is carried out.

use mainstay_model::entry::Fact;
use mainstay_model::id::Rank;
use mainstay_model::observation::{Observation, Weight};
use mainstay_recovery::job::{ORDERS, RANK_EXCLUDED, RESTART_ORDERED};
use mainstay_sys::{clock, users};
use tokio::sync::oneshot;

use crate::drill::{Drill, Injected};
use crate::group::Group;
use crate::ranks::Ranks;
use crate::ranks::process::RankProcess;

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

/// Carries out an order of a person. The journal records it first.
pub(crate) fn carry_out(ordered: Ordered, ranks: &mut Ranks, drill: &mut Drill, group: &mut Group) {
    let Ordered { uid, reason, order, answer } = ordered;
    // The sender may have gone; the order is carried out all the same.
    let _ = answer.send(carry_out_order(uid, &reason, order, (ranks, drill, group)));
}

fn carry_out_order(
    uid: u32,
    reason: &str,
    order: JobOrder,
    (ranks, drill, group): (&mut Ranks, &mut Drill, &mut Group),
) -> Result<(), Refused> {
    let user = users::name(uid).unwrap_or_else(|| uid.to_string());
    let who = format!("user {user}{}", group.on_host());
    let living = |wanted: Rank| ranks.living().find(|rank| rank.rank == wanted);
    match order {
        JobOrder::Restart | JobOrder::Exclude(_) if !ranks.are_at_work() => {
            return Err(Refused::NotNow("no ranks run, or they are being stopped already"));
        }
        JobOrder::Stop if ranks.stopping.is_requested() => {
            return Err(Refused::NotNow("the job is being stopped already"));
        }
        JobOrder::Inject(..) if !drill.is_permitted => return Err(Refused::NotAllowed),
        JobOrder::Inject(_, rank) | JobOrder::Exclude(rank) if living(rank).is_none() => {
            return Err(Refused::NoSuchRank(rank));
        }
        JobOrder::Inject(fault, rank) => drill.check(fault, rank, ranks)?,
        JobOrder::Exclude(rank) => {
            let local_rank = living(rank).map_or(0, |process: &RankProcess| process.local_rank);
            let left = ranks.spec.devices_without(local_rank).map_err(Refused::NotHere)?;
            ranks.spec.devices = Some(left);
        }
        JobOrder::Restart | JobOrder::Stop => {}
    }
    group.fact(observed(&who, uid, reason, order));
    match order {
        JobOrder::Stop => {
            ranks.stopping.asked_by = Some((nix::libc::SIGTERM, clock::mono()));
            let (by, exit) = (format!("{who} ({reason})"), 128 + nix::libc::SIGTERM);
            group.fact(Fact::StopRequested { by, exit });
        }
        JobOrder::Inject(fault, rank) => drill.inject(fault, rank, ranks),
        JobOrder::Restart | JobOrder::Exclude(_) => {}
    }
    Ok(())
}

/// The order of `who`, with the user `uid`, as the journal records it.
fn observed(who: &str, uid: u32, reason: &str, order: JobOrder) -> Fact {
    let (event, what) = match order {
        JobOrder::Restart => (RESTART_ORDERED, "to restart all ranks".to_owned()),
        JobOrder::Stop => (STOP_ORDERED, "to stop the job".to_owned()),
        JobOrder::Exclude(rank) => (RANK_EXCLUDED, format!("to stop using the GPU of {rank}")),
        JobOrder::Inject(fault, rank) => ("fault_injected", format!("to {fault} {rank}, for a drill")),
    };
    let mut values = vec![("uid".to_owned(), uid.to_string()), ("reason".to_owned(), reason.to_owned())];
    if let JobOrder::Inject(fault, _) = order {
        values.push(("fault".to_owned(), fault.as_str().to_owned()));
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

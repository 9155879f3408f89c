//! What people order. A restart that they order is not a failure: it has no verdict and uses no
//! budget. But nothing starts on a host that is not ready, even on order.

use mainstay_model::entry::Fact;
use mainstay_model::id::{Attempt, Incident};
use mainstay_model::observation::{HostsEvent, Observation, Weight};
use mainstay_model::time::Mono;
use mainstay_model::verdict::{Cause, Verdict};

/// The component of orders in the journal.
pub const ORDERS: &str = "job.orders";
/// The event of an order to restart all ranks. Its entry in the journal triggers the restart, also in a replay.
pub const RESTART_ORDERED: &str = "restart_ordered";
/// The event of an order to stop using a rank's GPU; its value `rank` names the rank. All ranks are restarted for it.
pub const RANK_EXCLUDED: &str = "rank_excluded";
/// The event of an order to save and end; its value `exit` is the exit status of the job whose ranks do so.
pub const SAVE_ORDERED: &str = "save_ordered";
/// The event that records the reason why an ordered restart waits.
pub const RESTART_WAITS: &str = "restart_waits";

/// What an entry of the journal orders.
pub(super) enum Order {
    /// Restart all ranks.
    Restart,
    /// Save and end; with the exit status of the job.
    Save(i32),
}

impl Order {
    pub(super) fn from_observation(seen: &Observation) -> Option<Order> {
        let event = (seen.component == ORDERS).then_some(seen.event.as_str());
        match event {
            Some(RESTART_ORDERED | RANK_EXCLUDED) => Some(Order::Restart),
            Some(SAVE_ORDERED) => seen.values.get("exit")?.parse().ok().map(Order::Save),
            _ => HostsEvent::WorldGrows.is(seen).then_some(Order::Restart),
        }
    }
}

/// The verdict passed to the agent: the host is the same, regardless of who orders the restart.
pub(super) fn no_rank_failed(attempt: Attempt, at: Mono) -> Verdict {
    Verdict::new(Incident::ORDERED, attempt, Cause::ExitCode { code: 0 }, "a user ordered a restart", at)
}

/// The reason why an ordered restart waits, for the journal.
pub(super) fn waits(why: &str) -> Fact {
    Fact::Observed(Observation {
        component: ORDERS.to_owned(),
        event: RESTART_WAITS.to_owned(),
        weight: Weight::Warning,
        detail: format!("the ordered restart waits: {why}"),
        ..Observation::default()
    })
}

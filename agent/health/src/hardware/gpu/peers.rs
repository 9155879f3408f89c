//! Which GPUs reach each other over NVLink (peer to peer). A pair that no longer reaches each other is a fault.
//!
//! - Cards without NVLink never reached each other and are no fault. Neither are pairs that an operator switched off.
//! - A pair fails for both of its GPUs. The culprit is the one that fails with more of the others.
//! - A GPU that is lost, split or has links down fails with all others; that is reported already.

use std::collections::{BTreeMap, BTreeSet};

use super::watch::{CheckResult, Problem};
use mainstay_model::health::HealthState::Unhealthy;
use mainstay_model::health::RecommendedAction::RebootNode;
use mainstay_model::pci::PciAddress;

/// NVML's status: reached, switched off, unknown.
const REACHED: u32 = 0;
const SWITCHED_OFF: u32 = 4;
const NOT_KNOWN: u32 = 6;

/// The check.
pub(super) const CHECK: &str = "peer_access";

/// Confidence in which of the two GPUs is the culprit.
const INFERRED: f64 = 0.8;

/// One GPU and the GPUs that it reaches.
#[derive(Clone, Debug, Default)]
pub(super) struct Reach {
    /// GPUs that it reached when it was healthy.
    pub(super) learned: BTreeSet<PciAddress>,
    /// The last reading, by the other GPU.
    pub(super) now: BTreeMap<PciAddress, u32>,
    /// Another problem already explains why it reaches no other GPU.
    pub(super) excused: bool,
}

/// Judges each GPU.
pub(super) fn judge(all: &BTreeMap<PciAddress, Reach>) -> BTreeMap<PciAddress, CheckResult> {
    let mut broken: BTreeSet<(PciAddress, PciAddress)> = BTreeSet::new();
    for (own, reach) in all {
        let lost = reach.now.iter().filter(|(peer, status)| {
            reach.learned.contains(*peer) && !matches!(**status, REACHED | SWITCHED_OFF | NOT_KNOWN)
        });
        broken.extend(lost.map(|(peer, _)| (*own.min(peer), *own.max(peer))));
    }
    let excused = |gpu: &PciAddress| all.get(gpu).is_none_or(|reach| reach.excused);
    broken.retain(|(one, other)| !excused(one) && !excused(other));
    let failing = |gpu: &PciAddress| broken.iter().filter(|(one, other)| one == gpu || other == gpu).count();
    let mut looks = BTreeMap::new();
    for (own, reach) in all {
        let blamed: Vec<&PciAddress> = broken
            .iter()
            .filter_map(|(one, other)| match own {
                own if own == one => Some(other),
                own if own == other => Some(one),
                _ => None,
            })
            .filter(|other| failing(own) >= failing(other))
            .collect();
        let look = match (reach.now.is_empty(), blamed.is_empty()) {
            (true, _) => CheckResult::Unread,
            (false, true) => CheckResult::Healthy,
            (false, false) => CheckResult::Faulty(problem(&blamed, reach.learned.len())),
        };
        looks.insert(*own, look);
    }
    looks
}

fn problem(lost: &[&PciAddress], learned: usize) -> Problem {
    let names: Vec<String> = lost.iter().map(|gpu| gpu.to_string()).collect();
    let words = format!("it no longer reaches GPU {} over NVLink (peer to peer)", names.join(", "));
    let reached = |count: usize| format!("{count} of {learned} GPUs reached");
    Problem::new(Unhealthy, words, RebootNode)
        .sure(INFERRED)
        .by("NVML peer to peer over NVLink", reached(learned.saturating_sub(lost.len())), "")
        .was(Some(reached(learned)))
}

/// The GPUs that are reached according to a reading.
pub(super) fn reached(now: &BTreeMap<PciAddress, u32>) -> BTreeSet<PciAddress> {
    now.iter().filter(|(_, status)| **status == REACHED).map(|(peer, _)| *peer).collect()
}

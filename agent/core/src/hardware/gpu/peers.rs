//! Which GPUs reach each other over NVLink (peer to peer): a pair that did and does not any more is a fault.
//!
//! - Cards without NVLink never did, and are none. Neither is what an operator switched off.
//! - A pair fails for both of its GPUs; to blame is the one that fails with more of the others.
//! - One that is lost, split or has links down fails with all others; that is told of it already.

use std::collections::{BTreeMap, BTreeSet};

use super::watch::{Look, Problem};
use crate::base::pci::PciAddress;
use crate::model::health::HealthState::Unhealthy;
use crate::model::health::RecommendedAction::RebootNode;

/// NVML's numbers: they reach each other; it was switched off; it is not known.
const REACHED: u32 = 0;
const SWITCHED_OFF: u32 = 4;
const NOT_KNOWN: u32 = 6;

/// The check.
pub(super) const CHECK: &str = "peer_access";

/// How sure it is which of the two is to blame.
const INFERRED: f64 = 0.8;

/// One GPU and whom it reaches.
#[derive(Clone, Debug, Default)]
pub(super) struct Reach {
    /// Those that it reached when it was well.
    pub(super) learned: BTreeSet<PciAddress>,
    /// What was read now, by the other one.
    pub(super) now: BTreeMap<PciAddress, u32>,
    /// What is wrong with it explains that it reaches nobody.
    pub(super) excused: bool,
}

/// What is to be said of each GPU.
pub(super) fn judge(all: &BTreeMap<PciAddress, Reach>) -> BTreeMap<PciAddress, Look> {
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
            (true, _) => Look::Unread,
            (false, true) => Look::Well,
            (false, false) => Look::Ill(problem(&blamed, reach.learned.len())),
        };
        looks.insert(*own, look);
    }
    looks
}

fn problem(lost: &[&PciAddress], learned: usize) -> Problem {
    let names: Vec<String> = lost.iter().map(|gpu| gpu.to_string()).collect();
    let words = format!("it does not reach GPU {} over NVLink any more (peer to peer)", names.join(", "));
    let reached = |count: usize| format!("{count} of {learned} GPUs reached");
    Problem::new(Unhealthy, words, RebootNode)
        .sure(INFERRED)
        .by("NVML peer to peer over NVLink", reached(learned.saturating_sub(lost.len())), "")
        .was(Some(reached(learned)))
}

/// Those that are reached by what was read.
pub(super) fn reached(now: &BTreeMap<PciAddress, u32>) -> BTreeSet<PciAddress> {
    now.iter().filter(|(_, status)| **status == REACHED).map(|(peer, _)| *peer).collect()
}

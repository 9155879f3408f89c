//! Writes what was learned about GPUs to the journal and restores it: which GPUs there are and which links are up.

use std::collections::BTreeSet;

use super::limits::NVLINK_FAILED_FOR;
use super::reading::GpuIdentity;
use super::rules::SAMPLED;
use super::state::{Gpu, KnownGpu};
use super::watch::Problem;
use super::{observed, ranges};
use mainstay_model::component_id::ComponentId;
use mainstay_model::entry::Fact;
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::operator::named;
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Mono;

/// A GPU was healthy in several readings and has these values; the newest for a component counts.
const LEARNED: &str = "gpu_learned";
/// A check found a problem, and the problem is over.
pub(super) const BEGAN: &str = "finding_began";
pub(super) const ENDED: &str = "finding_ended";
/// Another board is at this address.
pub(super) const REPLACED: &str = "gpu_replaced";
/// The driver no longer lists the GPU, and lists it again.
pub(super) const MISSING: &str = "gpu_missing";
pub(super) const BACK: &str = "gpu_back";

pub(super) fn learned(gpu: &KnownGpu) -> Fact {
    let KnownGpu { index, identity, links, peers } = gpu;
    let mut words = format!("{} {}", identity.name, identity.uuid);
    if !links.is_empty() {
        words.push_str(&format!(", {} NVLinks up", links.len()));
    }
    let value = |name: &str, value: String| (name.to_owned(), value);
    let values = [
        value("index", index.to_string()),
        value("uuid", identity.uuid.clone()),
        value("name", identity.name.clone()),
        value("serial", identity.serial.clone().unwrap_or_default()),
        value("nvlinks", ranges(links)),
        value("peers", peers.iter().map(PciAddress::to_string).collect::<Vec<_>>().join(",")),
    ];
    observed(identity.address, LEARNED, Weight::Info, words, values)
}

/// The GPU's component and the UUID of the board learned there.
pub fn board_of(observation: &Observation) -> Option<(String, String)> {
    let gpu = known(observation).filter(|gpu| !gpu.identity.uuid.is_empty())?;
    Some((observation.component.clone(), gpu.identity.uuid))
}

/// The GPU's component at which another board was found.
pub fn replaced_board(observation: &Observation) -> Option<String> {
    (observation.event == REPLACED).then(|| observation.component.clone())
}

/// What was learned about a GPU.
pub(super) fn known(observation: &Observation) -> Option<KnownGpu> {
    if observation.event != LEARNED {
        return None;
    }
    let ComponentId::Gpu(address) = ComponentId::parse(&observation.component) else { return None };
    let value = |name: &str| observation.values.get(name).cloned();
    let serial = value("serial").filter(|serial| !serial.is_empty());
    let identity = GpuIdentity { address, uuid: value("uuid")?, name: value("name")?, serial };
    // Older journals have no peers.
    let peers = value("peers").unwrap_or_default();
    let peers = peers.split(',').filter_map(PciAddress::parse).collect();
    Some(KnownGpu {
        index: value("index")?.parse().ok()?,
        identity,
        links: numbers(&value("nvlinks")?)?,
        peers,
    })
}

/// Parses what `ranges` writes.
fn numbers(text: &str) -> Option<BTreeSet<u32>> {
    let mut numbers = BTreeSet::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        // More links than any GPU has.
        if last >= 1024 {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

/// The GPU at each index of the driver's list, from this boot's observations: a lost GPU does not report its identity.
pub fn learned_gpus<'a>(observed: impl Iterator<Item = &'a Observation>) -> Vec<(u32, GpuIdentity)> {
    let mut gpus = std::collections::BTreeMap::new();
    for known in observed.filter_map(known) {
        gpus.insert(known.index, known.identity);
    }
    gpus.into_iter().collect()
}

impl Gpu {
    /// Restores a finding of `at` in this boot from before a restart.
    pub(super) fn recall_finding(&mut self, at: Mono, observation: &Observation) {
        match observation.event.as_str() {
            REPLACED => *self = Gpu { known: self.known.take(), ..Gpu::default() },
            MISSING => (self.missing, self.fault_at) = (true, Some(at)),
            BACK => self.missing = false,
            event => {
                let value = |name: &str| observation.values.get(name).map_or("", String::as_str);
                // Older journals have no state and action: the check finds it again.
                let (Some(state), Some(action)) = (named(value("state")), named(value("action"))) else {
                    if event == ENDED {
                        self.readings.links.recall_finding(value("check"), None, at);
                        self.readings.recall(value("check"), None);
                    }
                    return;
                };
                let problem = Problem::new(state, observation.detail.clone(), action).sure(SAMPLED);
                let until = at.after(NVLINK_FAILED_FOR);
                if !self.readings.links.recall_finding(value("check"), Some(problem.clone()), until) {
                    self.readings.recall(value("check"), Some(problem));
                    self.shown.last = Some((state, at));
                }
                self.fault_at = Some(at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_links_are_parsed_unchanged() {
        for (text, count) in [("", 0), ("0-17", 18), ("0,2-3,17", 4)] {
            let read = numbers(text).unwrap();
            assert_eq!((read.len(), ranges(&read)), (count, text.to_owned()));
        }
        for wrong in ["x", "1-", "-", "0-99999999", "1-x"] {
            assert_eq!(numbers(wrong), None, "{wrong}");
        }
    }
}

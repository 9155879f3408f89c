//! Slowness of a rank that shares CPUs: reported only once it has lasted.
//!
//! Other work on the host delays a rank without its own device for seconds at a time. Among a few ranks that looks
//! like one slow rank: there are almost no peers to compare with.

use std::collections::BTreeMap;

use crate::straggler::{Change, Slow};

/// At most this many ranks count as very few.
const MAX_VERY_FEW_RANKS: usize = 4;

/// Steps for which a rank must stay slow after it was found.
const LASTS: u32 = 48;

/// Findings that have not lasted yet, with the steps that are left.
#[derive(Clone, Debug, Default)]
pub(super) struct Unproven {
    waiting: BTreeMap<Slow, (u32, Change)>,
}

impl Unproven {
    /// The changes of one step to report, given the device of each rank if it has one.
    pub(super) fn proven(&mut self, changes: Vec<Change>, devices: &[Option<String>]) -> Vec<Change> {
        let shares_cpus = |slow: Slow| match slow {
            Slow::Rank(rank) => {
                devices.len() <= MAX_VERY_FEW_RANKS && devices.get(rank as usize).is_none_or(Option::is_none)
            }
            Slow::Host(_) | Slow::Stage(_) | Slow::Rotating => false,
        };
        let mut proven = Vec::new();
        for (steps, _) in self.waiting.values_mut() {
            *steps = steps.saturating_sub(1);
        }
        for change in changes {
            match &change {
                Change::Found(found) if shares_cpus(found.slow) => {
                    self.waiting.insert(found.slow, (LASTS, change));
                }
                // Over before it was reported: skip both.
                Change::Over { slow, .. } if self.waiting.remove(slow).is_some() => {}
                _ => proven.push(change),
            }
        }
        let lasted = self.waiting.extract_if(.., |_, (steps, _)| *steps == 0);
        proven.extend(lasted.map(|(_, (_, change))| change));
        proven
    }
}

//! Slowness of a rank that shares CPUs: told only once it has lasted.
//!
//! A rank without a device of its own is held up by whatever else runs on the host, for seconds at a time. Among a few ranks
//! that looks like one slow rank: there is nearly nobody to compare with.

use std::collections::BTreeMap;

use crate::progress::straggler::{Change, Slow};

/// Ranks that are very few.
const VERY_FEW: usize = 4;

/// Steps for which a rank must stay slow after it was found.
const LASTS: u32 = 48;

/// What was found and has not lasted yet, with the steps that are left.
#[derive(Clone, Debug, Default)]
pub(super) struct Unproven {
    waiting: BTreeMap<Slow, (u32, Change)>,
}

impl Unproven {
    /// The changes of one step that are to be told, given the device of each rank where it has one.
    pub(super) fn proven(&mut self, changes: Vec<Change>, devices: &[Option<String>]) -> Vec<Change> {
        let shares_cpus = |slow: Slow| match slow {
            Slow::Rank(rank) => {
                devices.len() <= VERY_FEW && devices.get(rank as usize).is_none_or(Option::is_none)
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
                // Over before it was told: nobody needs to know.
                Change::Over { slow, .. } if self.waiting.remove(slow).is_some() => {}
                _ => proven.push(change),
            }
        }
        let lasted = self.waiting.extract_if(.., |_, (steps, _)| *steps == 0);
        proven.extend(lasted.map(|(_, (_, change))| change));
        proven
    }
}

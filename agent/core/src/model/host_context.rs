//! What a host testifies when a job on it has failed: what its kernel said around the fault, and which of its components
//! are sick.

use serde::{Deserialize, Serialize};

use crate::model::finding::Finding;
use crate::model::health::Component;
use crate::model::repeats::SeenBefore;

/// What the host has to say of one failure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostEvidence {
    /// Lines of the kernel log around the fault, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel_lines: Vec<String>,
    /// Components that are not fit for training.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sick: Vec<Component>,
    /// What is held that the next ranks need, a sentence each: a GPU's memory, a port, a process that does not die.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<String>,
    /// What the GPUs do while the ranks hang, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
    /// Devices that the lines speak of and that have failed before, with their records.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_before: Vec<FailedBefore>,
    /// What the cloud or the scheduler has announced for this machine, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notices: Vec<String>,
    /// Earlier failures with the fingerprint of this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_before: Option<SeenBefore>,
    /// What was wrong with the job's steps or numbers when it failed; the job's launcher adds it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
}

/// What is on record of a device from before the fault.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FailedBefore {
    /// The device, as its component is called: `gpu.0000:3b:00`.
    pub component: String,
    /// Independent faults of the hardware, the present one left out.
    pub incidents: u32,
    /// The time in which they happened, hours.
    pub hours: f64,
    /// How likely it fails more than five times as often as its like, from 0 to 1.
    pub suspicion: f64,
}

impl HostEvidence {
    /// This testimony with what a later one of the same failure adds to it; none if that adds nothing. What has got better
    /// since then is no news of the failure.
    pub fn with(&self, later: HostEvidence) -> Option<HostEvidence> {
        let mut both = self.clone();
        let known = |of: &Component| self.sick.iter().any(|known| known.name == of.name);
        both.sick.extend(later.sick.into_iter().filter(|component| !known(component)));
        both.notices.extend(later.notices.into_iter().filter(|notice| !self.notices.contains(notice)));
        if later.kernel_lines.iter().any(|line| !self.kernel_lines.contains(line)) {
            (both.kernel_lines, both.failed_before) = (later.kernel_lines, later.failed_before);
        }
        (both != *self).then_some(both)
    }

    /// Whether there is nothing to say.
    pub fn is_empty(&self) -> bool {
        self.kernel_lines.is_empty()
            && self.sick.is_empty()
            && self.held.is_empty()
            && self.failed_before.is_empty()
            && self.gpus.is_empty()
            && self.notices.is_empty()
            && self.seen_before.is_none()
            && self.findings.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(lines: &[&str], sick: &[&str]) -> HostEvidence {
        let component = |name: &&str| Component { name: (*name).to_owned(), ..Component::default() };
        HostEvidence {
            kernel_lines: lines.iter().map(|line| (*line).to_owned()).collect(),
            sick: sick.iter().map(component).collect(),
            ..HostEvidence::default()
        }
    }

    #[test]
    fn what_comes_later_is_added_and_what_got_better_is_no_news() {
        let first = reported(&["a"], &["gpu.1"]);
        assert_eq!(first.with(reported(&["a"], &[])), None);
        assert_eq!(first.with(reported(&["a"], &["gpu.1"])), None);
        assert_eq!(first.with(reported(&["a", "b"], &[])), Some(reported(&["a", "b"], &["gpu.1"])));
        assert_eq!(first.with(reported(&["a"], &["gpu.2"])), Some(reported(&["a"], &["gpu.1", "gpu.2"])));
    }
}

//! The evidence that a host reports when a job on it has failed: kernel log lines around the fault, and unhealthy
//! components.

use serde::{Deserialize, Serialize};

use crate::finding::Finding;
use crate::health::Component;
use crate::repeats::SeenBefore;

/// A host's evidence about one failure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostEvidence {
    /// Lines of the kernel log around the fault, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel_lines: Vec<String>,
    /// Components that are not fit for training.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "sick")]
    pub unhealthy: Vec<Component>,
    /// Resources that the next ranks need and that are still held, a sentence each: GPU memory, a port, a process that
    /// does not exit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<String>,
    /// The GPUs' activity while the ranks hang, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
    /// Devices named by the lines that have failed before, with their records.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_before: Vec<FailedBefore>,
    /// Announcements of the cloud or the scheduler for this machine, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notices: Vec<String>,
    /// Earlier failures with the same fingerprint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_before: Option<SeenBefore>,
    /// Findings that had not ended when the job failed; the job's launcher adds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
}

/// A device's record from before the fault.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FailedBefore {
    /// The device's component: `gpu.0000:3b:00`.
    pub component: String,
    /// Independent hardware faults, without the present one.
    pub incidents: u32,
    /// The time span of these faults, in hours.
    pub hours: f64,
    /// The probability, from 0 to 1, that it fails more than five times as often as similar devices.
    pub suspicion: f64,
}

impl HostEvidence {
    /// Merges later evidence about the same failure into this one; `None` if it adds nothing. A component that has
    /// recovered since then is not news.
    pub fn with(&self, later: HostEvidence) -> Option<HostEvidence> {
        let mut both = self.clone();
        let known = |of: &Component| self.unhealthy.iter().any(|known| known.name == of.name);
        both.unhealthy.extend(later.unhealthy.into_iter().filter(|component| !known(component)));
        both.notices.extend(later.notices.into_iter().filter(|notice| !self.notices.contains(notice)));
        if later.kernel_lines.iter().any(|line| !self.kernel_lines.contains(line)) {
            (both.kernel_lines, both.failed_before) = (later.kernel_lines, later.failed_before);
        }
        (both != *self).then_some(both)
    }

    /// Whether there is no evidence.
    pub fn is_empty(&self) -> bool {
        self.kernel_lines.is_empty()
            && self.unhealthy.is_empty()
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

    fn reported(lines: &[&str], unhealthy: &[&str]) -> HostEvidence {
        let component = |name: &&str| Component { name: (*name).to_owned(), ..Component::default() };
        HostEvidence {
            kernel_lines: lines.iter().map(|line| (*line).to_owned()).collect(),
            unhealthy: unhealthy.iter().map(component).collect(),
            ..HostEvidence::default()
        }
    }

    #[test]
    fn later_evidence_is_added_and_recoveries_are_ignored() {
        let first = reported(&["a"], &["gpu.1"]);
        assert_eq!(first.with(reported(&["a"], &[])), None);
        assert_eq!(first.with(reported(&["a"], &["gpu.1"])), None);
        assert_eq!(first.with(reported(&["a", "b"], &[])), Some(reported(&["a", "b"], &["gpu.1"])));
        assert_eq!(first.with(reported(&["a"], &["gpu.2"])), Some(reported(&["a"], &["gpu.1", "gpu.2"])));
    }
}

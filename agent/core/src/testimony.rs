//! What a host testifies when a job on it has failed: what its kernel said around the fault, and which of its components
//! are sick.

use serde::{Deserialize, Serialize};

use crate::health::Component;
use crate::repeats::SeenBefore;

/// What the host has to say of one failure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Testimony {
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
    /// Earlier failures with the fingerprint of this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_before: Option<SeenBefore>,
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

impl Testimony {
    /// Whether there is nothing to say.
    pub fn is_empty(&self) -> bool {
        self.kernel_lines.is_empty()
            && self.sick.is_empty()
            && self.held.is_empty()
            && self.failed_before.is_empty()
            && self.gpus.is_empty()
            && self.seen_before.is_none()
    }
}

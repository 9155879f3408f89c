//! The health of components, with evidence. What cannot be read is `Unknown`, never healthy.

use serde::{Deserialize, Serialize};

use crate::fault_code::FaultCode;
use crate::time::Mono;

/// Health states, from the least to the most severe: a node's state is that of its worst component.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum HealthState {
    /// Read and healthy.
    Healthy,
    /// Unknown: not readable, or too old.
    #[default]
    Unknown,
    /// Usable, but something is wrong.
    Degraded,
    /// Not fit for training.
    Unhealthy,
}

/// Recommended actions, mildest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum RecommendedAction {
    /// Nothing.
    #[default]
    None,
    /// Restart the processes that use the component.
    RestartProcess,
    /// Reset the device.
    ResetDevice,
    /// Reboot the node.
    RebootNode,
    /// Replace the node.
    ReplaceNode,
    /// A person has to look at it.
    ContactSupport,
}

/// The current state of a component of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Component {
    /// Its name in the API: `host.memory`, `host.disk`.
    pub name: String,
    /// The state.
    pub state: HealthState,
    /// The reason, in one line.
    pub reason: String,
    /// The recommended action.
    #[serde(default)]
    pub action: RecommendedAction,
    /// The readings that the state is based on.
    pub evidence: Vec<Evidence>,
    /// When it was last read successfully.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_at: Option<Mono>,
    /// Since when it is in this state.
    pub since: Mono,
    /// Confidence, from 0 to 1: 1 if a counter or the hardware reports it, less if it is inferred.
    #[serde(default = "sure", skip_serializing_if = "is_sure")]
    pub confidence: f64,
    /// When the last new fault occurred, if the judge knows: a fault that was acknowledged before then counts again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_at: Option<Mono>,
    /// Readings as numbers, for Prometheus. Not part of the journal.
    #[serde(skip)]
    pub gauges: Vec<Gauge>,
}

/// A numeric reading of a component.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gauge {
    /// The metric's name, as in `docs/reference/metrics.md`.
    pub metric: &'static str,
    /// The reading, in the metric's unit.
    pub value: f64,
}

impl Default for Component {
    /// A component with unknown state.
    fn default() -> Component {
        Component {
            name: String::new(),
            state: HealthState::Unknown,
            reason: String::new(),
            action: RecommendedAction::None,
            evidence: Vec::new(),
            read_at: None,
            since: Mono::default(),
            confidence: sure(),
            fault_at: None,
            gauges: Vec::new(),
        }
    }
}

fn sure() -> f64 {
    1.0
}

#[expect(
    clippy::float_cmp,
    clippy::trivially_copy_pass_by_ref,
    reason = "serde asks by reference; 1 is exact"
)]
fn is_sure(confidence: &f64) -> bool {
    *confidence == sure()
}

/// One reading with its source.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// The source: `/proc/pressure/memory`.
    pub source: String,
    /// The value: `full avg10=12.5 %`.
    pub reading: String,
    /// The limit, if there is one: `10 %`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// The previous value, if the change matters: `full avg10=0.1 %`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// The code of the report, if the reading is one of a driver or the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<FaultCode>,
    /// What the code means, in a few words: `the GPU has fallen off the bus`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meaning: Option<String>,
}

impl Evidence {
    /// A reading with its source.
    pub fn new(source: impl Into<String>, reading: impl ToString) -> Evidence {
        Evidence { source: source.into(), reading: reading.to_string(), ..Evidence::default() }
    }

    /// Adds the limit; an empty string is no limit.
    #[must_use]
    pub fn limit(self, limit: impl ToString) -> Evidence {
        Evidence { limit: Some(limit.to_string()).filter(|limit| !limit.is_empty()), ..self }
    }

    /// Adds the previous value, if known and different.
    #[must_use]
    pub fn before(self, before: Option<impl ToString>) -> Evidence {
        let before = before.map(|before| before.to_string()).filter(|before| *before != self.reading);
        Evidence { before: before.or(self.before), ..self }
    }
}

/// A change of a component's state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HealthChange {
    /// The state before; `None` at the first reading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<HealthState>,
    /// The component after the change.
    pub component: Component,
}

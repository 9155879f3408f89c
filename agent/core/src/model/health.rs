//! How healthy a component is, with evidence. What cannot be read is `Unknown`, never healthy.

use serde::{Deserialize, Serialize};

use crate::base::time::Mono;

/// Health states, in the order in which they weigh: a node is as healthy as its heaviest component.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum HealthState {
    /// Read, and in order.
    Healthy,
    /// It cannot be told: not readable, or too old.
    #[default]
    Unknown,
    /// In use, but something is wrong.
    Degraded,
    /// Not fit for training.
    Unhealthy,
}

/// What is recommended, mildest first.
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
    /// A person has to look.
    ContactSupport,
}

/// A component of the host as it stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Component {
    /// Its name in the API: `host.memory`, `host.disk`.
    pub name: String,
    /// How it is.
    pub state: HealthState,
    /// Why, in one line for a person.
    pub reason: String,
    /// What is recommended.
    #[serde(default)]
    pub action: RecommendedAction,
    /// The readings that the state rests on.
    pub evidence: Vec<Evidence>,
    /// When it was last read with success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_at: Option<Mono>,
    /// Since when it is in this state.
    pub since: Mono,
    /// How sure, from 0 to 1: 1 where a counter or the hardware's own word says it, less where it is inferred.
    #[serde(default = "sure", skip_serializing_if = "is_sure")]
    pub confidence: f64,
    /// When something last went wrong anew, where the judge knows: what an operator acknowledged before that is told
    /// again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_at: Option<Mono>,
    /// What was read in numbers, for Prometheus. Not part of the journal.
    #[serde(skip)]
    pub gauges: Vec<Gauge>,
}

/// A number that was read of a component.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gauge {
    /// The metric's name, as `docs/reference/metrics.md` has it.
    pub metric: &'static str,
    /// The reading, in the metric's unit.
    pub value: f64,
}

impl Default for Component {
    /// A component of which nothing is known.
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
    /// Where it was read: `/proc/pressure/memory`.
    pub source: String,
    /// What was read: `full avg10=12.5 %`.
    pub reading: String,
    /// The limit it was held against, where there is one: `10 %`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// What was read before, where the change is what matters: `full avg10=0.1 %`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
}

impl Evidence {
    /// A reading with its source.
    pub fn new(source: impl Into<String>, reading: impl ToString) -> Evidence {
        Evidence { source: source.into(), reading: reading.to_string(), ..Evidence::default() }
    }

    /// With the limit it was held against; an empty one is none.
    #[must_use]
    pub fn limit(self, limit: impl ToString) -> Evidence {
        Evidence { limit: Some(limit.to_string()).filter(|limit| !limit.is_empty()), ..self }
    }

    /// With what was read before, where that is known and was something else.
    #[must_use]
    pub fn before(self, before: Option<impl ToString>) -> Evidence {
        let before = before.map(|before| before.to_string()).filter(|before| *before != self.reading);
        Evidence { before: before.or(self.before), ..self }
    }
}

/// A component went from one state to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HealthChange {
    /// The state before; none at the first reading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<HealthState>,
    /// The component after the change.
    pub component: Component,
}

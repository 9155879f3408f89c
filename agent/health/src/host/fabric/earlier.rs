//! Earlier observations of links, with times converted to this boot's clock.

use super::errors;
use mainstay_model::observation::Observation;
use mainstay_model::time::{Mono, Span, Stamp};

/// A time on this boot's monotonic clock; negative for observations of earlier boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment(i128);

impl Moment {
    pub(super) fn at(at: Mono) -> Moment {
        Moment(i128::from(at.0))
    }

    /// A time as seen from `now`: by the monotonic clock within a boot, by the wall clock across boots.
    pub(super) fn recalled(then: Stamp, same_boot: bool, now: Stamp) -> Moment {
        if same_boot {
            Moment::at(then.mono)
        } else {
            Moment(i128::from(now.mono.0) - (i128::from(now.wall.0) - i128::from(then.wall.0)))
        }
    }

    /// On this boot's clock; times before the boot become its start.
    pub(super) fn mono(self) -> Mono {
        Mono(u64::try_from(self.0.max(0)).unwrap_or(u64::MAX))
    }

    pub(super) fn since(self, earlier: Moment) -> Span {
        Span(u64::try_from((self.0 - earlier.0).max(0)).unwrap_or(u64::MAX))
    }
}

/// A link's history in the journal before this start of the agent.
#[derive(Clone, Debug, Default)]
pub(super) struct Recalled {
    pub(super) serial: Option<String>,
    pub(super) flaps: Vec<(Moment, u64)>,
    pub(super) down_since: Option<Moment>,
    /// Counters that increased too much in this boot: when, and by how much.
    pub(super) errors: Vec<(Moment, String, u64)>,
}

impl Recalled {
    /// Adds an observation of the link. Call in order, oldest first.
    pub(super) fn take_in(&mut self, at: Moment, same_boot: bool, observation: &Observation) {
        let value = |name: &str| observation.values.get(name);
        if let Some(serial) = value("serial") {
            if self.serial.as_ref().is_some_and(|known| known != serial) {
                *self = Recalled::default();
            }
            self.serial = Some(serial.clone());
        }
        let flaps = value("flaps").and_then(|flaps| flaps.parse().ok()).unwrap_or(0);
        match observation.event.as_str() {
            "port_down" => self.down_since = same_boot.then_some(at),
            "port_up" | "port_flapped" => {
                self.down_since = None;
                if flaps > 0 {
                    self.flaps.push((at, flaps));
                }
            }
            errors::TOO_MANY if same_boot => {
                let grown = value("grown").and_then(|grown| grown.parse().ok());
                if let (Some(counter), Some(grown)) = (value("counter"), grown) {
                    self.errors.push((at, counter.clone(), grown));
                }
            }
            "hardware_replaced" => *self = Recalled::default(),
            _ => {}
        }
    }
}

//! Which sensors watch the host and whether they have looked. This distinguishes a part of the host that no sensor has
//! looked at yet from one that does not exist.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mainstay_model::health::Component;
use mainstay_model::staleness;
use mainstay_model::time::{Mono, Span};

/// The sensors by name. Clones share the roster.
#[derive(Clone, Debug, Default)]
pub struct Roster {
    sensors: Arc<Mutex<BTreeMap<String, Looking>>>,
}

/// The progress of a sensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Looking {
    /// When its current look started.
    pub began: Option<Mono>,
    /// How long its last look took, if there was one.
    pub took: Option<Span>,
    /// The components that it reported.
    pub components: BTreeSet<String>,
    /// When it last reported.
    pub received: Mono,
    /// How long it may be silent; none if it is never missed.
    pub allowed: Option<Span>,
}

impl Roster {
    /// A sensor starts a look.
    pub fn starts(&self, sensor: &str, at: Mono) {
        self.lock().entry(sensor.to_owned()).or_default().began = Some(at);
    }

    /// A sensor that looks every `interval` is supervised from now on.
    pub fn expect(&self, sensor: &str, at: Mono, interval: Span) {
        let mut sensors = self.lock();
        let looking = sensors.entry(sensor.to_owned()).or_default();
        (looking.received, looking.allowed) = (at, Some(staleness::allowed(interval)));
    }

    /// A sensor has looked, and reported these components, always all of them. True the first time.
    pub fn has_looked(&self, sensor: &str, at: Mono, components: Vec<String>) -> bool {
        let mut sensors = self.lock();
        let looking = sensors.entry(sensor.to_owned()).or_default();
        let first = looking.took.is_none();
        looking.took = Some(looking.began.take().map_or(Span(0), |began| at.since(began)));
        looking.received = at;
        looking.components = components.into_iter().collect();
        first
    }

    /// The components whose sensors have gone silent and that may not be shown with their last state at `now`.
    /// Returns them as they may be shown.
    pub fn stale(&self, now: Mono, shown: &BTreeMap<String, Component>) -> Vec<Component> {
        let sensors = self.lock();
        let watched =
            sensors.iter().filter_map(|(sensor, looking)| Some((sensor, looking, looking.allowed?)));
        let stale = watched.flat_map(|(sensor, looking, allowed)| {
            let components = looking.components.iter().filter_map(|name| shown.get(name));
            components.filter_map(move |of| staleness::stale(of, sensor, looking.received, allowed, now))
        });
        stale.collect()
    }

    /// The current state of all sensors.
    pub fn sensors(&self) -> BTreeMap<String, Looking> {
        self.lock().clone()
    }

    /// Whether every sensor has looked at least once.
    pub fn is_complete(&self) -> bool {
        self.lock().values().all(|looking| looking.took.is_some())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Looking>> {
        // Nothing in here can be left inconsistent.
        self.sensors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use mainstay_model::health::HealthState;

    use super::*;

    #[test]
    fn a_room_counts_once_it_has_looked() {
        let roster = Roster::default();
        roster.starts("host", Mono(10));
        assert!(!roster.is_complete());
        assert!(roster.has_looked("host", Mono(14), vec!["host.cpu".to_owned()]));
        assert!(roster.is_complete());
        roster.starts("host", Mono(20));
        let looking = roster.sensors().remove("host").unwrap();
        assert_eq!((looking.began, looking.took), (Some(Mono(20)), Some(Span(4))));
        assert!(looking.components.contains("host.cpu"));
    }

    #[test]
    fn the_components_of_a_room_that_hangs_are_stale_and_no_others() {
        let roster = Roster::default();
        let at = |seconds: u64| Mono(seconds * 1_000_000_000);
        for sensor in ["hangs", "lives"] {
            roster.expect(sensor, at(0), Span::seconds(5));
            roster.has_looked(sensor, at(1), vec![format!("{sensor}.x")]);
        }
        let healthy =
            |name: &str| Component { name: name.into(), state: HealthState::Healthy, ..Component::default() };
        let shown = ["hangs.x", "lives.x"].map(|name| (name.to_owned(), healthy(name))).into();
        assert_eq!(roster.stale(at(31), &shown), []);
        roster.has_looked("lives", at(40), vec!["lives.x".to_owned()]);
        let stale = roster.stale(at(41), &shown);
        assert_eq!(
            stale.iter().map(|of| (of.name.as_str(), of.state)).collect::<Vec<_>>(),
            [("hangs.x", HealthState::Unknown)]
        );
    }
}

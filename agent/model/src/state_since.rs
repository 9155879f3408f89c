//! Keeps the time since when components are in their state across restarts of the agent: the restarted agent sees a
//! fault for the first time, but the journal has its start.

use std::collections::BTreeMap;

use crate::health::{Component, HealthState};
use crate::time::Mono;

/// The components' states before a restart in the same boot, until they change.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StateSince {
    before: BTreeMap<String, Before>,
}

#[derive(Clone, Debug, PartialEq)]
struct Before {
    state: HealthState,
    since: Mono,
    /// It was seen in this state since the restart.
    met: bool,
}

impl StateSince {
    /// Restores a component's state from the journal of this boot; the newest counts.
    pub fn recall(&mut self, component: &Component) {
        let Component { state, since, .. } = *component;
        self.before.insert(component.name.clone(), Before { state, since, met: false });
    }

    /// Sets the time since when a newly judged component is in its state. An unknown state after the restart does not
    /// end the earlier one.
    pub fn keep(&mut self, component: &mut Component) {
        let Some(before) = self.before.get_mut(&component.name) else { return };
        if before.state == component.state {
            before.met = true;
            component.since = component.since.min(before.since);
        } else if before.met || component.state != HealthState::Unknown {
            self.before.remove(&component.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use HealthState::{Degraded, Healthy, Unhealthy, Unknown};

    /// The `since` times of successive states from 100 on, after a restart; before it the component was unhealthy since
    /// 7.
    fn since(states: &[HealthState]) -> Vec<u64> {
        let component = |state, since| Component {
            name: "gpu.0000:3b:00".to_owned(),
            state,
            since: Mono(since),
            ..Component::default()
        };
        let mut standing = StateSince::default();
        standing.recall(&component(Degraded, 3));
        standing.recall(&component(Unhealthy, 7));
        let mut reported = Vec::new();
        for (place, state) in states.iter().enumerate() {
            let mut of = component(*state, 100 + place as u64);
            standing.keep(&mut of);
            reported.push(of.since.0);
        }
        reported
    }

    #[test]
    fn a_fault_that_outlasts_a_restart_keeps_its_start() {
        assert_eq!(since(&[Unhealthy, Unhealthy]), [7, 7]);
        assert_eq!(since(&[Unknown, Unhealthy]), [100, 7], "it was not read yet");
    }

    #[test]
    fn a_state_that_changed_in_between_starts_again() {
        assert_eq!(since(&[Healthy, Unhealthy]), [100, 101]);
        assert_eq!(since(&[Degraded, Unhealthy]), [100, 101], "another one");
        assert_eq!(since(&[Unhealthy, Unknown, Unhealthy]), [7, 101, 102]);
        assert_eq!(since(&[Unhealthy, Healthy, Unhealthy]), [7, 101, 102]);
    }

    #[test]
    fn a_component_without_a_journal_entry_is_unchanged() {
        let mut of = Component { name: "host.cpu".to_owned(), since: Mono(9), ..Component::default() };
        StateSince::default().keep(&mut of);
        assert_eq!(of.since, Mono(9));
    }
}

//! Since when components are as they are, over restarts of the agent: who looks anew sees the same fault for the first
//! time, but the journal tells since when it stands.

use std::collections::BTreeMap;

use crate::base::time::Mono;
use crate::model::health::{Component, HealthState};

/// How components stood before a restart, in the same boot, for as long as they stand so.
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
    /// Takes in how a component stood, as the journal of this boot tells it; the newest counts.
    pub fn recall(&mut self, component: &Component) {
        let Component { state, since, .. } = *component;
        self.before.insert(component.name.clone(), Before { state, since, met: false });
    }

    /// Gives a component that was judged anew the time since when it stands so. That it could not be read yet, says
    /// nothing of that.
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

    /// What is said since when, of states that follow each other from 100 on, after a restart before which the component
    /// was unhealthy since 7.
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
    fn a_fault_that_still_stands_after_a_restart_stands_since_it_came() {
        assert_eq!(since(&[Unhealthy, Unhealthy]), [7, 7]);
        assert_eq!(since(&[Unknown, Unhealthy]), [100, 7], "it was not read yet");
    }

    #[test]
    fn what_was_something_else_in_between_stands_since_then() {
        assert_eq!(since(&[Healthy, Unhealthy]), [100, 101]);
        assert_eq!(since(&[Degraded, Unhealthy]), [100, 101], "another one");
        assert_eq!(since(&[Unhealthy, Unknown, Unhealthy]), [7, 101, 102]);
        assert_eq!(since(&[Unhealthy, Healthy, Unhealthy]), [7, 101, 102]);
    }

    #[test]
    fn what_the_journal_does_not_know_is_as_it_was_judged() {
        let mut of = Component { name: "host.cpu".to_owned(), since: Mono(9), ..Component::default() };
        StateSince::default().keep(&mut of);
        assert_eq!(of.since, Mono(9));
    }
}

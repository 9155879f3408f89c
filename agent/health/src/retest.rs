//! GPUs that needed a reset or a reboot and look healthy since: whether the repair helped shows only under load. They
//! are degraded until `mainstay check --deep` has passed on them, or an operator acknowledges the fault.

use std::collections::BTreeMap;

use mainstay_model::component_id::ComponentId;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::observation::Observation;
use mainstay_model::operator::ACKNOWLEDGED;

/// How the reason of such a component starts. The journal is read by it after a restart.
pub const NOT_RETESTED: &str = "not retested";

/// The components that were faulty and were not tested since, with their faults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Untested {
    faults: BTreeMap<String, String>,
}

impl Untested {
    /// Restores what the journal has, of all boots, in its order.
    pub fn recall(&mut self, component: &Component) {
        match component.state {
            HealthState::Healthy => drop(self.faults.remove(&component.name)),
            _ if component.reason.starts_with(NOT_RETESTED) => {
                let fault = component.reason.split_once(": ").map_or("", |(_, fault)| fault);
                self.faults.insert(component.name.clone(), fault.to_owned());
            }
            _ => self.note(component),
        }
    }

    /// Restores what operators said: `mainstay check --deep` acknowledges what it has passed.
    pub fn recall_observation(&mut self, observation: &Observation) {
        if observation.event == ACKNOWLEDGED {
            self.faults.remove(&observation.component);
        }
    }

    /// Notes a fault of a component that was just judged, or changes its state if it only looks healthy.
    pub fn keep(&mut self, component: &mut Component) {
        let fault = self.faults.get(&component.name).filter(|_| component.state == HealthState::Healthy);
        match fault {
            Some(fault) => {
                component.state = HealthState::Degraded;
                component.reason = format!("{NOT_RETESTED} since this fault: {fault}");
                component.since = component.since.max(component.read_at.unwrap_or_default());
            }
            None => self.note(component),
        }
    }

    fn note(&mut self, component: &Component) {
        use RecommendedAction::{RebootNode, ResetDevice};
        let is_gpu = matches!(ComponentId::parse(&component.name), ComponentId::Gpu(_));
        let is_repaired_by_it = matches!(component.action, ResetDevice | RebootNode);
        if is_gpu && component.state == HealthState::Unhealthy && is_repaired_by_it {
            self.faults.insert(component.name.clone(), component.reason.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use HealthState::{Degraded, Healthy, Unhealthy, Unknown};

    const GPU: &str = "gpu.0000:3b:00";

    fn component(name: &str, state: HealthState, action: RecommendedAction) -> Component {
        Component {
            name: name.to_owned(),
            state,
            action,
            reason: "XID 79".to_owned(),
            ..Component::default()
        }
    }

    fn shown(untested: &mut Untested, state: HealthState) -> Component {
        let mut component = component(GPU, state, RecommendedAction::ResetDevice);
        untested.keep(&mut component);
        component
    }

    fn acknowledged() -> Observation {
        let (component, event) = (GPU.to_owned(), ACKNOWLEDGED.to_owned());
        Observation { component, event, ..Observation::default() }
    }

    #[test]
    fn a_gpu_that_looks_healthy_after_a_repair_is_degraded_until_it_was_tested() {
        let mut untested = Untested::default();
        let states = [Healthy, Unhealthy, Unknown, Healthy, Healthy];
        let shown_as = states.map(|state| shown(&mut untested, state).state);
        assert_eq!(shown_as, [Healthy, Unhealthy, Unknown, Degraded, Degraded]);
        untested.recall_observation(&acknowledged());
        assert_eq!(shown(&mut untested, Healthy).state, Healthy);
        let again = [Unhealthy, Healthy].map(|state| shown(&mut untested, state).state);
        assert_eq!(again, [Unhealthy, Degraded]);
    }

    #[test]
    fn a_restart_of_the_agent_or_the_host_does_not_test_a_gpu() {
        let mut before = Untested::default();
        let journal = [shown(&mut before, Unhealthy), shown(&mut before, Healthy)];
        for from in 0..2 {
            let mut untested = Untested::default();
            journal[from..].iter().for_each(|component| untested.recall(component));
            assert_eq!(untested, before, "of the entry {from} on");
        }
        before.recall(&component(GPU, Healthy, RecommendedAction::None));
        assert_eq!(before, Untested::default(), "the journal says that it was tested");
    }

    #[test]
    fn only_gpus_that_needed_a_reset_or_a_reboot_are_tested() {
        use RecommendedAction::{ContactSupport, RebootNode, ResetDevice, RestartProcess};
        for (name, action, state) in [
            (GPU, RebootNode, Degraded),
            (GPU, RestartProcess, Healthy),
            (GPU, ContactSupport, Healthy),
            ("gpu.driver", ResetDevice, Healthy),
            ("host.memory", RebootNode, Healthy),
        ] {
            let mut untested = Untested::default();
            untested.keep(&mut component(name, Unhealthy, action));
            let mut healthy = component(name, Healthy, RecommendedAction::None);
            untested.keep(&mut healthy);
            assert_eq!(healthy.state, state, "{name} {action:?}");
        }
    }
}

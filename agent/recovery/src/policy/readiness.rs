//! Whether the host is ready for a restart: nothing starts on a host that is not fit for training, or on GPUs that
//! are still in use.
//!
//! - Unknown state does not delay a restart.
//! - Nor does a component that the job has trained with: it was already unhealthy when the last step was completed.
//! - The job waits, with a deadline, for problems that can pass by themselves. It does not wait for those that need a
//!   reset, a reboot or a replacement.

use mainstay_health::host::preflight::Group;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};

/// The state of the host, as far as a restart depends on it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host<'a> {
    /// Components that are not fit for training, as the agent judges them; empty without an agent.
    pub unhealthy: &'a [Component],
    /// Resources in use that the ranks need, a sentence each: a GPU's memory, a port, a process that does not end.
    pub held: &'a [String],
    /// How long this restart has waited for the host so far.
    pub waited: Span,
    /// When the job last completed a step, in any attempt.
    pub last_step: Option<Mono>,
}

/// The result of the check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Nothing is in the way.
    Ready,
    /// Something is in the way that may pass; as a sentence.
    NotYet(String),
    /// The host is not fit, and waiting does not help; as a sentence.
    Unfit(String),
}

/// A component must be unhealthy for this long while steps are completed before it counts as one to train with.
const TRAINED_WITH: Span = Span::seconds(30);

/// Whether anything prevents a restart on this host.
pub fn readiness(host: Host<'_>) -> Readiness {
    let unhealthy: Vec<&Component> =
        host.unhealthy.iter().filter(|component| is_in_the_way(component, host)).collect();
    let reported = |component: &&Component| format!("{}: {}", component.name, component.reason);
    if let Some(unfit) = unhealthy.iter().find(|component| component.action >= RecommendedAction::ResetDevice)
    {
        return Readiness::Unfit(reported(unfit));
    }
    let mut reasons: Vec<String> = host.held.to_vec();
    reasons.extend(unhealthy.iter().map(reported));
    if reasons.is_empty() { Readiness::Ready } else { Readiness::NotYet(reasons.join("; ")) }
}

fn is_in_the_way(component: &Component, host: Host<'_>) -> bool {
    let trained_with = host.last_step.is_some_and(|step| component.since.after(TRAINED_WITH) < step);
    component.state == HealthState::Unhealthy && !trained_with && !passes_with_the_ranks(&component.name)
}

/// Whether the ranks themselves cause what is wrong with the component: it ends with them.
pub fn passes_with_the_ranks(component: &str) -> bool {
    // A network card that is not used for training does not matter here: fabric ports are a separate group.
    matches!(component, "host.memory" | "host.cpu" | "host.processes" | "host.files" | "host.tasks")
        || Group::from_name(component) == Group::Network
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unhealthy(name: &str, action: RecommendedAction, since: u64) -> Component {
        Component {
            name: name.into(),
            state: HealthState::Unhealthy,
            reason: "lost".into(),
            action,
            since: Mono(since * 1_000_000_000),
            ..Component::default()
        }
    }

    fn judged(unhealthy: &[Component], held: &[String]) -> Readiness {
        let last_step = Some(Mono(100 * 1_000_000_000));
        readiness(Host { unhealthy, held, waited: Span::default(), last_step })
    }

    #[test]
    fn a_lost_gpu_is_not_waited_for_and_a_mount_is() {
        let lost = unhealthy("gpu.0000:3b:00", RecommendedAction::RebootNode, 99);
        assert_eq!(judged(&[lost], &[]), Readiness::Unfit("gpu.0000:3b:00: lost".into()));
        let mount = unhealthy("host.mounts", RecommendedAction::None, 101);
        assert_eq!(judged(&[mount], &[]), Readiness::NotYet("host.mounts: lost".into()));
        assert_eq!(judged(&[], &["memory is held".into()]), Readiness::NotYet("memory is held".into()));
    }

    #[test]
    fn components_the_job_trained_with_that_end_with_it_or_are_only_degraded_are_not_in_the_way() {
        let old = unhealthy("gpu.0000:3b:00", RecommendedAction::RebootNode, 10);
        let own = unhealthy("host.memory", RecommendedAction::RestartProcess, 101);
        let slow = Component {
            state: HealthState::Degraded,
            ..unhealthy("fabric.mlx5_0/1", RecommendedAction::ReplaceNode, 101)
        };
        let unknown = Component {
            state: HealthState::Unknown,
            ..unhealthy("gpu.driver", RecommendedAction::RebootNode, 101)
        };
        assert_eq!(judged(&[old, own, slow, unknown], &[]), Readiness::Ready);
    }
}

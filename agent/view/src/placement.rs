//! Whether this host can store replicas, from its view.

use std::collections::{BTreeMap, BTreeSet};

use crate::node::{JobPhase, JobView, NodeView, RankView};
use mainstay_checkpoint::eligibility::PlacementEligibility;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_progress::parallelism::Layout;

/// As seen by the host's agent. `run_of` returns the run id of a job.
pub fn placement_eligibility(
    view: &NodeView,
    run_of: impl Fn(&JobView) -> Option<String>,
) -> PlacementEligibility {
    let mut stages: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for job in view.jobs.values() {
        let own = stages_of(job);
        if let Some(run) = run_of(job).filter(|_| !own.is_empty()) {
            stages.entry(run).or_default().extend(own);
        }
    }
    PlacementEligibility { excluded: excluded(view.counting()), stages }
}

/// Why a host with these components cannot store replicas: a component is unhealthy and only a reboot or another host helps, or the
/// cloud takes the machine away. Either one destroys the contents of its memory. `None` if the host is eligible.
fn excluded<'a>(components: impl Iterator<Item = &'a Component>) -> Option<String> {
    use RecommendedAction::{RebootNode, ReplaceNode};
    let ends = |component: &&Component| {
        component.state == HealthState::Unhealthy && matches!(component.action, RebootNode | ReplaceNode)
    };
    let worst = components.filter(ends).max_by_key(|component| component.action)?;
    Some(format!("{}: {}", worst.name, worst.reason))
}

/// The pipeline stages of a job's ranks on this host, as reported by the ranks, or else from the job's command line.
fn stages_of(job: &JobView) -> BTreeSet<u32> {
    if matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost) {
        return BTreeSet::new();
    }
    let layout = Layout::of_command(&job.spec.command);
    let of = |rank: &RankView| {
        let reported = rank.beat.as_ref().and_then(|beat| beat.stage);
        reported.or_else(|| layout.stage(rank.rank.0, job.spec.world_size))
    };
    job.ranks.values().filter_map(|rank| of(rank)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::BeatView;
    use mainstay_model::entry::{Body, Entry, Fact, JobSpec, StartedRank};
    use mainstay_model::id::{Attempt, BootId, JobId, Pid, Rank};
    use mainstay_model::time::Stamp;

    fn component(name: &str, state: HealthState, action: RecommendedAction) -> Component {
        Component { name: name.to_owned(), state, reason: "so".to_owned(), action, ..Component::default() }
    }

    #[test]
    fn a_host_is_excluded_for_what_ends_its_memory_and_for_nothing_else() {
        use HealthState::{Degraded, Unhealthy, Unknown};
        use RecommendedAction::{ContactSupport, RebootNode, ReplaceNode, ResetDevice};
        let passes = [
            component("host.memory", Unhealthy, RecommendedAction::RestartProcess),
            component("gpu.1", Unhealthy, ResetDevice),
            component("fabric.mlx5_0", Unhealthy, ContactSupport),
            component("host.cloud", Degraded, ReplaceNode),
            component("gpu.driver", Unknown, RebootNode),
        ];
        assert_eq!(excluded(passes.iter()), None);
        let lost =
            [component("gpu.2", Unhealthy, RebootNode), component("host.cloud", Unhealthy, ReplaceNode)];
        assert_eq!(excluded(passes.iter().chain(&lost[..1])).as_deref(), Some("gpu.2: so"));
        assert_eq!(excluded(lost.iter()).as_deref(), Some("host.cloud: so"), "the heavier of two");
    }

    /// A job of eight ranks in four stages. This host has ranks 2 and 3.
    fn view() -> NodeView {
        let command = ["train.py", "--pp", "4"].map(str::to_owned).to_vec();
        let spec = JobSpec { command, world_size: 8, local_world_size: 2, ..JobSpec::default() };
        let ranks = [2, 3].map(|rank| StartedRank {
            rank: Rank(rank),
            local_rank: rank - 2,
            pid: Pid(7),
            page: None,
            start_ticks: None,
        });
        let started = Fact::AttemptStarted {
            attempt: Attempt(0),
            master_port: 1,
            ranks: ranks.to_vec(),
            hosts: vec![],
        };
        let mut view = NodeView::default();
        for fact in [Fact::JobStarted(spec), started] {
            view.apply(&entry(fact));
        }
        view
    }

    fn entry(fact: Fact) -> Entry {
        let (at, boot) = (Stamp::default(), BootId::default());
        Entry {
            seq: 1,
            at,
            boot,
            job: Some(JobId("job".to_owned())),
            origin_seq: None,
            body: Body::Fact(fact),
        }
    }

    #[test]
    fn stages_are_those_reported_by_ranks_or_else_those_of_the_command() {
        let mut view = view();
        let run = |_: &JobView| Some("run".to_owned());
        assert_eq!(placement_eligibility(&view, run), stages("run", &[1]));
        let reported = BeatView { stage: Some(3), ..BeatView::default() };
        view.sample(&JobId("job".to_owned()), Attempt(0), Rank(3), reported);
        assert_eq!(placement_eligibility(&view, run), stages("run", &[1, 3]));
        assert_eq!(
            placement_eligibility(&view, |_| None),
            PlacementEligibility::default(),
            "nobody else knows of that run"
        );
        view.apply(&entry(Fact::JobEnded { exit: 0, reason: String::new() }));
        assert_eq!(placement_eligibility(&view, run), PlacementEligibility::default());
    }

    fn stages(run: &str, stages: &[u32]) -> PlacementEligibility {
        PlacementEligibility {
            stages: BTreeMap::from([(run.to_owned(), stages.iter().copied().collect())]),
            ..PlacementEligibility::default()
        }
    }
}

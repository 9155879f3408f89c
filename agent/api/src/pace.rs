//! Job speed: steps per second over the last minute, from the snapshots.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use mainstay_model::id::JobId;
use mainstay_model::time::Mono;
use mainstay_view::node::NodeView;
use mainstay_view::step_rate::StepRate;

use super::ReadSide;

/// The rates of all jobs. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Pace(Arc<Mutex<BTreeMap<JobId, StepRate>>>);

/// Watches the snapshots for as long as they have a writer.
pub(super) async fn follow(read: ReadSide) {
    let mut snapshots = read.snapshots.clone();
    read.pace.observe(&snapshots.view());
    while snapshots.changed().await {
        read.pace.observe(&snapshots.view());
    }
    read.snapshots_gone.cancel();
}

impl Pace {
    /// Records the current steps of the jobs, with the times at which they were current: the first one after a restart
    /// of the agent is from the journal, and many steps may have been completed since then.
    pub(super) fn observe(&self, view: &NodeView) {
        let mut jobs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.retain(|id, _| view.jobs.contains_key(id));
        for (id, job) in &view.jobs {
            let Some(step) = job.step else { continue };
            jobs.entry(id.clone()).or_default().add(job.step_at, job.attempt, step);
        }
    }

    /// Steps per second of a job, if two different steps of its current attempt were observed.
    pub(super) fn steps_per_second(&self, id: &JobId, now: Mono) -> Option<f64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(id)?.rate(now)
    }
}
#[cfg(test)]
mod tests {
    use mainstay_model::entry::{Body, Entry, Fact, JobSpec, StartedRank};
    use mainstay_model::id::{Attempt, BootId, Pid, Rank};
    use mainstay_model::time::{Span, Stamp};
    use mainstay_view::node::BeatView;

    use super::*;

    fn at(second: u64) -> Mono {
        Mono(second * 1_000_000_000)
    }

    #[test]
    fn steps_completed_while_the_agent_was_away_are_spread_over_that_time() {
        let (id, stamp) = (JobId("j".to_owned()), |second| Stamp { mono: at(second), ..Stamp::default() });
        let entry = |second, fact| Entry {
            seq: second,
            at: stamp(second),
            boot: BootId::default(),
            job: Some(JobId("j".to_owned())),
            origin_seq: None,
            body: Body::Fact(fact),
        };
        let rank = StartedRank { rank: Rank(0), local_rank: 0, pid: Pid(1), page: None, start_ticks: None };
        let attempt = Attempt(0);
        let mut view = NodeView::default();
        for entry in [
            entry(1, Fact::JobStarted(JobSpec::default())),
            entry(2, Fact::AttemptStarted { attempt, master_port: 1, ranks: vec![rank], hosts: Vec::new() }),
            entry(91, Fact::Progress { attempt, step: 900, loss: None, saving: Span::default(), saves: 0 }),
        ] {
            view.apply(&entry);
        }
        // The agent starts again at 100 with what its journal says, and reads the rank's page a second later.
        let pace = Pace::default();
        pace.observe(&view);
        let beat = |second, step| BeatView { step: Some(step), at: at(second), ..BeatView::default() };
        view.sample(&id, attempt, Rank(0), beat(101, 1000));
        pace.observe(&view);
        assert_eq!(pace.steps_per_second(&id, at(101)), Some(10.0));
        view.sample(&id, attempt, Rank(0), beat(111, 1100));
        pace.observe(&view);
        assert_eq!(pace.steps_per_second(&id, at(111)), Some(10.0));
    }
}

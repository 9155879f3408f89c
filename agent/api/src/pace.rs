//! Job speed: steps per second over the last minute, from the snapshots.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use mainstay_model::id::{Attempt, JobId};
use mainstay_model::time::{Mono, Span};
use mainstay_view::node::NodeView;

use super::ReadSide;

/// How far back a rate looks. Two samples are always kept, for trainers with long steps.
const RATE_WINDOW: Span = Span::seconds(60);

/// The rates of all jobs. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Pace(Arc<Mutex<BTreeMap<JobId, Samples>>>);

struct Samples {
    attempt: Attempt,
    seen: VecDeque<(Mono, u64)>,
}

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
            let samples = jobs
                .entry(id.clone())
                .or_insert_with(|| Samples { attempt: job.attempt, seen: VecDeque::new() });
            samples.add(job.step_at, job.attempt, step);
        }
    }

    /// Steps per second of a job, if two different steps of its current attempt were observed.
    pub(super) fn steps_per_second(&self, id: &JobId, now: Mono) -> Option<f64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(id)?.rate(now)
    }
}

impl Samples {
    fn add(&mut self, at: Mono, attempt: Attempt, step: u64) {
        let newest = self.seen.back().map(|(_, step)| *step);
        if attempt != self.attempt || newest.is_some_and(|newest| step < newest) {
            self.attempt = attempt;
            self.seen.clear();
        } else if newest == Some(step) {
            return;
        }
        self.seen.push_back((at, step));
        while self.seen.len() > 2
            && self.seen.front().is_some_and(|(first, _)| at.since(*first) > RATE_WINDOW)
        {
            self.seen.pop_front();
        }
    }

    fn rate(&self, now: Mono) -> Option<f64> {
        let (first_at, first) = *self.seen.front()?;
        let (last_at, last) = *self.seen.back()?;
        let steps = last.checked_sub(first).filter(|steps| *steps > 0)?;
        let span = last_at.since(first_at).as_seconds();
        // One usual step time may pass without a new step; time beyond it lowers the rate.
        let quiet = (now.since(last_at).as_seconds() - span / steps as f64).max(0.0);
        Some(steps as f64 / (span + quiet)).filter(|rate| rate.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use mainstay_model::entry::{Body, Entry, Fact, JobSpec, StartedRank};
    use mainstay_model::id::{BootId, Pid, Rank};
    use mainstay_model::time::Stamp;
    use mainstay_view::node::BeatView;

    use super::*;

    fn samples(points: &[(u64, u64)]) -> Samples {
        let mut samples = Samples { attempt: Attempt(0), seen: VecDeque::new() };
        for (second, step) in points {
            samples.add(Mono(second * 1_000_000_000), Attempt(0), *step);
        }
        samples
    }

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

    #[test]
    fn a_rate_needs_two_different_steps() {
        assert_eq!(samples(&[]).rate(at(9)), None);
        assert_eq!(samples(&[(1, 5)]).rate(at(9)), None);
        assert_eq!(samples(&[(1, 5), (2, 5)]).rate(at(9)), None);
        assert_eq!(samples(&[(1, 5), (3, 9)]).rate(at(3)), Some(2.0));
    }

    #[test]
    fn the_rate_of_a_job_without_progress_falls() {
        let samples = samples(&[(0, 0), (10, 10)]);
        assert_eq!(samples.rate(at(11)), Some(1.0));
        assert_eq!(samples.rate(at(21)), Some(0.5));
    }

    #[test]
    fn only_the_last_minute_counts_and_a_new_attempt_starts_afresh() {
        let mut samples = samples(&[(0, 0), (100, 1000), (130, 1030), (160, 1060)]);
        assert_eq!(samples.rate(at(160)), Some(1.0));
        samples.add(at(161), Attempt(1), 1060);
        assert_eq!(samples.rate(at(161)), None);
    }

    #[test]
    fn steps_that_are_done_again_start_afresh() {
        let samples = samples(&[(0, 100), (10, 110), (20, 105), (21, 106)]);
        assert_eq!(samples.rate(at(21)), Some(1.0));
    }
}

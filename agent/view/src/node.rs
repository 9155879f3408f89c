//! The read side: the state of a node and its jobs. Computed only from journal entries and live samples of the heartbeat pages, so that
//! an agent shows the same state after a restart.

mod implicated;
mod job;

use std::collections::BTreeMap;
use std::sync::Arc;

use mainstay_checkpoint::advice::Advised;
use mainstay_checkpoint::copied_step::CopiedStep;
use mainstay_hang::Hang;
use mainstay_health::hardware::gpu::GpuView;
use mainstay_model::entry::{Body, Entry, ExitStatus, Fact, JobSpec};
use mainstay_model::finding::Finding;
use mainstay_model::health::{Component, HealthState};
use mainstay_model::id::{Attempt, JobId, Pid, Rank};
use mainstay_model::operator::OperatorState;
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_model::verdict::{Decision, Verdict};
use mainstay_progress::monitor::Pace;
use mainstay_recovery::policy::CauseKind;

use crate::goodput::Books;

pub use implicated::Implicated;

/// The phase of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobPhase {
    /// Its ranks have started, but not all have completed a step.
    Starting,
    /// All ranks have completed a step in this attempt.
    Running,
    /// Ranks are being stopped after a fault.
    Recovering,
    /// The launcher was asked to stop.
    Stopping,
    /// The job ended with this exit status.
    Ended(i32),
    /// The launcher disappeared.
    Lost,
}

impl JobPhase {
    /// Its name, as the API spells it.
    pub fn name(self) -> &'static str {
        match self {
            JobPhase::Starting => "STARTING",
            JobPhase::Running => "RUNNING",
            JobPhase::Recovering => "RECOVERING",
            JobPhase::Stopping => "STOPPING",
            JobPhase::Ended(_) => "ENDED",
            JobPhase::Lost => "LOST",
        }
    }
}

/// The phase of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankPhase {
    /// Its process was started.
    Started,
    /// Its heartbeat client connected.
    Connected,
    /// It raised an exception; its process may still exist.
    Raised,
    /// It ended.
    Exited(ExitStatus),
}

/// A rank of the current attempt.
#[derive(Clone, Debug, PartialEq)]
pub struct RankView {
    /// Its number.
    pub rank: Rank,
    /// Its local rank on the host.
    pub local_rank: u32,
    /// Its process on its host.
    pub pid: Pid,
    /// When the process started, in clock ticks since the boot of its host, if known.
    pub start_ticks: Option<u64>,
    /// Its host, in a job of several hosts.
    pub host: Option<String>,
    /// Its heartbeat page, if it has one.
    pub page: Option<String>,
    /// Its phase.
    pub phase: RankPhase,
    /// Why its client refused to send heartbeats.
    pub refusal: Option<String>,
    /// The last sample of its page.
    pub beat: Option<BeatView>,
    /// The last step completed before it exited.
    pub last_step: Option<u64>,
}

/// A sample of a heartbeat page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BeatView {
    /// The last step that it completed.
    pub step: Option<u64>,
    /// Its open sections, outermost first.
    pub sections: Vec<String>,
    /// The time of the last heartbeat.
    pub at: Mono,
    /// The last loss reported.
    pub loss: Option<f64>,
    /// The median duration of its recent steps.
    pub median_step: Option<Span>,
    /// Its recent steps compared with its peers'.
    pub pace: Pace,
    /// The pipeline stage it reported.
    pub stage: Option<u32>,
    /// The number of steps after which its program ends, if it reported it.
    pub total_steps: Option<u64>,
}

/// A job on this host.
#[derive(Clone, Debug, PartialEq)]
pub struct JobView {
    /// Its name.
    pub id: JobId,
    /// Its specification.
    pub spec: Arc<JobSpec>,
    /// Its phase.
    pub phase: JobPhase,
    /// The current attempt.
    pub attempt: Attempt,
    /// Its time by state and cause.
    pub books: Arc<Books>,
    /// When its ranks were started.
    pub attempt_started: Mono,
    /// When the launcher started.
    pub started: Stamp,
    /// The number of the journal entry of its start.
    pub began: u64,
    /// The newest step known to be completed by all ranks.
    pub step: Option<u64>,
    /// When that was observed. After a restart of the agent the step is from the journal, and may be old.
    pub step_at: Mono,
    /// The ranks of the current attempt. Shared with the snapshots: a job may have 100,000 ranks, and each change of one of them
    /// creates a snapshot.
    pub ranks: BTreeMap<Rank, Arc<RankView>>,
    /// The hosts of the current attempt, by name; empty in a job of one host.
    pub hosts: Vec<String>,
    /// Ranks that are alive and make no progress.
    pub hang: Option<Box<Hang>>,
    /// Restarts so far.
    pub restarts: u32,
    /// Of these, those in which all ranks kept their processes.
    pub restarts_in_process: u32,
    /// Of these, those in which only some ranks were restarted.
    pub restarts_of_some: u32,
    /// Its current findings, by number.
    pub findings: BTreeMap<u64, Finding>,
    /// The number of failures, by kind of cause and fault domain.
    pub failures: BTreeMap<(CauseKind, &'static str), u32>,
    /// The number of failures that were not the user's fault, by the host where they started; `None` in a job of one
    /// host.
    pub failures_by_host: BTreeMap<Option<String>, u32>,
    /// The last verdict.
    pub last_verdict: Option<Verdict>,
    /// The last decision.
    pub last_decision: Option<Decision>,
    /// Why it ended, if it did.
    pub end_reason: Option<String>,
    /// How often the built-in policy decided in place of the user's own.
    pub policy_troubles: u32,
    /// The reason for the last time.
    pub policy_trouble: Option<String>,
    /// The advised interval between checkpoints. `None` before it has saved a few times.
    pub saving: Option<Advised>,
    /// The newest step with a copy of each shard on another host, and when that was reported.
    pub copied: Option<(CopiedStep, Stamp)>,
    /// Why copies are behind. Cleared when a newer step has its copies.
    pub copies_behind: Option<String>,
    /// For a spare host: what it has ready, in words.
    pub waits: Option<String>,
    /// Whether the launcher of this host decides for the job.
    pub leads: bool,
}

/// The node: its components and its jobs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeView {
    /// Components by name.
    pub components: BTreeMap<String, Component>,
    /// Jobs by name.
    pub jobs: BTreeMap<JobId, JobView>,
    /// What operators acknowledged or silenced.
    pub operator_state: OperatorState,
    /// When failures of jobs implicated this host.
    pub implicated: Implicated,
    /// GPUs with their last readings, ordered by address. Not from the journal.
    pub gpus: Arc<[GpuView]>,
}

impl NodeView {
    /// The worst state of all components that count. `Unknown` if none was read yet.
    pub fn state(&self) -> HealthState {
        if self.components.is_empty() {
            return HealthState::Unknown;
        }
        self.counting().map(|component| component.state).max().unwrap_or(HealthState::Healthy)
    }

    /// The components that count for the node: those that no operator acknowledged or silenced.
    pub fn counting(&self) -> impl Iterator<Item = &Component> {
        self.components.values().filter(|component| self.operator_state.counts(&component.name))
    }

    /// Applies the next journal entry.
    pub fn apply(&mut self, entry: &Entry) {
        match (&entry.job, &entry.body) {
            (_, Body::Health(change)) => {
                self.components.insert(change.component.name.clone(), change.component.clone());
            }
            (None, Body::Fact(Fact::Observed(observation))) => {
                self.operator_state.take_in(entry.at, &entry.boot, observation);
            }
            (Some(id), Body::Fact(Fact::JobStarted(spec))) => {
                let mut job = JobView::new(id.clone(), spec.clone(), (entry.at, entry.seq));
                // A job that was requeued goes on under its name.
                if let Some(before) = self.jobs.remove(id).filter(|before| before.spec.run == spec.run) {
                    job.books = before.books;
                }
                Arc::make_mut(&mut job.books).entry(entry);
                self.jobs.insert(id.clone(), job);
            }
            (Some(id), body) => {
                if let Some(job) = self.jobs.get_mut(id) {
                    let before = job.step;
                    job.apply(body);
                    self.implicated.take_in(entry, job);
                    Arc::make_mut(&mut job.books).entry(entry);
                    let is_news =
                        matches!(body, Body::Fact(Fact::RanksStepping { .. } | Fact::Progress { .. }));
                    if is_news || job.step != before {
                        job.step_at = entry.at.mono;
                    }
                    match body {
                        Body::Fact(Fact::Observed(seen)) => job.apply_copies(entry.at, seen),
                        Body::Fact(Fact::AttemptStarted { .. }) => job.attempt_started = entry.at.mono,
                        _ => {}
                    }
                }
            }
            (None, _) => {}
        }
    }

    /// Stores a sample of a rank's page. Ignores pages of earlier attempts.
    pub fn sample(&mut self, job: &JobId, attempt: Attempt, rank: Rank, beat: BeatView) {
        self.samples(job, attempt, [(rank, beat)]);
    }

    /// The same for several ranks.
    pub fn samples(
        &mut self,
        job: &JobId,
        attempt: Attempt,
        beats: impl IntoIterator<Item = (Rank, BeatView)>,
    ) {
        let Some(job) = self.jobs.get_mut(job).filter(|job| job.attempt == attempt) else { return };
        for (rank, beat) in beats {
            if let Some(rank) = job.rank_mut(rank) {
                rank.beat = Some(beat);
            }
        }
        let beats =
            job.ranks.values().map(|rank| rank.beat.as_ref().and_then(|beat| Some((beat.step?, beat.at))));
        let Some(beats) = beats.collect::<Option<Vec<(u64, Mono)>>>() else { return };
        let step = beats.iter().map(|(step, _)| *step).min();
        if step.is_some() && step != job.step {
            let last = beats.iter().filter(|(of, _)| Some(*of) == step).map(|(_, at)| *at);
            job.step_at = last.max().unwrap_or_default();
            job.step = step;
        }
    }
}

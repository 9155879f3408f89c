//! The failures of a job and what was done about them.

use serde::{Deserialize, Serialize};

use mainstay_checkpoint::advice::Advised;
use mainstay_diagnosis::repeats::{FailurePosition, SeenBefore};
use mainstay_model::id::{Attempt, Incident};
use mainstay_model::time::Mono;
use mainstay_model::verdict::{Cause, Outcome, Verdict};
use mainstay_progress::goodput::{Ledger, TimeAccounting};
use mainstay_progress::memory::JobMemory;

use crate::policy::{self, Experience, PastFailure};

/// The failures of a job.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    pub(super) incidents: Vec<IncidentTimes>,
    /// Failures after which the ranks were started again.
    pub(super) past: Vec<PastFailure>,
    /// What earlier runs learned about rungs.
    pub(super) earlier: Vec<Experience>,
}

impl History {
    /// The last failure, or 0 before the first.
    pub(super) fn last(&self) -> Incident {
        Incident(self.incidents.len() as u64)
    }

    /// The next failure.
    pub(super) fn next(&self) -> Incident {
        Incident(self.last().0 + 1)
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.incidents.len()).unwrap_or(u32::MAX)
    }

    /// Adds a failure that has a verdict and no decision yet.
    pub(super) fn add(&mut self, at: Mono, verdict: &Verdict, reached: Option<u64>) {
        self.incidents.push(IncidentTimes {
            incident: verdict.incident,
            headline: verdict.headline.clone(),
            decision: String::new(),
            fault_at: verdict.fault_at,
            detected_at: verdict.detected_at,
            stopped_at: Some(at),
            decided_at: None,
            started_at: None,
            connected_at: None,
            first_step_at: None,
            reached_before: reached,
            first_step: None,
            exclude: None,
        });
    }

    /// The hosts that another try of the job should leave out, each once.
    pub(super) fn to_exclude(&self) -> Vec<String> {
        hosts_to_exclude(&self.incidents)
    }

    /// The last failure, until all ranks have completed a step after it.
    pub(super) fn open(&mut self) -> Option<&mut IncidentTimes> {
        self.incidents.last_mut().filter(|incident| incident.first_step_at.is_none())
    }

    /// The outcome of the last restart, at the first step that all ranks completed after it.
    pub(super) fn outcome(
        &mut self,
        at: Mono,
        attempt: Attempt,
        step: u64,
        counted: bool,
        ledger: &Ledger,
    ) -> Option<Outcome> {
        let incident = self.incidents.last_mut().filter(|incident| incident.first_step_at.is_none())?;
        incident.first_step_at = Some(at);
        incident.first_step = Some(step);
        let took = at.since(incident.fault_at);
        if let Some(past) = self.past.last_mut() {
            past.back_after.get_or_insert(took);
        }
        Some(Outcome {
            incident: incident.incident,
            attempt,
            step,
            reached_before: incident.reached_before.unwrap_or(0),
            steps_lost: ledger.highest_before().map_or(0, |highest| (highest + 1).saturating_sub(step)),
            counted,
            to_ranks_started: incident.started_at.unwrap_or(at).since(incident.fault_at),
            to_ranks_connected: incident.connected_at.map(|connected| connected.since(incident.fault_at)),
            to_first_step: took,
        })
    }

    /// Earlier failures of the same kind in this run.
    pub(super) fn seen_before(&self, verdict: &Verdict) -> Option<SeenBefore> {
        let Cause::Exception { fingerprint: now, .. } = &verdict.cause else { return None };
        let same = |past: &&PastFailure| matches!(&past.cause, Cause::Exception { fingerprint, .. } if fingerprint == now);
        let mut seen = SeenBefore::default();
        let places = self.past.iter().filter(same).map(|past| FailurePosition {
            step: past.step,
            data: past.data,
            heartbeats: past.heartbeats,
        });
        places.for_each(|then| seen.count(then, FailurePosition::from_verdict(verdict)));
        (!seen.is_nothing()).then_some(seen)
    }

    /// Adds what this run learned, for the next one.
    pub(super) fn remember(&self, learned: &mut JobMemory) {
        let failed_again = self.incidents.len() > self.past.len();
        learned.rungs = policy::experiences(&self.earlier, &self.past, failed_again);
    }
}

/// The times of one failure, for users: all on the host's monotonic clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IncidentTimes {
    /// The failure.
    pub incident: Incident,
    /// Its headline.
    pub headline: String,
    /// The decision, as a sentence.
    pub decision: String,
    /// When it happened.
    pub fault_at: Mono,
    /// When the launcher noticed it.
    pub detected_at: Mono,
    /// When the last process of the failed attempt had ended.
    pub stopped_at: Option<Mono>,
    /// When the action was decided.
    pub decided_at: Option<Mono>,
    /// When the new ranks' processes were created.
    pub started_at: Option<Mono>,
    /// When the last of the new ranks' heartbeat clients connected.
    pub connected_at: Option<Mono>,
    /// When all ranks had completed a step again.
    pub first_step_at: Option<Mono>,
    /// The newest step reached before.
    pub reached_before: Option<u64>,
    /// The first step completed after.
    pub first_step: Option<u64>,
    /// The host that another try of the job should leave out because of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclude: Option<String>,
}

/// The hosts that another try should leave out after these failures, each once and in their order.
pub fn hosts_to_exclude(incidents: &[IncidentTimes]) -> Vec<String> {
    let mut hosts: Vec<String> = Vec::new();
    for host in incidents.iter().filter_map(|incident| incident.exclude.as_ref()) {
        if !hosts.contains(host) {
            hosts.push(host.clone());
        }
    }
    hosts
}

/// The summary of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The exit status of the launcher.
    pub exit: i32,
    /// The reason, as a sentence.
    pub reason: String,
    /// How often the ranks were started.
    pub attempts: u32,
    /// The time accounting.
    #[serde(rename = "books")]
    pub accounting: TimeAccounting,
    /// Its failures.
    pub incidents: Vec<IncidentTimes>,
    /// The advised save interval. `None` before it has saved a few times.
    #[serde(default)]
    pub saving: Option<Advised>,
    /// The hosts that another try of the job should leave out, for `sbatch --exclude`.
    #[serde(default)]
    pub exclude: Vec<String>,
}

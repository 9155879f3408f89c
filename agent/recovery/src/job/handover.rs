//! The state that another leader needs to continue a job on several hosts: how often it failed, the actions taken,
//! and the time accounting. Hosts report again what ranks do in the current attempt.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::policy::{PastFailure, Rung, Settings};
use mainstay_model::entry::JobSpec;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_progress::goodput::Ledger;

use super::{IncidentTimes, Job, Phase, RankState};

/// Texts of older incidents are left out: the record of a job is bounded, its number of failures may not be.
const INCIDENTS_WITH_TEXTS: usize = 64;

/// The state of a job, with times on the clock of the leader that wrote it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HandoverState {
    /// The current attempt.
    pub attempt: Attempt,
    attempt_began: Mono,
    past: Vec<PastFailure>,
    incidents: Vec<IncidentTimes>,
    ledger: Ledger,
    beating: BTreeSet<Rank>,
    longest_start: Option<Span>,
    last_step: Option<Mono>,
    saved: Option<u64>,
    stop_requested: Option<i32>,
    #[serde(default)]
    save_ordered: Option<(i32, Attempt)>,
    rung: Rung,
}

impl HandoverState {
    /// The same with its times converted to another clock.
    #[must_use]
    pub fn on_clock(self, at: &dyn Fn(Mono) -> Mono) -> HandoverState {
        let past = self.past.into_iter();
        let past = past.map(|past| PastFailure { decided_at: at(past.decided_at), ..past }).collect();
        let incidents = self.incidents.into_iter().map(|incident| IncidentTimes {
            fault_at: at(incident.fault_at),
            detected_at: at(incident.detected_at),
            stopped_at: incident.stopped_at.map(at),
            decided_at: incident.decided_at.map(at),
            started_at: incident.started_at.map(at),
            connected_at: incident.connected_at.map(at),
            first_step_at: incident.first_step_at.map(at),
            ..incident
        });
        HandoverState {
            attempt_began: at(self.attempt_began),
            past,
            incidents: incidents.collect(),
            ledger: self.ledger.on_clock(at),
            last_step: self.last_step.map(at),
            ..self
        }
    }
}

impl Job {
    /// The state for the next leader.
    pub fn carried(&self) -> HandoverState {
        let mut incidents = self.incidents.clone();
        let old = incidents.len().saturating_sub(INCIDENTS_WITH_TEXTS);
        for incident in incidents.iter_mut().take(old) {
            incident.headline.clear();
            incident.decision.clear();
        }
        HandoverState {
            attempt: self.attempt,
            attempt_began: self.attempt_began,
            past: self.past.clone(),
            incidents,
            ledger: self.ledger.clone(),
            beating: self.beating.clone(),
            longest_start: self.longest_start,
            last_step: self.last_step,
            saved: self.saved.0,
            stop_requested: self.stop_requested,
            save_ordered: self.save_ordered,
            rung: self.rung,
        }
    }

    /// Continues a job that another leader started: its attempt runs with these ranks, or is being started if there
    /// are none. `carried` is `None` if that leader was lost before the first start. This records and orders nothing.
    pub fn resume(
        at: Mono,
        spec: JobSpec,
        policy: impl Into<Settings>,
        carried: Option<HandoverState>,
        running: &[Rank],
    ) -> Job {
        let mut job = Job::begin(at, spec, policy, &mut Vec::new());
        if let Some(carried) = carried {
            job.attempt = carried.attempt;
            job.attempt_began = carried.attempt_began;
            job.past = carried.past;
            job.incidents = carried.incidents;
            job.ledger = carried.ledger;
            job.beating = carried.beating;
            job.longest_start = carried.longest_start;
            job.last_step = carried.last_step;
            job.saved = (carried.saved, carried.saved);
            job.stop_requested = carried.stop_requested;
            job.save_ordered = carried.save_ordered;
            job.rung = carried.rung;
        }
        if !running.is_empty() {
            job.ranks = running.iter().map(|rank| (*rank, RankState::default())).collect();
            job.watch.begin_attempt(job.attempt, running.to_vec());
            job.phase = Phase::Running;
        }
        job
    }
}

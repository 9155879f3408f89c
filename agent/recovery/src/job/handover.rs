//! The state that another leader needs to continue a job on several hosts: how often it failed, the actions taken,
//! and the time accounting. Hosts report again what ranks do in the current attempt.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::policy::{PastFailure, Rung};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_progress::goodput::Ledger;

use super::{IncidentTimes, Job};

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

impl HandoverState {
    pub(super) fn from_job(job: &Job) -> HandoverState {
        let mut incidents = job.history.incidents.clone();
        let old = incidents.len().saturating_sub(INCIDENTS_WITH_TEXTS);
        for incident in incidents.iter_mut().take(old) {
            incident.headline.clear();
            incident.decision.clear();
        }
        HandoverState {
            attempt: job.attempt,
            attempt_began: job.course.began,
            past: job.history.past.clone(),
            incidents,
            ledger: job.ledger.clone(),
            beating: job.ranks.beating.clone(),
            longest_start: job.restart.longest,
            last_step: job.last_step,
            saved: job.saving.newest,
            stop_requested: job.stop_requested,
            save_ordered: job.save_ordered,
            rung: job.restart.rung,
        }
    }

    pub(super) fn restore(self, job: &mut Job) {
        job.attempt = self.attempt;
        job.course.began = self.attempt_began;
        job.history.past = self.past;
        job.history.incidents = self.incidents;
        job.ledger = self.ledger;
        job.ranks.beating = self.beating;
        job.restart.longest = self.longest_start;
        job.last_step = self.last_step;
        (job.saving.newest, job.saving.newest_before) = (self.saved, self.saved);
        job.stop_requested = self.stop_requested;
        job.save_ordered = self.save_ordered;
        job.restart.rung = self.rung;
    }
}

//! The progress of the ranks.

use mainstay_checkpoint::advice;
use mainstay_model::entry::{Body, Fact, StepDone};
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::Outcome;
use mainstay_progress::goodput::TimeCategory;

use super::{Job, Output, RankState};

/// Progress is recorded in the journal this often.
const PROGRESS_EVERY: Span = Span::seconds(10);

impl Job {
    pub(super) fn connected(&mut self, at: Mono, rank: Rank) {
        if let Some(state) = self.ranks.get_mut(&rank) {
            state.connected = true;
            self.beating.insert(rank);
        }
        if self.ledger.state() == TimeCategory::Starting {
            self.ledger.enter(at, TimeCategory::Initialising);
        }
        if !self.asked.connected.any(&self.ranks, |_, state| !state.connected) {
            self.with_incident(|incident| {
                incident.connected_at.get_or_insert(at);
            });
        }
    }

    pub(super) fn steps(&mut self, at: Mono, rank: Rank, done: &[StepDone], out: &mut Vec<Output>) {
        let Some(state) = self.ranks.get_mut(&rank) else { return };
        let Some(newest) = done.last() else { return };
        state.first.get_or_insert(done[0]);
        state.newest = Some(*newest);
        self.last_step = self.last_step.max(Some(newest.end));
        // The steps of one rank count for the job, the same rank for the whole attempt. Otherwise some would count
        // twice.
        if *self.lead.get_or_insert(rank) == rank {
            if matches!(self.ledger.state(), TimeCategory::Starting | TimeCategory::Initialising) {
                let began = if done[0].first { done[0].end } else { done[0].start };
                self.ledger.enter(began, TimeCategory::Training);
            }
            for step in done {
                self.ledger.step(step);
                if step.checkpoint_ns > 0 {
                    self.saving.saved(step.end);
                }
            }
        }
        self.announce_progress(at, out);
        let found = self.watch.steps(rank, done);
        self.report_found(found, out);
    }

    /// Records once per attempt that all ranks are stepping, and from then on their progress from time to time.
    pub(super) fn announce_progress(&mut self, at: Mono, out: &mut Vec<Output>) {
        if self.stepping && at.since(self.last_progress) < PROGRESS_EVERY {
            return;
        }
        let silent = |rank, state: &RankState| state.newest.is_none() && self.beating.contains(&rank);
        if self.asked.stepped.any(&self.ranks, silent) {
            return;
        }
        let beating = self.ranks.iter().filter(|(rank, _)| self.beating.contains(rank));
        let stepped: Option<Vec<(StepDone, StepDone)>> =
            beating.map(|(_, state)| Some((state.first?, state.newest?))).collect();
        let Some(stepped) = stepped.filter(|stepped| !stepped.is_empty()) else { return };
        let attempt = self.attempt;
        if !self.stepping {
            self.stepping = true;
            self.last_progress = at;
            self.saving.begin(at);
            // Pages are read less often than quick steps complete: use the first step, not the newest.
            let step = stepped.iter().map(|(first, _)| first.step).max().unwrap_or(0);
            let last = stepped.iter().map(|(first, _)| first.end).max().unwrap_or(at);
            self.longest_start = self.longest_start.max(Some(last.since(self.attempt_began)));
            let counted = stepped.iter().any(|(first, _)| first.counted);
            out.push(Output::Record(Body::Fact(Fact::RanksStepping { attempt, step, counted })));
            self.report_outcome(last, step, counted, out);
        } else {
            self.last_progress = at;
            let step = stepped.iter().map(|(_, newest)| newest.step).min().unwrap_or(0);
            let loss = stepped.iter().find_map(|(_, newest)| newest.loss);
            let saving = self.ledger.take_saved();
            out.push(Output::Record(Body::Fact(Fact::Progress { attempt, step, loss, saving })));
            let advised = advice::advice_for(&self.ledger.accounting(at), self.failures());
            out.extend(self.saving.advise(advised).map(|fact| Output::Record(Body::Fact(fact))));
        }
    }

    /// Records the outcome of the last restart, at the first step that all ranks completed after it.
    pub(super) fn report_outcome(&mut self, at: Mono, step: u64, counted: bool, out: &mut Vec<Output>) {
        let attempt = self.attempt;
        let Some(incident) = self.incidents.last_mut().filter(|incident| incident.first_step_at.is_none())
        else {
            return;
        };
        incident.first_step_at = Some(at);
        incident.first_step = Some(step);
        let reached_before = incident.reached_before.unwrap_or(0);
        let highest = self.ledger.highest_before();
        let took = at.since(incident.fault_at);
        if let Some(past) = self.past.last_mut() {
            past.back_after.get_or_insert(took);
        }
        out.push(Output::Record(Body::Outcome(Outcome {
            incident: incident.incident,
            attempt,
            step,
            reached_before,
            steps_lost: highest.map_or(0, |highest| (highest + 1).saturating_sub(step)),
            counted,
            to_ranks_started: incident.started_at.unwrap_or(at).since(incident.fault_at),
            to_ranks_connected: incident.connected_at.map(|connected| connected.since(incident.fault_at)),
            to_first_step: at.since(incident.fault_at),
        })));
    }
}

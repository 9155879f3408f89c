//! From the end of an attempt to what is done about it: the verdict, the proposal and the agent's word on it.

use std::collections::BTreeMap;

use crate::attribute::catalog::Catalog;
use crate::blame;
use crate::entry::{Body, ExitStatus, Fact};
use crate::id::{Incident, Rank};
use crate::judge::{RankEnd, hung, judge};
use crate::ledger::Spending;
use crate::policy::{self, Case, PastFailure};
use crate::testimony::Testimony;
use crate::time::Mono;
use crate::verdict::{Action, DecidedBy, Decision, Verdict};

use super::{IncidentTimes, Job, Order, Output, Phase, Ruling, StopWhy};

/// A failure that is judged and not decided on yet.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) verdict: Verdict,
    proposal: Decision,
    /// The verdict before anybody's words were heard, and how the ranks ended: for judging it anew.
    heard: Option<(Verdict, BTreeMap<Rank, RankEnd>)>,
}

impl Job {
    pub(super) fn attempt_ended(&mut self, at: Mono, out: &mut Vec<Output>) {
        let Phase::Stopping(why) = self.phase else { return };
        if let Some(exit) = self.stop_requested {
            return self.finish(at, exit, "asked to stop".to_owned(), out);
        }
        match why {
            StopWhy::Done | StopWhy::Requested => self.finish(at, 0, "all ranks are done".to_owned(), out),
            StopWhy::Fault => {
                let ends: BTreeMap<Rank, RankEnd> = self
                    .ranks
                    .iter()
                    .map(|(rank, state)| {
                        // A journal that is replayed has no steps, but tells where each rank ended.
                        let step = state.newest.map(|newest| newest.step).or(state.end.step);
                        (
                            *rank,
                            RankEnd { step, heartbeats: state.connected, ..state.end.clone() }
                                .with_last_words(),
                        )
                    })
                    .collect();
                if let Some((hang, found)) = self.hang.take() {
                    let verdict = hung(self.next_incident(), self.attempt, &hang, found);
                    self.ledger.enter(at, Spending::Deciding);
                    return self.propose(at, verdict, 1, out);
                }
                let mut verdict = judge(self.next_incident(), self.attempt, &ends, self.out_of_memory_kills);
                // The catalogue is compiled in and tested; without it the verdict says less, and nothing wrong.
                let first = verdict.clone();
                if let Ok(catalog) = Catalog::built_in() {
                    blame::complete(&mut verdict, catalog, &ends, &Testimony::default());
                }
                let exit = exit_of(&verdict, &ends);
                self.ledger.enter(at, Spending::Deciding);
                self.propose(at, verdict, exit, out);
                if let Some(pending) = &mut self.pending {
                    pending.heard = Some((first, ends));
                }
            }
        }
    }

    /// Records the verdict, makes the proposal and asks the agent for its word.
    pub(super) fn propose(&mut self, at: Mono, verdict: Verdict, exit: i32, out: &mut Vec<Output>) {
        let lived = verdict.fault_at.since(self.attempt_began);
        let case = Case { verdict: &verdict, past: &self.past, exit, lived, now: at };
        let (action, why) = policy::decide(self.budget, case);
        let proposal = Decision { incident: verdict.incident, action, why, by: DecidedBy::Launcher };
        out.push(Output::Record(Body::Verdict(verdict.clone())));
        out.push(Output::Order(Order::Consult {
            verdict: Box::new(verdict.clone()),
            proposal: proposal.clone(),
        }));
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
            reached_before: self.ledger.reached(),
            first_step: None,
        });
        self.phase = Phase::Judging { exit };
        self.pending = Some(Pending { verdict, proposal, heard: None });
    }

    /// Judges anew with what the host has to say. A verdict that changes is recorded again; it is what is decided on.
    pub(super) fn hear(
        &self,
        at: Mono,
        exit: i32,
        pending: &mut Pending,
        testimony: &Testimony,
        out: &mut Vec<Output>,
    ) {
        let (Some((first, ends)), Ok(catalog)) = (&pending.heard, Catalog::built_in()) else { return };
        let mut verdict = first.clone();
        blame::complete(&mut verdict, catalog, ends, testimony);
        if verdict == pending.verdict {
            return;
        }
        let lived = verdict.fault_at.since(self.attempt_began);
        let case = Case { verdict: &verdict, past: &self.past, exit, lived, now: at };
        (pending.proposal.action, pending.proposal.why) = policy::decide(self.budget, case);
        out.push(Output::Record(Body::Verdict(verdict.clone())));
        pending.verdict = verdict;
    }

    pub(super) fn ruling(&mut self, at: Mono, ruling: Option<Ruling>, out: &mut Vec<Output>) {
        let Phase::Judging { exit } = self.phase else { return };
        let fits = |ruling: &Ruling| {
            self.pending.as_ref().is_some_and(|pending| pending.verdict.incident == ruling.incident)
        };
        if ruling.as_ref().is_some_and(|ruling| !fits(ruling)) {
            return;
        }
        let Some(mut pending) = self.pending.take() else { return };
        if let Some(testimony) =
            ruling.as_ref().map(|ruling| &ruling.testimony).filter(|told| !told.is_empty())
        {
            let (incident, testimony) = (pending.verdict.incident, testimony.clone());
            self.hear(at, exit, &mut pending, &testimony, out);
            out.push(Output::Record(Body::Fact(Fact::HostTestified { incident, testimony })));
        }
        let Pending { verdict, proposal: mut decision, .. } = pending;
        if let Some(ruling) = ruling {
            decision.by = DecidedBy::Agent;
            if let Some((action, why)) = ruling.instead {
                decision.action = action;
                decision.why = why;
            }
        }
        out.push(Output::Record(Body::Decision(decision.clone())));
        self.with_incident(|incident| {
            incident.decided_at = Some(at);
            incident.decision = decision.why.clone();
        });
        match decision.action {
            Action::RestartInJob { .. } => {
                let lived = verdict.fault_at.since(self.attempt_began);
                self.past.push(PastFailure {
                    decided_at: at,
                    cause: verdict.cause,
                    step: verdict.step,
                    lived,
                });
                self.attempt = self.attempt.next();
                self.out_of_memory_kills = 0;
                self.phase = Phase::Starting;
                self.ledger.enter(at, Spending::Starting);
                out.push(Output::Order(Order::StartRanks(self.attempt)));
            }
            Action::Stop { exit: wanted } => {
                let exit = if wanted == 0 { exit.max(1) } else { wanted };
                self.finish(at, exit, format!("{}; {}", verdict.headline, decision.why), out);
            }
        }
    }

    pub(super) fn next_incident(&self) -> Incident {
        Incident(self.incidents.len() as u64 + 1)
    }
}

/// The status with which the launcher exits after this failure: the culprit's own, a signal as 128 + its number.
/// A rank that raised may have been stopped before it could exit; Python would have exited with 1.
fn exit_of(verdict: &Verdict, ends: &BTreeMap<Rank, RankEnd>) -> i32 {
    let end = verdict.culprit.and_then(|rank| ends.get(&rank));
    match end {
        Some(RankEnd { note: Some(_), .. }) | None => 1,
        Some(end) => end.exit.map_or(1, |(status, _)| match status {
            ExitStatus::Code(0) => 1,
            status => status.as_shell_code(),
        }),
    }
}

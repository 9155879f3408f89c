//! Restarts that people order: no failures, judged by nobody and charged to no budget. But nothing starts on a host that is
//! not ready, whoever wants it.

use crate::base::id::{Attempt, Incident};
use crate::base::time::{Mono, Span};
use crate::model::entry::{Body, Fact};
use crate::model::observation::{Observation, Weight};
use crate::model::verdict::{Action, Cause, DecidedBy, Decision, Doubts, FaultDomain, Verdict};
use crate::progress::goodput::TimeCategory;
use crate::recovery::policy::{Choice, Host, Rung, hindrance};

use super::asking::ask_again_after;
use super::{Job, Order, Output, Phase, Ruling, StopWhy};

/// The component of what people order, as the journal has it.
pub const ORDERS: &str = "job.orders";
/// The event of an order to restart all ranks. That it is in the journal is what has it done, also in a replay.
pub const RESTART_ORDERED: &str = "restart_ordered";
/// The event of an order to use a rank's GPU no more; its value `rank` says whose. All ranks are started anew for it.
pub const RANK_EXCLUDED: &str = "rank_excluded";
/// The event by which it is told for what an ordered restart waits.
pub const RESTART_WAITS: &str = "restart_waits";

/// A restart that is ordered, whose ranks are gone.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Ordered {
    /// When the host was first found not to be ready.
    since: Option<Mono>,
    /// For what it is waited, as it was told.
    waits: Option<String>,
    /// When it is to be asked again; none while an answer is awaited.
    look_at: Option<Mono>,
}

impl Job {
    /// All ranks are to be started anew, if they run and nothing else is under way.
    pub(super) fn restart_ordered(&mut self, at: Mono, out: &mut Vec<Output>) {
        if self.phase == Phase::Running && self.hang.is_none() {
            self.ledger.enter(at, TimeCategory::Stopping);
            self.stop(StopWhy::Ordered, out);
        }
    }

    /// The ranks are gone: is the host ready for the next ones?
    pub(super) fn ask_for_the_ordered(&mut self, at: Mono, ordered: Ordered, out: &mut Vec<Output>) {
        self.ledger.enter(at, TimeCategory::Deciding);
        let verdict = no_rank_failed(self.attempt, at);
        self.phase = Phase::Ordered(Ordered { look_at: None, ..ordered });
        out.push(Output::Order(Order::Consult(Box::new(verdict))));
    }

    /// What the host has to say of an ordered restart.
    pub(super) fn rule_on_the_ordered(
        &mut self,
        at: Mono,
        mut ordered: Ordered,
        ruling: Option<Ruling>,
        out: &mut Vec<Output>,
    ) {
        if ruling.as_ref().is_some_and(|ruling| ruling.incident != Incident::ORDERED) {
            return;
        }
        let by = if ruling.is_some() { DecidedBy::Agent } else { DecidedBy::Launcher };
        let mut host_evidence = ruling.map(|ruling| ruling.host_evidence).unwrap_or_default();
        host_evidence.held.extend(self.held.iter().cloned());
        let host = Host {
            sick: &host_evidence.sick,
            held: &host_evidence.held,
            waited: ordered.since.map_or(Span::default(), |since| at.since(since)),
            last_step: self.last_step,
        };
        let next = self.attempt.next();
        match hindrance(&self.settings, host, 0, next) {
            Some(Choice { action: Action::Wait, why, .. }) => {
                let waited = at.since(*ordered.since.get_or_insert(at));
                if ordered.waits.as_ref() != Some(&why) {
                    out.push(Output::Record(Body::Fact(waits(&why))));
                    ordered.waits = Some(why);
                }
                let look_at = at.after(ask_again_after(waited));
                self.phase = Phase::Ordered(Ordered { look_at: Some(look_at), ..ordered });
                out.push(Output::Order(Order::LookAgain { at: look_at }));
            }
            Some(Choice { action, after, why }) if action.exit().is_some() => {
                let reason = format!("a restart was ordered; {why}");
                let incident = Incident::ORDERED;
                out.push(Output::Record(Body::Decision(Decision { incident, action, after, why, by })));
                self.finish_without(at, action.exit().unwrap_or_default(), reason, out);
            }
            other => {
                self.rung = other.and_then(|choice| choice.action.rung()).unwrap_or(Rung::All);
                self.restart(at, out);
            }
        }
    }

    /// The time has come to ask for the host again.
    pub(super) fn look_again_for_the_ordered(&mut self, at: Mono, ordered: Ordered, out: &mut Vec<Output>) {
        match ordered.look_at {
            Some(look_at) if at < look_at => out.push(Output::Order(Order::LookAgain { at: look_at })),
            Some(_) => self.ask_for_the_ordered(at, ordered, out),
            None => {}
        }
    }
}

/// What the agent is asked about: the host is the same, whoever wants the restart.
fn no_rank_failed(attempt: Attempt, at: Mono) -> Verdict {
    Verdict {
        incident: Incident::ORDERED,
        attempt,
        headline: "somebody ordered a restart".to_owned(),
        cause: Cause::ExitCode { code: 0 },
        domain: FaultDomain::Unknown,
        class: None,
        deterministic: false,
        doubts: Doubts::default(),
        confidence: 0.0,
        culprit_confidence: None,
        cannot_run: false,
        culprit: None,
        victims: Vec::new(),
        step: None,
        data: None,
        heartbeats: false,
        fault_at: at,
        detected_at: at,
        evidence: Vec::new(),
    }
}

fn waits(why: &str) -> Fact {
    Fact::Observed(Observation {
        component: ORDERS.to_owned(),
        event: RESTART_WAITS.to_owned(),
        weight: Weight::Warning,
        detail: format!("the ordered restart waits: {why}"),
        ..Observation::default()
    })
}

//! Restarts that people order. They are not failures: they have no verdict and use no budget. But nothing starts on a
//! host that is not ready, even on order.

use crate::policy::{Choice, Host, Rung, hindrance};
use mainstay_model::entry::{Body, Fact};
use mainstay_model::id::{Attempt, Incident};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Action, Cause, DecidedBy, Decision, Doubts, FaultDomain, Verdict};
use mainstay_progress::goodput::TimeCategory;

use super::deciding::ask_again_after;
use super::{AgentEvidence, Command, Job, Output, Phase, StopWhy};

/// The component of orders in the journal.
pub const ORDERS: &str = "job.orders";
/// The event of an order to restart all ranks. Its entry in the journal triggers the restart, also in a replay.
pub const RESTART_ORDERED: &str = "restart_ordered";
/// The event of an order to stop using a rank's GPU; its value `rank` names the rank. All ranks are restarted for it.
pub const RANK_EXCLUDED: &str = "rank_excluded";
/// The event of an order to save and end; its value `exit` is the exit status of the job whose ranks do so.
pub const SAVE_ORDERED: &str = "save_ordered";
/// The event that records the reason why an ordered restart waits.
pub const RESTART_WAITS: &str = "restart_waits";

/// An ordered restart whose ranks have ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Ordered {
    /// When the host was first found not to be ready.
    since: Option<Mono>,
    /// The reason for the wait, as recorded.
    waits: Option<String>,
    /// When to ask again. `None` while an answer is awaited.
    wake_at: Option<Mono>,
}

impl Job {
    /// Restarts all ranks, if they run and nothing else is in progress.
    pub(super) fn restart_ordered(&mut self, at: Mono, out: &mut Vec<Output>) {
        if self.phase == Phase::Running && self.hang.is_none() {
            self.ledger.enter(at, TimeCategory::Stopping);
            self.stop(StopWhy::Ordered, out);
        }
    }

    /// Asks the ranks to save and end, once in each attempt: a scheduler signals each host. Nothing stops ranks that
    /// do not end.
    pub(super) fn save_ordered(&mut self, exit: i32, out: &mut Vec<Output>) {
        let is_asked = self.save_ordered.is_some_and(|(_, attempt)| attempt == self.attempt);
        if self.phase == Phase::Running && !is_asked {
            let exit = self.save_ordered.map_or(exit, |(first, _)| first);
            self.save_ordered = Some((exit, self.attempt));
            out.push(Output::Command(Command::ask_to_save(self.attempt)));
        }
    }

    /// The ranks have ended. Asks whether the host is ready for the next ones.
    pub(super) fn ask_for_the_ordered(&mut self, at: Mono, ordered: Ordered, out: &mut Vec<Output>) {
        self.ledger.enter(at, TimeCategory::Deciding);
        let verdict = no_rank_failed(self.attempt, at);
        self.phase = Phase::Ordered(Ordered { wake_at: None, ..ordered });
        out.push(Output::Command(Command::Consult(Box::new(verdict))));
    }

    /// Handles the agent's answer for an ordered restart.
    pub(super) fn rule_on_the_ordered(
        &mut self,
        at: Mono,
        mut ordered: Ordered,
        ruling: Option<AgentEvidence>,
        out: &mut Vec<Output>,
    ) {
        if ruling.as_ref().is_some_and(|ruling| ruling.incident != Incident::ORDERED) {
            return;
        }
        let agent_evidence = ruling.is_some();
        let mut host_evidence = ruling.map(|ruling| ruling.host_evidence).unwrap_or_default();
        host_evidence.held.extend(self.held.iter().cloned());
        let host = Host {
            unhealthy: &host_evidence.unhealthy,
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
                let wake_at = at.after(ask_again_after(waited));
                self.phase = Phase::Ordered(Ordered { wake_at: Some(wake_at), ..ordered });
                out.push(Output::Command(Command::Wake { at: wake_at }));
            }
            Some(Choice { action, after, rule, why }) if action.exit().is_some() => {
                let reason = format!("a restart was ordered; {why}");
                let incident = Incident::ORDERED;
                let by = DecidedBy::Launcher;
                out.push(Output::Record(Body::Decision(Decision {
                    incident,
                    action,
                    after,
                    rule,
                    why,
                    by,
                    agent_evidence,
                })));
                self.finish_without(at, action.exit().unwrap_or_default(), reason, out);
            }
            other => {
                self.rung = other.and_then(|choice| choice.action.rung()).unwrap_or(Rung::All);
                self.restart(at, out);
            }
        }
    }

    /// It is time to ask for the host again.
    pub(super) fn wake_for_the_ordered(&mut self, at: Mono, ordered: Ordered, out: &mut Vec<Output>) {
        match ordered.wake_at {
            Some(wake_at) if at < wake_at => out.push(Output::Command(Command::Wake { at: wake_at })),
            Some(_) => self.ask_for_the_ordered(at, ordered, out),
            None => {}
        }
    }
}

/// The verdict passed to the agent: the host is the same, regardless of who orders the restart.
fn no_rank_failed(attempt: Attempt, at: Mono) -> Verdict {
    Verdict {
        incident: Incident::ORDERED,
        attempt,
        headline: "a user ordered a restart".to_owned(),
        cause: Cause::ExitCode { code: 0 },
        domain: FaultDomain::Unknown,
        class: None,
        deterministic: false,
        doubts: Doubts::default(),
        confidence: 0.0,
        culprit_confidence: None,
        cannot_run: false,
        culprit: None,
        host: None,
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

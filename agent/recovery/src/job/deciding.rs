//! From the end of an attempt to the action: the verdict, the agent's evidence, the decision.

use std::collections::BTreeMap;

use crate::policy::{
    Advice, Case, Choice, Host, JobState, PastFailure, PolicyAnswer, PolicyProblem, Rung, decide_with,
    question,
};
use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::diagnose::{self, FailedAttempt};
use mainstay_diagnosis::root_rank::{RankEnd, hung, judge};
use mainstay_diagnosis::unrunnable;
use mainstay_model::entry::{Body, ExitStatus, Fact};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Incident, Rank};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Action, DecidedBy, Decision, Verdict};
use mainstay_progress::goodput::TimeCategory;

use super::late::Decided;
use super::{AgentEvidence, Command, IncidentTimes, Job, Ordered, Output, Phase, StopWhy};

/// A host that is not ready is asked again after a quarter of the time waited so far, within these limits.
const MIN_ASK_INTERVAL: Span = Span::millis(20);
const MAX_ASK_INTERVAL: Span = Span::seconds(2);

/// The time until a host that has been waited for this long is asked again. A GPU's memory is usually free within a
/// second, and a long wait needs few queries.
pub(super) fn ask_again_after(waited: Span) -> Span {
    Span((waited.0 / 4).clamp(MIN_ASK_INTERVAL.0, MAX_ASK_INTERVAL.0))
}

/// What to do once the ranks that waited in their processes have ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Afterwards {
    Decide { exit: i32 },
    Finish { exit: i32, reason: String },
}

/// A failure with a verdict and without a decision.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) verdict: Verdict,
    /// When the host was first found not to be ready.
    waits_since: Option<Mono>,
    /// The verdict without host evidence, and how the attempt failed: the input for a new judgement.
    pub(super) received: Option<(Verdict, FailedAttempt)>,
    /// The last evidence of the host.
    pub(super) host_evidence: HostEvidence,
    /// The reason for the wait, as recorded.
    waits: Option<String>,
    /// When to ask again. `None` while an answer is awaited.
    wake_at: Option<Mono>,
    /// The last problem of the user's own policy. A policy that failed is not asked again about the same failure.
    problem: Option<PolicyProblem>,
    /// The evidence with which the user's own policy was asked, until it answers.
    asked: Option<Evidence>,
}

/// The evidence for a decision.
#[derive(Clone, Debug)]
struct Evidence {
    by_agent: bool,
    host: HostEvidence,
}

impl Pending {
    fn consult(&self) -> Output {
        Output::Command(Command::Consult(Box::new(self.verdict.clone())))
    }
}

impl Job {
    pub(super) fn attempt_ended(&mut self, at: Mono, waiting: Vec<Rank>, out: &mut Vec<Output>) {
        let Phase::Stopping(why) = self.phase else { return };
        let keeps = matches!(why, StopWhy::Fault | StopWhy::Dismissed);
        self.waiting = if keeps { waiting } else { Vec::new() };
        if let Some(exit) = self.stop_requested {
            return self.finish_without(at, exit, "asked to stop".to_owned(), out);
        }
        match why {
            StopWhy::Dismissed => match self.afterwards.take() {
                Some(Afterwards::Finish { exit, reason }) => self.finish(at, exit, reason, out),
                Some(Afterwards::Decide { exit }) => {
                    self.phase = Phase::Judging { exit };
                    out.extend(self.pending.as_ref().map(Pending::consult));
                }
                None => {}
            },
            StopWhy::Ordered => self.ask_for_the_ordered(at, Ordered::default(), out),
            StopWhy::Done | StopWhy::Requested => match self.save_ordered {
                Some((exit, _)) => {
                    self.finish(at, exit, "asked to save: all ranks have ended".to_owned(), out)
                }
                None => self.finish(at, 0, "all ranks are done".to_owned(), out),
            },
            StopWhy::Fault => {
                let ends: BTreeMap<Rank, RankEnd> = self
                    .ranks
                    .iter()
                    .map(|(rank, state)| {
                        // A replayed journal has no steps, but records where each rank ended.
                        let step = state.newest.map(|newest| newest.step).or(state.end.step);
                        (
                            *rank,
                            RankEnd { step, heartbeats: state.connected, ..state.end.clone() }
                                .with_last_words(),
                        )
                    })
                    .collect();
                let without_words = self
                    .hang
                    .take()
                    .map(|(mut hang, found)| {
                        // Evidence may have changed the culprits.
                        hang.hosts = self.hosts_of(&hang.culprits);
                        hung(self.next_incident(), self.attempt, &hang, found)
                    })
                    .or_else(|| self.overdue.take().map(|restart| self.took_too_long(at, restart)));
                if let Some(mut verdict) = without_words {
                    self.locate(&mut verdict);
                    self.ledger.enter(at, TimeCategory::Deciding);
                    return self.propose(at, verdict, 1, out);
                }
                let out_of_memory_kills = self.out_of_memory_kills;
                let mut verdict = judge(self.next_incident(), self.attempt, &ends, out_of_memory_kills);
                self.locate(&mut verdict);
                // The catalog is compiled in and tested. Without it the verdict has fewer details, but is not wrong.
                let first = verdict.clone();
                let lived = verdict.fault_at.since(self.attempt_began);
                let exhausted = self.exhausted.clone();
                let failed = FailedAttempt { ends, lived, out_of_memory_kills, exhausted };
                if let Ok(catalog) = Catalog::shared() {
                    let seen_before = self.seen_before(&verdict);
                    let reported = HostEvidence { seen_before, ..HostEvidence::default() };
                    diagnose::complete(&mut verdict, &catalog, &failed, &reported);
                }
                unrunnable::complete(&mut verdict, &failed.ends);
                let exit = exit_of(&verdict, &failed.ends);
                self.ledger.enter(at, TimeCategory::Deciding);
                self.propose(at, verdict, exit, out);
                if let Some(pending) = &mut self.pending {
                    pending.received = Some((first, failed));
                }
            }
        }
    }

    /// Records the verdict and asks the agent for its evidence. The policy decides once that has arrived.
    pub(super) fn propose(&mut self, at: Mono, verdict: Verdict, exit: i32, out: &mut Vec<Output>) {
        out.push(Output::Record(Body::Verdict(verdict.clone())));
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
        let pending = Pending {
            verdict,
            waits_since: None,
            received: None,
            host_evidence: HostEvidence::default(),
            waits: None,
            wake_at: None,
            problem: None,
            asked: None,
        };
        out.push(pending.consult());
        self.pending = Some(pending);
    }

    /// The case for the policy.
    fn case<'a>(&'a self, at: Mono, exit: i32, pending: &'a Pending, host: &'a HostEvidence) -> Case<'a> {
        let count = |ranks: usize| u32::try_from(ranks).unwrap_or(u32::MAX);
        let verdict = &pending.verdict;
        Case {
            verdict,
            past: &self.past,
            earlier: &self.earlier,
            job: JobState {
                exit,
                lived: verdict.fault_at.since(self.attempt_began),
                reached: self.ledger.reached(),
                committed: self.committed(),
                ranks: count(self.ranks.len()),
                waiting: count(self.waiting.len()),
            },
            host: Host {
                unhealthy: &host.unhealthy,
                held: &host.held,
                waited: pending.waits_since.map_or(Span::default(), |since| at.since(since)),
                last_step: self.last_step,
            },
            seen: host.seen_before.as_ref(),
            spares: 0,
            now: at,
        }
    }

    /// The policy's decision.
    fn decide(
        &self,
        at: Mono,
        exit: i32,
        pending: &mut Pending,
        evidence: &Evidence,
        answer: Option<PolicyAnswer<'_>>,
        out: &mut Vec<Output>,
    ) -> Decision {
        let incident = pending.verdict.incident;
        let case = self.case(at, exit, pending, &evidence.host);
        let (Choice { action, after, rule, why }, problem) = decide_with(answer, &self.settings, case);
        if let Some(problem) = problem.filter(|problem| pending.problem.as_ref() != Some(problem)) {
            out.push(Output::Record(Body::Fact(policy_problem_fact(&problem))));
            pending.problem = Some(problem);
        }
        let agent_evidence = evidence.by_agent;
        Decision { incident, action, after, rule, why, by: DecidedBy::Launcher, agent_evidence }
    }

    pub(super) fn ruling(&mut self, at: Mono, ruling: Option<AgentEvidence>, out: &mut Vec<Output>) {
        if let Phase::Ordered(ordered) = &self.phase {
            let ordered = ordered.clone();
            return self.rule_on_the_ordered(at, ordered, ruling, out);
        }
        let Phase::Judging { exit } = self.phase else { return };
        let fits = |ruling: &AgentEvidence| {
            self.pending.as_ref().is_some_and(|pending| pending.verdict.incident == ruling.incident)
        };
        if ruling.as_ref().is_some_and(|ruling| !fits(ruling)) {
            return;
        }
        let Some(mut pending) = self.pending.take() else { return };
        let agent_evidence = ruling.is_some();
        let (instead, mut host_evidence) =
            ruling.map_or_else(Default::default, |ruling| (ruling.instead, ruling.host_evidence));
        host_evidence.held.extend(self.held.iter().cloned());
        // A replay takes them from the journal.
        if host_evidence.findings.is_empty() {
            host_evidence.findings = self.standing_at(&pending.verdict);
        }
        if agent_evidence {
            // An agent that started late does not know the history of this job.
            host_evidence.seen_before =
                host_evidence.seen_before.or_else(|| self.seen_before(&pending.verdict));
        }
        Self::receive(&mut pending, &host_evidence, out);
        let evidence = Evidence { by_agent: agent_evidence, host: host_evidence };
        let failed = matches!(pending.problem, Some(PolicyProblem::Failed(_)));
        if self.user_policy.is_some() && !failed && instead.is_none() {
            return self.ask_policy(at, exit, pending, evidence, out);
        }
        let mut decision = self.decide(at, exit, &mut pending, &evidence, None, out);
        if let Some((action, why)) = instead {
            decision = Decision { action, why, after: Span::default(), ..decision };
        }
        self.act_on(at, exit, pending, decision, out);
    }

    fn ask_policy(
        &mut self,
        at: Mono,
        exit: i32,
        mut pending: Pending,
        evidence: Evidence,
        out: &mut Vec<Output>,
    ) {
        // If it was asked already, its answer is bounded by the newer evidence.
        if pending.asked.is_none() {
            let case = question(&self.settings, self.case(at, exit, &pending, &evidence.host));
            out.push(Output::Command(Command::AskPolicy { incident: pending.verdict.incident, case }));
        }
        pending.asked = Some(evidence);
        self.pending = Some(pending);
    }

    pub(super) fn policy_answered(
        &mut self,
        at: Mono,
        incident: Incident,
        advice: Result<Option<Advice>, String>,
        out: &mut Vec<Output>,
    ) {
        let (Phase::Judging { exit }, Some(policy)) = (self.phase.clone(), self.user_policy.clone()) else {
            return;
        };
        let Some(mut pending) = self.pending.take_if(|pending| pending.verdict.incident == incident) else {
            return;
        };
        let Some(evidence) = pending.asked.take() else {
            self.pending = Some(pending);
            return;
        };
        let answer = Some(PolicyAnswer { policy: &policy, advice });
        let decision = self.decide(at, exit, &mut pending, &evidence, answer, out);
        self.act_on(at, exit, pending, decision, out);
    }

    fn act_on(&mut self, at: Mono, exit: i32, pending: Pending, decision: Decision, out: &mut Vec<Output>) {
        match decision.action {
            Action::Wait => self.wait_for_the_host(at, pending, decision, out),
            action if self.needs_new_processes(action) => {
                // What they hold must be free as well. The decision follows when they have ended.
                self.pending = Some(pending);
                self.dismiss(Afterwards::Decide { exit }, out);
            }
            action if let Some(rank) = self.is_to_be_replaced(action, &pending.verdict) => {
                // The same for the GPU of a single rank.
                self.pending = Some(pending);
                self.afterwards = Some(Afterwards::Decide { exit });
                self.phase = Phase::Stopping(StopWhy::Dismissed);
                out.push(Output::Command(Command::EndRank { attempt: self.attempt, rank }));
            }
            _ => {
                let Pending { verdict, received, host_evidence, .. } = pending;
                let decided = |received| Decided { verdict: verdict.clone(), received, host_evidence };
                self.decided = received.map(decided);
                self.carry_out(at, exit, verdict, decision, out);
            }
        }
    }

    /// Asks again after a while. Records the reason for the wait once, and again if it changes.
    fn wait_for_the_host(
        &mut self,
        at: Mono,
        mut pending: Pending,
        decision: Decision,
        out: &mut Vec<Output>,
    ) {
        if pending.waits.as_ref() != Some(&decision.why) {
            pending.waits = Some(decision.why.clone());
            out.push(Output::Record(Body::Decision(decision)));
        }
        let waited = at.since(*pending.waits_since.get_or_insert(at));
        let wake_at = at.after(ask_again_after(waited));
        pending.wake_at = Some(wake_at);
        out.push(Output::Command(Command::Wake { at: wake_at }));
        self.pending = Some(pending);
    }

    fn carry_out(
        &mut self,
        at: Mono,
        exit: i32,
        verdict: Verdict,
        decision: Decision,
        out: &mut Vec<Output>,
    ) {
        out.push(Output::Record(Body::Decision(decision.clone())));
        self.with_incident(|incident| {
            incident.decided_at = Some(at);
            incident.decision = decision.why.clone();
        });
        if let Some(wanted) = decision.action.exit() {
            let exit = if wanted == 0 { exit.max(1) } else { wanted };
            return self.finish_without(at, exit, format!("{}; {}", verdict.headline, decision.why), out);
        }
        self.rung = decision.action.rung().unwrap_or(Rung::All);
        self.past.push(PastFailure {
            decided_at: at,
            lived: verdict.fault_at.since(self.attempt_began),
            cause: verdict.cause,
            step: verdict.step,
            data: verdict.data,
            rung: self.rung,
            reached: self.ledger.reached(),
            committed: self.committed(),
            heartbeats: verdict.heartbeats,
            back_after: None,
        });
        if decision.after == Span::default() {
            return self.restart(at, out);
        }
        let until = at.after(decision.after);
        self.phase = Phase::HeldBack { until };
        out.push(Output::Command(Command::Wake { at: until }));
    }

    /// It is time to ask for the host again, or for a delayed restart.
    pub(super) fn wake(&mut self, at: Mono, out: &mut Vec<Output>) {
        match self.phase {
            Phase::Ordered(ref ordered) => {
                let ordered = ordered.clone();
                self.wake_for_the_ordered(at, ordered, out);
            }
            Phase::HeldBack { until } if at >= until => self.restart(at, out),
            Phase::HeldBack { until } => out.push(Output::Command(Command::Wake { at: until })),
            Phase::Judging { .. } => {
                if let Some(pending) = &mut self.pending
                    && pending.wake_at.take().is_some()
                {
                    out.push(pending.consult());
                }
            }
            Phase::Running => {
                if !self.waits_for_lost_peer(at, out) {
                    self.look_after_restart(at, out);
                }
            }
            Phase::Starting | Phase::Stopping(_) | Phase::Ended => {}
        }
    }

    /// Whether the job continues, and not in the processes of the waiting ranks.
    fn needs_new_processes(&self, action: Action) -> bool {
        let goes_on = action.rung().is_some_and(Rung::goes_on);
        goes_on && !self.waiting.is_empty() && !keeps_processes(action.rung())
    }

    /// If no rank is lost, the rank that failed must not continue in its process.
    fn is_to_be_replaced(&self, action: Action, verdict: &Verdict) -> Option<Rank> {
        let all_wait = self.waiting.len() == self.ranks.len();
        verdict.culprit.filter(|_| all_wait && action.rung() == Some(Rung::Ranks))
    }

    pub(super) fn restart(&mut self, at: Mono, out: &mut Vec<Output>) {
        let keeps = keeps_processes(Some(self.rung)) && !self.waiting.is_empty();
        self.next_attempt(at);
        let attempt = self.attempt;
        out.push(Output::Command(if keeps {
            Command::start_round(attempt)
        } else {
            Command::start(attempt)
        }));
    }

    fn next_attempt(&mut self, at: Mono) {
        self.attempt = self.attempt.next();
        self.out_of_memory_kills = 0;
        self.phase = Phase::Starting;
        self.ledger.enter(at, TimeCategory::Starting);
    }

    /// Ends the processes of waiting ranks, and continues with `afterwards` when they have ended.
    fn dismiss(&mut self, afterwards: Afterwards, out: &mut Vec<Output>) {
        self.afterwards = Some(afterwards);
        self.waiting.clear();
        self.stop(StopWhy::Dismissed, out);
    }

    /// Ends the job once no rank waits in its process any more.
    pub(super) fn finish_without(&mut self, at: Mono, exit: i32, reason: String, out: &mut Vec<Output>) {
        self.pending = None;
        if self.waiting.is_empty() {
            self.finish(at, exit, reason, out);
        } else {
            self.dismiss(Afterwards::Finish { exit, reason }, out);
        }
    }

    pub(super) fn next_incident(&self) -> Incident {
        Incident(self.incidents.len() as u64 + 1)
    }
}

fn keeps_processes(rung: Option<Rung>) -> bool {
    matches!(rung, Some(Rung::InProcess | Rung::Ranks))
}

/// The component of a job's own policy file in the journal.
pub const POLICY: &str = "policy";

/// A problem of the user's own policy as a fact for the journal.
pub fn policy_problem_fact(problem: &PolicyProblem) -> Fact {
    let (event, weight, detail) = match problem {
        PolicyProblem::Failed(words) => {
            ("policy_failed", Weight::Error, format!("{words}; the built-in policy decides"))
        }
        PolicyProblem::Overruled(words) => {
            ("policy_overruled", Weight::Warning, format!("{words}; the built-in policy decides"))
        }
    };
    Fact::Observed(Observation {
        component: POLICY.to_owned(),
        event: event.to_owned(),
        weight,
        detail,
        ..Observation::default()
    })
}

/// The launcher's exit status after this failure: the culprit's own, or 128 + its number for a signal. A rank that
/// raised may have been stopped before it could exit; Python would have exited with 1.
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

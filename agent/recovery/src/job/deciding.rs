//! From the end of an attempt to the action: the verdict, the agent's evidence, the decision.

use std::collections::BTreeMap;

use crate::policy::{
    Advice, Case, Choice, Host, JobState, PastFailure, PolicyAnswer, PolicyProblem, Rung, decide_with,
    hindrance, question,
};
use mainstay_diagnosis::diagnose::FailedAttempt;
use mainstay_diagnosis::root_rank::{RankEnd, hung, judge};
use mainstay_model::entry::{Body, ExitStatus, Fact};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Incident, Rank};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Action, DecidedBy, Decision, Verdict};
use mainstay_progress::goodput::TimeCategory;

use super::evidence::{Decided, Evidence, Failure, Pending};
use super::host_wait::HostWait;
use super::ordered::{no_rank_failed, waits};
use super::{AgentEvidence, Command, Job, Output, Phase, StopWhy};

/// Ranks that have left the last attempt and wait in their processes.
#[derive(Clone, Debug, Default)]
pub(super) struct Waiting {
    pub(super) ranks: Vec<Rank>,
    afterwards: Option<Afterwards>,
}

/// What to do once the ranks that waited in their processes have ended.
#[derive(Clone, Debug, PartialEq)]
enum Afterwards {
    Decide { exit: i32 },
    Finish { exit: i32, reason: String },
}

impl Job {
    pub(super) fn attempt_ended(&mut self, at: Mono, waiting: Vec<Rank>, out: &mut Vec<Output>) {
        let Phase::Stopping(why) = self.phase else { return };
        let keeps = matches!(why, StopWhy::Fault | StopWhy::Dismissed);
        self.waiting.ranks = if keeps { waiting } else { Vec::new() };
        if let Some(exit) = self.stop_requested {
            return self.finish_without(at, exit, "asked to stop".to_owned(), out);
        }
        match why {
            StopWhy::Dismissed => match self.waiting.afterwards.take() {
                Some(Afterwards::Finish { exit, reason }) => self.finish(at, exit, reason, out),
                Some(Afterwards::Decide { exit }) => {
                    self.phase = Phase::Judging { exit };
                    out.extend(self.pending.as_ref().map(Pending::consult));
                }
                None => {}
            },
            StopWhy::Ordered => self.ask_for_the_ordered(at, HostWait::default(), out),
            StopWhy::Done | StopWhy::Requested => match self.save_ordered {
                Some((exit, _)) => {
                    self.finish(at, exit, "asked to save: all ranks have ended".to_owned(), out)
                }
                None => self.finish(at, 0, "all ranks are done".to_owned(), out),
            },
            StopWhy::Fault => self.judge(at, out),
        }
    }

    /// Judges why the attempt failed.
    fn judge(&mut self, at: Mono, out: &mut Vec<Output>) {
        let (incident, attempt) = (self.history.next(), self.attempt);
        self.ledger.enter(at, TimeCategory::Deciding);
        let without_words = self
            .course
            .hang
            .take()
            .map(|(mut hang, found)| {
                // Evidence may have changed the culprits.
                hang.hosts = self.ranks.hosts_of(&hang.culprits);
                hung(incident, attempt, &hang, found)
            })
            .or_else(|| {
                let overdue = self.restart.overdue.take()?;
                Some(overdue.verdict(incident, attempt, self.course.began, at))
            });
        if let Some(mut verdict) = without_words {
            self.ranks.locate(&mut verdict);
            return self.propose(at, verdict, None, 1, out);
        }
        let out_of_memory_kills = self.course.out_of_memory_kills;
        let ends = self.ranks.ends();
        let mut first = judge(incident, attempt, &ends, out_of_memory_kills);
        self.ranks.locate(&mut first);
        let lived = first.fault_at.since(self.course.began);
        let exhausted = self.course.exhausted.clone();
        let seen_before = self.history.seen_before(&first);
        let failed = FailedAttempt { ends, lived, out_of_memory_kills, exhausted };
        let failure = Failure { first, failed };
        let verdict = failure.judge(&HostEvidence { seen_before, ..HostEvidence::default() });
        let exit = exit_of(&verdict, &failure.failed.ends);
        self.propose(at, verdict, Some(failure), exit, out);
    }

    /// Records the verdict and asks the agent for its evidence. The policy decides once that has arrived.
    pub(super) fn propose(
        &mut self,
        at: Mono,
        verdict: Verdict,
        failure: Option<Failure>,
        exit: i32,
        out: &mut Vec<Output>,
    ) {
        out.push(Output::Record(Body::Verdict(verdict.clone())));
        self.history.add(at, &verdict, self.ledger.reached());
        self.phase = Phase::Judging { exit };
        let pending = Pending::new(verdict, failure);
        out.push(pending.consult());
        self.pending = Some(pending);
    }

    /// The case for the policy.
    fn case<'a>(&'a self, at: Mono, exit: i32, pending: &'a Pending, host: &'a HostEvidence) -> Case<'a> {
        let count = |ranks: usize| u32::try_from(ranks).unwrap_or(u32::MAX);
        let verdict = &pending.verdict;
        Case {
            verdict,
            past: &self.history.past,
            earlier: &self.history.earlier,
            job: JobState {
                exit,
                lived: verdict.fault_at.since(self.course.began),
                reached: self.ledger.reached(),
                committed: self.saving.committed(self.ranks.first_steps()),
                ranks: count(self.ranks.len()),
                waiting: count(self.waiting.ranks.len()),
            },
            host: Host {
                unhealthy: &host.unhealthy,
                held: &host.held,
                waited: pending.wait.waited(at),
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
        if let Phase::Ordered(wait) = &self.phase {
            let wait = wait.clone();
            return self.rule_on_the_ordered(at, wait, ruling, out);
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
            host_evidence.findings = self.findings.related_to(&pending.verdict);
        }
        if agent_evidence {
            // An agent that started late does not know the history of this job.
            host_evidence.seen_before =
                host_evidence.seen_before.or_else(|| self.history.seen_before(&pending.verdict));
        }
        pending.receive(&host_evidence, out);
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
            Action::Wait => {
                let mut pending = pending;
                let why = decision.why.clone();
                pending.wait.go_on(at, &why, || Body::Decision(decision), out);
                self.pending = Some(pending);
            }
            action if self.needs_new_processes(action) => {
                // What they hold must be free as well. The decision follows when they have ended.
                self.pending = Some(pending);
                self.dismiss(Afterwards::Decide { exit }, out);
            }
            action if let Some(rank) = self.is_to_be_replaced(action, &pending.verdict) => {
                // The same for the GPU of a single rank.
                self.pending = Some(pending);
                self.waiting.afterwards = Some(Afterwards::Decide { exit });
                self.phase = Phase::Stopping(StopWhy::Dismissed);
                out.push(Output::Command(Command::EndRank { attempt: self.attempt, rank }));
            }
            _ => {
                let Pending { verdict, failure, host_evidence, .. } = pending;
                let decided = |failure| Decided { verdict: verdict.clone(), failure, host_evidence };
                self.decided = failure.map(decided);
                self.carry_out(at, exit, verdict, decision, out);
            }
        }
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
        if let Some(incident) = self.history.open() {
            incident.decided_at = Some(at);
            incident.decision.clone_from(&decision.why);
            incident.exclude = verdict.host_to_exclude(decision.rule, self.led_from.as_deref());
        }
        if let Some(wanted) = decision.action.exit() {
            let exit = if wanted == 0 { exit.max(1) } else { wanted };
            return self.finish_without(at, exit, format!("{}; {}", verdict.headline, decision.why), out);
        }
        self.restart.rung = decision.action.rung().unwrap_or(Rung::All);
        self.history.past.push(PastFailure {
            decided_at: at,
            lived: verdict.fault_at.since(self.course.began),
            cause: verdict.cause,
            step: verdict.step,
            data: verdict.data,
            rung: self.restart.rung,
            reached: self.ledger.reached(),
            committed: self.saving.committed(self.ranks.first_steps()),
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
            Phase::Ordered(ref mut wait) => match wait.wake_at {
                Some(wake_at) if at < wake_at => out.push(Output::Command(Command::Wake { at: wake_at })),
                Some(_) => {
                    let wait = std::mem::take(wait);
                    self.ask_for_the_ordered(at, wait, out);
                }
                None => {}
            },
            Phase::HeldBack { until } if at >= until => self.restart(at, out),
            Phase::HeldBack { until } => out.push(Output::Command(Command::Wake { at: until })),
            Phase::Judging { .. } => {
                if let Some(pending) = &mut self.pending
                    && pending.wait.wake_at.take().is_some()
                {
                    out.push(pending.consult());
                }
            }
            Phase::Running => self.wake_while_running(at, out),
            Phase::Starting | Phase::Stopping(_) | Phase::Ended => {}
        }
    }

    /// Whether the job continues, and not in the processes of the waiting ranks.
    fn needs_new_processes(&self, action: Action) -> bool {
        let goes_on = action.rung().is_some_and(Rung::goes_on);
        goes_on && !self.waiting.ranks.is_empty() && !keeps_processes(action.rung())
    }

    /// If no rank is lost, the rank that failed must not continue in its process.
    fn is_to_be_replaced(&self, action: Action, verdict: &Verdict) -> Option<Rank> {
        let all_wait = self.waiting.ranks.len() == self.ranks.len();
        verdict.culprit.filter(|_| all_wait && action.rung() == Some(Rung::Ranks))
    }

    pub(super) fn restart(&mut self, at: Mono, out: &mut Vec<Output>) {
        let keeps = keeps_processes(Some(self.restart.rung)) && !self.waiting.ranks.is_empty();
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
        self.course.out_of_memory_kills = 0;
        self.phase = Phase::Starting;
        self.ledger.enter(at, TimeCategory::Starting);
    }

    /// Ends the processes of waiting ranks, and continues with `afterwards` when they have ended.
    fn dismiss(&mut self, afterwards: Afterwards, out: &mut Vec<Output>) {
        self.waiting.afterwards = Some(afterwards);
        self.waiting.ranks.clear();
        self.stop(StopWhy::Dismissed, out);
    }

    /// Ends the job once no rank waits in its process any more.
    pub(super) fn finish_without(&mut self, at: Mono, exit: i32, reason: String, out: &mut Vec<Output>) {
        self.pending = None;
        if self.waiting.ranks.is_empty() {
            self.finish(at, exit, reason, out);
        } else {
            self.dismiss(Afterwards::Finish { exit, reason }, out);
        }
    }

    /// The ranks of an ordered restart have ended. Asks whether the host is ready for the next
    /// ones.
    fn ask_for_the_ordered(&mut self, at: Mono, mut wait: HostWait, out: &mut Vec<Output>) {
        self.ledger.enter(at, TimeCategory::Deciding);
        wait.wake_at = None;
        let verdict = no_rank_failed(self.attempt, at);
        self.phase = Phase::Ordered(wait);
        out.push(Output::Command(Command::Consult(Box::new(verdict))));
    }

    /// Handles the agent's answer for an ordered restart.
    fn rule_on_the_ordered(
        &mut self,
        at: Mono,
        mut wait: HostWait,
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
            waited: wait.waited(at),
            last_step: self.last_step,
        };
        match hindrance(&self.settings, host, 0, self.attempt.next()) {
            Some(Choice { action: Action::Wait, why, .. }) => {
                wait.go_on(at, &why, || Body::Fact(waits(&why)), out);
                self.phase = Phase::Ordered(wait);
            }
            Some(Choice { action, after, rule, why }) if action.exit().is_some() => {
                let reason = format!("a restart was ordered; {why}");
                let (incident, by) = (Incident::ORDERED, DecidedBy::Launcher);
                let decision = Decision { incident, action, after, rule, why, by, agent_evidence };
                out.push(Output::Record(Body::Decision(decision)));
                self.finish_without(at, action.exit().unwrap_or_default(), reason, out);
            }
            other => {
                self.restart.rung = other.and_then(|choice| choice.action.rung()).unwrap_or(Rung::All);
                self.restart(at, out);
            }
        }
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

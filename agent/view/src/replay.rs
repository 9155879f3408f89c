//! Replays a job's journal: diagnoses and decides recorded failures again with the present program. Shows what an upgrade changes, and
//! that nothing else does.

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Incident, JobId};
use mainstay_model::time::Mono;
use mainstay_model::verdict::{Action, Decision, Verdict};
use mainstay_recovery::job::{Job, Output, POLICY};
use mainstay_recovery::policy::{Advice, Budget};
use mainstay_recovery::protocol::{AgentEvidence, Command, Event};
use serde_json::Value;

/// A user's own policy.
pub trait UserPolicy {
    /// Its name for messages.
    fn name(&self) -> &str;

    /// Its advice on a case (`recovery::policy::question`).
    ///
    /// # Errors
    /// It makes no decision; a text with file and line.
    fn advise(&self, case: &Value) -> Result<Option<Advice>, String>;
}

/// A verdict and its decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// The diagnosis.
    pub verdict: Verdict,
    /// The action to take.
    pub decision: Decision,
}

/// One failure, as judged then and now.
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// The job.
    pub job: JobId,
    /// The number of the failure.
    pub incident: Incident,
    /// As the journal has it.
    pub then: Judgement,
    /// As the present core judges the same facts.
    pub now: Judgement,
    /// Why the built-in policy decided now in place of the one that was given.
    pub trouble: Option<String>,
}

impl Replayed {
    /// The differences, one per line: `domain: unknown, now hardware`. A change of wording alone is no difference.
    pub fn differences(&self) -> Vec<String> {
        let (then, now) = (&self.then.verdict, &self.now.verdict);
        let rank = |verdict: &Verdict| verdict.culprit.map_or("none".to_owned(), |rank| rank.0.to_string());
        let class = |verdict: &Verdict| verdict.class.clone().unwrap_or_else(|| "none".to_owned());
        let sure = |verdict: &Verdict| format!("{:.0} %", verdict.confidence * 100.0);
        let action = |judgement: &Judgement| match judgement.decision.action {
            Action::RestartInJob { .. } => "restart".to_owned(),
            Action::Stop { exit } => format!("stop with {exit}"),
            action => action.as_str().replace('_', " "),
        };
        let compared = [
            ("domain", then.domain.to_string(), now.domain.to_string()),
            ("class", class(then), class(now)),
            ("culprit", rank(then), rank(now)),
            ("confidence", sure(then), sure(now)),
            ("decision", action(&self.then), action(&self.now)),
        ];
        let differing = compared.into_iter().filter(|(_, then, now)| then != now);
        differing.map(|(what, then, now)| format!("{what}: {then}, now {now}")).collect()
    }
}

/// Judges all failures in a journal again, in order. Entries of several jobs may be mixed. Jobs whose start is not in the journal are
/// skipped.
pub fn replay(entries: &[Entry]) -> Vec<Replayed> {
    replay_with(entries, None)
}

/// Like [`replay`], with a user's own policy.
pub fn replay_with(entries: &[Entry], policy: Option<&dyn UserPolicy>) -> Vec<Replayed> {
    let mut jobs: Vec<&JobId> = Vec::new();
    for entry in entries {
        if let (Some(job), Body::Fact(Fact::JobStarted(_))) = (&entry.job, &entry.body)
            && !jobs.contains(&job)
        {
            jobs.push(job);
        }
    }
    jobs.into_iter().flat_map(|job| replay_job(job, entries, policy)).collect()
}

fn replay_job(id: &JobId, entries: &[Entry], policy: Option<&dyn UserPolicy>) -> Vec<Replayed> {
    let of_job: Vec<&Entry> = entries.iter().filter(|entry| entry.job.as_ref() == Some(id)).collect();
    let mut replayed = Vec::new();
    let mut job: Option<Job> = None;
    for (place, entry) in of_job.iter().enumerate() {
        let Body::Fact(fact) = &entry.body else { continue };
        let mut out = Vec::new();
        match (fact, &mut job) {
            (Fact::JobStarted(spec), _) => {
                let usual = || Budget { max_restarts: spec.max_restarts, window: None }.into();
                let settings = spec.policy.clone().unwrap_or_else(usual);
                let mut started = Job::begin(entry.at.mono, spec.clone(), settings, &mut out);
                if let Some(policy) = policy {
                    started.advised_by(policy.name());
                }
                job = Some(started);
            }
            (Fact::HostEvidenceReported { .. }, _) | (_, None) => {}
            (fact, Some(job)) => {
                job.step(entry.at.mono, Event::Fact(fact.clone()), &mut out);
                let consulted = consulted(&out);
                if consulted == Some(Incident::ORDERED) {
                    // An order from a person is not judged: replay it as recorded.
                    let host_evidence = HostEvidence::default();
                    rule(
                        job,
                        entry.at.mono,
                        AgentEvidence { incident: Incident::ORDERED, instead: None, host_evidence },
                    );
                } else if let Some(incident) = consulted {
                    // Decided again once ranks that waited in their processes are gone.
                    replayed.retain(|before: &Replayed| before.incident != incident);
                    replayed.extend(judge(id, job, policy, incident, &out, &of_job[place..]));
                }
            }
        }
    }
    replayed
}

/// Lets the job decide by itself, then continue with the recorded decision.
fn judge(
    id: &JobId,
    job: &mut Job,
    policy: Option<&dyn UserPolicy>,
    incident: Incident,
    out: &[Output],
    rest: &[&Entry],
) -> Option<Replayed> {
    let recorded = |entry: &&&Entry| entry.body.incident() == Some(incident);
    let bodies = || rest.iter().filter(recorded).map(|entry| (&entry.body, entry.at.mono));
    // Only the last one counts: an earlier decision may have been to wait.
    let mut decisions = bodies().filter_map(|(body, at)| match body {
        Body::Decision(decision) => Some((decision.clone(), at)),
        _ => None,
    });
    let (decision, at) = decisions.next_back()?;
    let mut verdicts = bodies().filter_map(|(body, _)| match body {
        Body::Verdict(verdict) => Some(verdict.clone()),
        _ => None,
    });
    let then = Judgement { verdict: verdicts.next_back()?, decision: decision.clone() };
    let decided = rest
        .iter()
        .rposition(|entry| matches!(&entry.body, Body::Decision(of) if of.incident == incident))?;
    // The decision is based on the last host evidence before it: earlier evidence may differ while the job waits for a host. Later
    // evidence changed only the verdict.
    let host_evidence =
        rest.get(..decided)?.iter().filter_map(|entry| testimony_of(entry, incident)).next_back();
    let later = rest.get(decided..)?.iter().filter_map(|entry| testimony_of(entry, incident)).next_back();
    let rule = |job: &mut Job, instead| {
        let host_evidence = host_evidence.cloned().unwrap_or_default();
        rule(job, at, AgentEvidence { incident, instead, host_evidence })
    };
    let mut job_now = job.clone();
    let mut judged = rule(&mut job_now, None);
    let asked = judged.iter().find_map(|output| match output {
        Output::Command(Command::AskPolicy { case, .. }) => Some(case.clone()),
        _ => None,
    });
    if let (Some(policy), Some(case)) = (policy, asked) {
        let advice = policy.advise(&case);
        job_now.step(at, Event::PolicyAnswer { incident, advice }, &mut judged);
    }
    if let Some(host_evidence) = later.cloned() {
        job_now.step(at, Event::LateEvidence { incident, host_evidence }, &mut judged);
    }
    let _ = rule(job, Some((decision.action, decision.why)));
    let now = Judgement {
        verdict: out.iter().chain(&judged).filter_map(verdict_of).next_back()?,
        decision: judged.iter().find_map(|output| match output {
            Output::Record(Body::Decision(decision)) => Some(decision.clone()),
            _ => None,
        })?,
    };
    let trouble = out.iter().chain(&judged).find_map(|output| match output {
        Output::Record(Body::Fact(Fact::Observed(seen))) if seen.component == POLICY => {
            Some(seen.detail.clone())
        }
        _ => None,
    });
    Some(Replayed { job: id.clone(), incident, then, now, trouble })
}

fn rule(job: &mut Job, at: Mono, ruling: AgentEvidence) -> Vec<Output> {
    let mut out = Vec::new();
    job.step(at, Event::AgentEvidence(Some(ruling)), &mut out);
    out
}

fn testimony_of(entry: &Entry, incident: Incident) -> Option<&HostEvidence> {
    match &entry.body {
        Body::Fact(Fact::HostEvidenceReported { incident: of, host_evidence }) if *of == incident => {
            Some(host_evidence)
        }
        _ => None,
    }
}

fn verdict_of(output: &Output) -> Option<Verdict> {
    match output {
        Output::Record(Body::Verdict(verdict)) => Some(verdict.clone()),
        _ => None,
    }
}

fn consulted(out: &[Output]) -> Option<Incident> {
    out.iter().find_map(|output| match output {
        Output::Command(Command::Consult(verdict)) => Some(verdict.incident),
        _ => None,
    })
}

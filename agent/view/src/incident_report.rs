//! The report on one failure, from the journal: what happened, since when, whose fault it is with what confidence, what was done, what
//! to do, and the decisive evidence. `mainstay explain`, the terminal and the API show the same text.

mod render;
mod sentences;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::finding::Finding;
use mainstay_model::id::Incident;
use mainstay_model::observation::HostsEvent;
use mainstay_model::time::{Mono, Span, Wall};
use mainstay_model::verdict::{Decision, Outcome, Verdict};

pub use render::{Options, render, render_findings};
pub use sentences::{AfterFailure, advice, brief, done, fault};

/// The journal's entries about one failure.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct IncidentReport {
    /// The diagnosis.
    pub verdict: Verdict,
    /// The action taken.
    pub decision: Option<Decision>,
    /// The result of the decision.
    pub outcome: Option<Outcome>,
    /// When it happened, by the clock of its host.
    pub happened: Wall,
    /// How long after the start of the job, if the journal has that start.
    pub into_the_job: Option<Span>,
    /// The exit status of the job, if it ended since. `None` while it runs.
    pub job_ended: Option<i32>,
    /// Problems of the job without a failed rank, each in its last reported state.
    pub findings: BTreeMap<u64, Finding>,
    /// The hosts that were avoided in the restart after it, and why, one sentence each.
    #[serde(default)]
    pub avoided: Vec<String>,
}

impl IncidentReport {
    fn since_then(&self) -> AfterFailure {
        match (self.job_ended, &self.outcome) {
            (Some(exit), _) => AfterFailure::Ended { exit },
            (None, Some(_)) => AfterFailure::Training,
            (None, None) => AfterFailure::Starting,
        }
    }
}

/// The report on the wanted failure, or on the last one, from the entries of one job in order. `None` if there is none.
pub fn from_entries<'e>(
    entries: impl DoubleEndedIterator<Item = &'e Entry> + Clone,
    wanted: Option<Incident>,
) -> Option<IncidentReport> {
    let mut verdicts = entries.clone().filter_map(|entry| match &entry.body {
        Body::Verdict(verdict) => Some((entry, verdict)),
        _ => None,
    });
    let (entry, verdict) =
        verdicts.rfind(|(_, verdict)| wanted.is_none_or(|wanted| verdict.incident == wanted))?;
    let of_it = || entries.clone().filter(|entry| entry.body.incident() == Some(verdict.incident));
    // Only the last one counts: an earlier decision may have been to wait for the host.
    let mut decisions = of_it().filter_map(|entry| match &entry.body {
        Body::Decision(decision) => Some(decision.clone()),
        _ => None,
    });
    let decision = decisions.next_back();
    let outcome = of_it().find_map(|entry| match &entry.body {
        Body::Outcome(outcome) => Some(outcome.clone()),
        _ => None,
    });
    let began = entries.clone().find(|entry| matches!(entry.body, Body::Fact(Fact::JobStarted(_))));
    let job_ended = entries.clone().rev().find_map(|entry| match entry.body {
        Body::Fact(Fact::JobEnded { exit, .. }) => Some(exit),
        _ => None,
    });
    let later = entries.clone().skip_while(|other| other.body.incident() != Some(verdict.incident));
    let is_other = |body: &Body| matches!(body, Body::Verdict(next) if next.incident != verdict.incident);
    let avoided = later.take_while(|entry| !is_other(&entry.body)).filter_map(|entry| match &entry.body {
        Body::Fact(Fact::Observed(seen)) if HostsEvent::HostAvoided.is(seen) => Some(seen.detail.clone()),
        _ => None,
    });
    let avoided = avoided.collect();
    let same_boot = began.filter(|began| began.boot == entry.boot);
    Some(IncidentReport {
        happened: wall_of(verdict.fault_at, entry),
        into_the_job: same_boot.map(|began| verdict.fault_at.since(began.at.mono)),
        verdict: verdict.clone(),
        decision,
        outcome,
        job_ended,
        findings: findings(entries),
        avoided,
    })
}

/// The wall-clock time of `at`, which is not later than the entry that mentions it.
fn wall_of(at: Mono, entry: &Entry) -> Wall {
    let before = i64::try_from(entry.at.mono.since(at).0).unwrap_or(i64::MAX);
    Wall(entry.at.wall.0.saturating_sub(before))
}

/// Problems of the job without a failed rank, each in its last reported state.
pub fn findings<'e>(entries: impl Iterator<Item = &'e Entry>) -> BTreeMap<u64, Finding> {
    let found = entries.filter_map(|entry| match &entry.body {
        Body::Finding(finding) => Some((finding.finding, finding.clone())),
        _ => None,
    });
    found.collect()
}

/// The report as JSON: verdict, decision, outcome and findings in the journal's form, and the sentences.
pub fn json(report: &IncidentReport) -> serde_json::Value {
    let IncidentReport { verdict, decision, outcome, happened, findings, avoided, .. } = report;
    serde_json::json!({
        "verdict": verdict,
        "decision": decision,
        "outcome": outcome,
        "findings": findings,
        "happened": happened.to_string(),
        "whose_fault": fault(verdict),
        "avoided": avoided,
        "what_was_done": done(decision.as_ref(), report.since_then()),
        "what_to_do": advice(verdict, decision.as_ref(), report.since_then()),
    })
}

/// The report on a failure of a job as JSON, with the whole text that people read.
pub fn with_text(job: &str, report: &IncidentReport) -> serde_json::Value {
    let mut answer = json(report);
    answer["job"] = job.into();
    answer["incident"] = report.verdict.incident.0.into();
    answer["text"] = render(report, Options { all: true, ..Options::default() }).into();
    answer
}

//! A failure with its verdict, before the decision and after it, and the evidence from the host
//! that changes the verdict.

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::diagnose::{self, FailedAttempt};
use mainstay_diagnosis::unrunnable;
use mainstay_model::entry::{Body, Fact};
use mainstay_model::finding::Finding;
use mainstay_model::host_context::HostEvidence;
use mainstay_model::verdict::Verdict;

use super::host_wait::HostWait;
use super::{Command, Output};
use crate::policy::PolicyProblem;

/// How an attempt failed, and the verdict without host evidence: the input for each new judgement.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) first: Verdict,
    pub(super) failed: FailedAttempt,
}

impl Failure {
    /// The verdict with this evidence.
    pub(super) fn judge(&self, host_evidence: &HostEvidence) -> Verdict {
        let mut verdict = self.first.clone();
        // The catalog is compiled in and tested. Without it the verdict has fewer details, but is not wrong.
        if let Ok(catalog) = Catalog::shared() {
            diagnose::complete(&mut verdict, &catalog, &self.failed, host_evidence);
        }
        unrunnable::complete(&mut verdict, &self.failed.ends);
        verdict
    }
}

/// A failure with a verdict and without a decision.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) verdict: Verdict,
    /// None if the attempt did not start or hung: host evidence does not change such a verdict.
    pub(super) failure: Option<Failure>,
    /// The last evidence of the host.
    pub(super) host_evidence: HostEvidence,
    pub(super) wait: HostWait,
    /// The last problem of the user's own policy. A policy that failed is not asked again about the same failure.
    pub(super) problem: Option<PolicyProblem>,
    /// The evidence with which the user's own policy was asked, until it answers.
    pub(super) asked: Option<Evidence>,
}

/// The evidence for a decision.
#[derive(Clone, Debug)]
pub(super) struct Evidence {
    pub(super) by_agent: bool,
    pub(super) host: HostEvidence,
}

impl Pending {
    pub(super) fn new(verdict: Verdict, failure: Option<Failure>) -> Pending {
        Pending {
            verdict,
            failure,
            host_evidence: HostEvidence::default(),
            wait: HostWait::default(),
            problem: None,
            asked: None,
        }
    }

    /// Asks the agent for its evidence.
    pub(super) fn consult(&self) -> Output {
        Output::Command(Command::Consult(Box::new(self.verdict.clone())))
    }

    /// Judges again with the host's evidence. A changed verdict is recorded again, and the decision uses it.
    pub(super) fn receive(&mut self, host_evidence: &HostEvidence, out: &mut Vec<Output>) {
        if *host_evidence == self.host_evidence {
            return;
        }
        self.host_evidence = host_evidence.clone();
        if let Some(failure) = &self.failure {
            replace(&mut self.verdict, failure.judge(host_evidence), out);
        } else {
            // Host evidence does not change the verdict on a hang. What the GPUs did in it, and earlier findings, are
            // added to the stacks without blaming anyone.
            let reported = &mut self.verdict.evidence;
            let before = reported.len();
            let found = host_evidence.gpus.iter().cloned();
            let found = found.chain(host_evidence.findings.iter().map(Finding::stood));
            let beside: Vec<String> = found.filter(|message| !reported.contains(message)).collect();
            reported.extend(beside);
            if reported.len() > before {
                out.push(Output::Record(Body::Verdict(self.verdict.clone())));
            }
        }
        let (incident, host_evidence) = (self.verdict.incident, host_evidence.clone());
        out.push(Output::Record(Body::Fact(Fact::HostEvidenceReported { incident, host_evidence })));
    }
}

/// A failure with a decision. Host evidence may arrive after it, since a driver may need seconds
/// for its line in the kernel log. The verdict is made again; the decision does not change.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    pub(super) verdict: Verdict,
    pub(super) failure: Failure,
    /// The host's evidence so far.
    pub(super) host_evidence: HostEvidence,
}

impl Decided {
    pub(super) fn receive(&mut self, reported: HostEvidence, out: &mut Vec<Output>) {
        // Resources in use, earlier failures and findings stay as they were at the decision.
        let HostEvidence { held, gpus, seen_before, findings, .. } = self.host_evidence.clone();
        let host_evidence = HostEvidence { held, gpus, seen_before, findings, ..reported };
        if host_evidence == self.host_evidence {
            return;
        }
        replace(&mut self.verdict, self.failure.judge(&host_evidence), out);
        self.host_evidence = host_evidence.clone();
        let incident = self.verdict.incident;
        out.push(Output::Record(Body::Fact(Fact::HostEvidenceReported { incident, host_evidence })));
    }
}

/// Records a verdict that differs from the present one.
fn replace(present: &mut Verdict, verdict: Verdict, out: &mut Vec<Output>) {
    if verdict != *present {
        out.push(Output::Record(Body::Verdict(verdict.clone())));
        *present = verdict;
    }
}

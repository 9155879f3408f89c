//! Host evidence that arrives after the decision: a driver may need seconds for its line in the kernel log. The
//! verdict is made again; the decision does not change.

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::diagnose::{self, FailedAttempt};
use mainstay_diagnosis::unrunnable;
use mainstay_model::entry::{Body, Fact};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::Incident;
use mainstay_model::verdict::Verdict;

use super::{Job, Output};

/// A failure with a decision, and the inputs of its verdict.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    /// Its present verdict.
    pub(super) verdict: Verdict,
    /// The verdict without host evidence, and how the attempt failed.
    pub(super) received: (Verdict, FailedAttempt),
    /// The host's evidence so far.
    pub(super) host_evidence: HostEvidence,
}

impl Job {
    pub(super) fn receive_late(&mut self, incident: Incident, reported: HostEvidence, out: &mut Vec<Output>) {
        let last = Incident(self.incidents.len() as u64);
        let Some(decided) = self.decided.as_mut().filter(|decided| decided.verdict.incident == incident)
        else {
            return;
        };
        // Resources in use, earlier failures and findings stay as they were at the decision.
        let HostEvidence { held, gpus, seen_before, findings, .. } = decided.host_evidence.clone();
        let host_evidence = HostEvidence { held, gpus, seen_before, findings, ..reported };
        let Ok(catalog) = Catalog::shared() else { return };
        if incident != last || host_evidence == decided.host_evidence {
            return;
        }
        let (first, failed) = &decided.received;
        let mut verdict = first.clone();
        diagnose::complete(&mut verdict, &catalog, failed, &host_evidence);
        unrunnable::complete(&mut verdict, &failed.ends);
        if verdict != decided.verdict {
            out.push(Output::Record(Body::Verdict(verdict.clone())));
            decided.verdict = verdict;
        }
        decided.host_evidence = host_evidence.clone();
        out.push(Output::Record(Body::Fact(Fact::HostEvidenceReported { incident, host_evidence })));
    }
}

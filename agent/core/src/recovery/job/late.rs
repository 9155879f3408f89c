//! What the host says of a failure after it was decided on: a driver may need seconds for its line in the kernel log. The
//! verdict is made anew; what was decided stays decided.

use crate::base::id::Incident;
use crate::failure::attribution::catalog::Catalog;
use crate::failure::diagnose::{self, FailedAttempt};
use crate::failure::unrunnable;
use crate::model::entry::{Body, Fact};
use crate::model::host_context::HostEvidence;
use crate::model::verdict::Verdict;

use super::{Job, Output};

/// A failure that was decided on, with what its verdict was made of.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    /// What it is taken for.
    pub(super) verdict: Verdict,
    /// The verdict before anybody's words were heard, and how the attempt failed.
    pub(super) received: (Verdict, FailedAttempt),
    /// What the host has said of it.
    pub(super) host_evidence: HostEvidence,
}

impl Job {
    pub(super) fn receive_late(&mut self, incident: Incident, reported: HostEvidence, out: &mut Vec<Output>) {
        let last = Incident(self.incidents.len() as u64);
        let Some(decided) = self.decided.as_mut().filter(|of| of.verdict.incident == incident) else {
            return;
        };
        // What is held, what was seen before and what was found in the job are of the time of the decision.
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

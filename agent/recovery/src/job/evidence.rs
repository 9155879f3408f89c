//! The evidence for a failure from the host, the job's own findings and its earlier failures, before the decision.

use crate::policy::PastFailure;
use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::diagnose;
use mainstay_diagnosis::repeats::{FailurePosition, SeenBefore};
use mainstay_diagnosis::unrunnable;
use mainstay_model::entry::{Body, Fact};
use mainstay_model::finding::Finding;
use mainstay_model::host_context::HostEvidence;
use mainstay_model::verdict::{Cause, Verdict};

use super::deciding::Pending;
use super::{Job, Output};

impl Job {
    /// Judges again with the host's evidence. A changed verdict is recorded again, and the decision uses it.
    pub(super) fn receive(pending: &mut Pending, host_evidence: &HostEvidence, out: &mut Vec<Output>) {
        if *host_evidence == pending.host_evidence {
            return;
        }
        pending.host_evidence = host_evidence.clone();
        let incident = pending.verdict.incident;
        if let (Some((first, failed)), Ok(catalog)) = (&pending.received, Catalog::shared()) {
            let mut verdict = first.clone();
            diagnose::complete(&mut verdict, &catalog, failed, host_evidence);
            unrunnable::complete(&mut verdict, &failed.ends);
            if verdict != pending.verdict {
                out.push(Output::Record(Body::Verdict(verdict.clone())));
                pending.verdict = verdict;
            }
        }
        // Host evidence does not change the verdict on a hang. What the GPUs did in it, and earlier findings, are
        // added to the stacks without blaming anyone.
        let reported = &mut pending.verdict.evidence;
        let found = host_evidence.findings.iter().map(Finding::stood);
        let beside: Vec<String> = host_evidence
            .gpus
            .iter()
            .cloned()
            .chain(found)
            .filter(|message| !reported.contains(message))
            .collect();
        if pending.received.is_none() && !beside.is_empty() {
            reported.extend(beside);
            out.push(Output::Record(Body::Verdict(pending.verdict.clone())));
        }
        out.push(Output::Record(Body::Fact(Fact::HostEvidenceReported {
            incident,
            host_evidence: host_evidence.clone(),
        })));
    }

    /// Earlier failures of the same kind in this run.
    pub(super) fn seen_before(&self, verdict: &Verdict) -> Option<SeenBefore> {
        let Cause::Exception { fingerprint: now, .. } = &verdict.cause else { return None };
        let same = |past: &&PastFailure| matches!(&past.cause, Cause::Exception { fingerprint, .. } if fingerprint == now);
        let mut seen = SeenBefore::default();
        let places = self.past.iter().filter(same).map(|past| FailurePosition {
            step: past.step,
            data: past.data,
            heartbeats: past.heartbeats,
        });
        places.for_each(|then| seen.count(then, FailurePosition::from_verdict(verdict)));
        (!seen.is_nothing()).then_some(seen)
    }
}

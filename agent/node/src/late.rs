//! Evidence that arrives in the minute after a failure. A driver may need seconds for its line in the kernel log. A
//! running launcher judges again with it; if the job has ended, the agent judges again from its own journal.

use mainstay_diagnosis::host_evidence;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Incident, JobId};
use mainstay_model::verdict::Verdict;
use mainstay_view::node::JobPhase;
use mainstay_view::replay::replay;

use super::evidence::AnsweredFailure;
use super::{Input, Node, Session, ToLauncher};
use mainstay_journal::state::StateReader;
use mainstay_journal::store::journal::JournalError;
use mainstay_sys::{clock, memory};

/// Entries that are read at once.
const MAX_ENTRIES_PER_READ: usize = 1000;

impl Node {
    /// Sends late evidence about the recent failures.
    pub(super) fn report_late_evidence(&mut self) {
        let now = clock::mono();
        for mut answered in std::mem::take(&mut self.answered) {
            let later = self.report_evidence(&answered.session, &answered.verdict, &answered.of_then);
            if let Some(host_evidence) = answered.host_evidence.with(later) {
                answered.host_evidence = host_evidence.clone();
                let (job, incident) = (answered.session.job.clone(), answered.verdict.incident);
                // A launcher whose job has ended may still exist, but no longer receives anything.
                if self.is_over(&job) {
                    self.judge_late(job, incident, host_evidence);
                } else if self.is_current(&answered.session) {
                    self.send(&answered.session, ToLauncher::Late(incident, host_evidence));
                }
            }
            if now <= answered.verdict.fault_at.after(host_evidence::AFTER) {
                self.answered.push(answered);
            }
        }
    }

    /// Registers a reported failure without evidence: it may have happened before the launcher found the agent.
    pub(super) fn await_late_evidence(&mut self, session: &Session, verdict: &Verdict) {
        let is_it =
            |of: &AnsweredFailure| of.session.job == session.job && of.verdict.incident == verdict.incident;
        if !self.answered.iter().any(is_it) {
            self.answered.retain(|answered| answered.session.job != session.job);
            let (session, verdict) = (session.clone(), verdict.clone());
            let of_then = self.of_then(&session, &verdict);
            self.answered.push(AnsweredFailure {
                session,
                verdict,
                host_evidence: HostEvidence::default(),
                of_then,
            });
        }
    }

    fn is_over(&self, job: &JobId) -> bool {
        let phase = self.snapshots.view().jobs.get(job).map(|job| &job.phase);
        matches!(phase, Some(JobPhase::Ended(_) | JobPhase::Lost))
    }

    /// Judges a failure of an ended job again, next to the loop because its journal has to be read.
    fn judge_late(&mut self, job: JobId, incident: Incident, host_evidence: HostEvidence) {
        self.record(Some(&job), Fact::HostEvidenceReported { incident, host_evidence });
        let (snapshots, inputs) = (self.snapshots.reader(), self.own_inputs.clone());
        tokio::task::spawn_blocking(move || {
            let judged = judge_again(&snapshots, &job, incident);
            memory::give_back();
            match judged {
                // The node may be gone in the meantime; the evidence is in its journal.
                Ok(Some(verdict)) => _ = inputs.blocking_send(Input::LateVerdict(job, Box::new(verdict))),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%job, incident = incident.0, %error, "the journal cannot be read: late evidence of failures is not used");
                }
            }
        });
    }

    /// Records a verdict that late evidence changed, for a failure of an ended job.
    pub(super) fn late_verdict(&mut self, job: &JobId, verdict: Verdict) {
        if !self.is_over(job) {
            return;
        }
        let recorded = self.record_of_job(clock::now(), job, None, Body::Verdict(verdict));
        self.repeats.take_in(&recorded);
        self.report_failures_to_peers();
        self.report_to_hooks(&recorded);
    }
}

/// The verdict from everything in the journal, if it differs from the previous one.
fn judge_again(
    snapshots: &StateReader,
    job: &JobId,
    incident: Incident,
) -> Result<Option<Verdict>, JournalError> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut cursor = 0;
    loop {
        let read = snapshots.entries_after(cursor, MAX_ENTRIES_PER_READ)?;
        let Some(last) = read.entries.last() else { break };
        cursor = last.seq.max(read.cursor);
        entries.extend(read.entries.into_iter().filter(|entry| entry.job.as_ref() == Some(job)));
    }
    let replayed = replay(&entries).into_iter().find(|replayed| replayed.incident == incident);
    Ok(replayed
        .filter(|replayed| replayed.now.verdict != replayed.then.verdict)
        .map(|replayed| replayed.now.verdict))
}

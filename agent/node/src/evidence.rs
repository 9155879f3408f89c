//! The host's evidence about a failure, for the launcher, which decides: after a reading of the job's GPUs, or without one if that takes too
//! long.

use std::collections::BTreeSet;

use mainstay_diagnosis::host_evidence::AttemptScope;
use mainstay_model::health::Component;
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Incident, Pid};
use mainstay_model::verdict::{Cause, Verdict};
use mainstay_view::node::JobView;

use super::{Input, Node, Session, ToLauncher, gpus};
use mainstay_sys::clock;

/// A failure with the evidence that was sent for it.
#[derive(Debug)]
pub(super) struct AnsweredFailure {
    pub(super) session: Session,
    pub(super) verdict: Verdict,
    pub(super) host_evidence: HostEvidence,
    /// The attempt's scope when it failed. Once another attempt has started this is no longer known.
    pub(super) of_then: AttemptScope,
}

impl Node {
    /// Answers at once if the job's GPUs have been read since its ranks were gone, else after that reading.
    pub(super) fn failed(&mut self, session: Session, verdict: Verdict) {
        if let Some(held) = self.gpus.held(&session.job) {
            return self.answer(&session, &verdict, held);
        }
        let (inputs, due) = (self.own_inputs.clone(), Input::EvidenceDue(session.clone(), verdict.incident));
        tokio::spawn(async move {
            tokio::time::sleep(gpus::ANSWER_WITHIN).await;
            let _ = inputs.send(due).await;
        });
        self.waiting.push((session, verdict));
    }

    pub(super) fn answer_what_waits(&mut self) {
        for (session, verdict) in std::mem::take(&mut self.waiting) {
            match self.gpus.held(&session.job) {
                Some(held) => self.answer(&session, &verdict, held),
                None => self.waiting.push((session, verdict)),
            }
        }
    }

    pub(super) fn answer_in_any_case(&mut self, session: &Session, incident: Incident) {
        let is_it = |(of, verdict): &(Session, Verdict)| of == session && verdict.incident == incident;
        if let Some(place) = self.waiting.iter().position(is_it) {
            let (session, verdict) = self.waiting.swap_remove(place);
            let unread = "the driver has not reported yet whether the GPUs are free".to_owned();
            self.answer(&session, &verdict, vec![unread]);
        }
    }

    /// Only the agent reads kernel log, components and GPUs.
    fn answer(&mut self, session: &Session, verdict: &Verdict, held: Vec<String>) {
        let elsewhere = self.peers.as_ref().map(|peers| peers.peers_failures()).unwrap_or_default();
        let seen_before = self.repeats.before(&session.job, &clock::boot_id(), verdict, &elsewhere);
        let of_then = self.of_then(session, verdict);
        let reported = self.report_evidence(session, verdict, &of_then);
        let mut host_evidence = HostEvidence { held, seen_before, ..reported };
        if let (Cause::Hang { .. }, Some(launcher)) = (&verdict.cause, self.launchers.get(&session.job)) {
            host_evidence.gpus.clone_from(&launcher.gpus_in_hang);
        }
        if self.send(session, ToLauncher::AgentEvidence(verdict.incident, host_evidence.clone())) {
            self.answered.retain(|answered| answered.session.job != session.job);
            let (session, verdict) = (session.clone(), verdict.clone());
            self.answered.push(AnsweredFailure { session, verdict, host_evidence, of_then });
        }
    }

    /// The host's evidence about a failure so far.
    pub(super) fn report_evidence(
        &self,
        session: &Session,
        verdict: &Verdict,
        of_then: &AttemptScope,
    ) -> HostEvidence {
        let others = self.snapshots.view().jobs.values().filter(|job| !concerned(job, session, verdict));
        let scope = AttemptScope { other_processes: others.flat_map(processes).collect(), ..of_then.clone() };
        // The health of a GPU that the job no longer uses does not count.
        let counts = |component: &&Component| !self.gpus.is_excluded(&session.job, &component.name);
        let components: Vec<Component> = self.snapshots.view().counting().filter(counts).cloned().collect();
        let notices = self.leave.iter().map(|(_, leave)| leave.reason.clone()).collect();
        HostEvidence { notices, ..self.hardware.report_evidence(verdict.fault_at, &scope, &components) }
    }

    /// The scope of the failed attempt, as long as no other has started.
    pub(super) fn of_then(&self, session: &Session, verdict: &Verdict) -> AttemptScope {
        let job = self.snapshots.view().jobs.values().find(|job| concerned(job, session, verdict));
        let ranks: BTreeSet<Pid> = job.into_iter().flat_map(processes).collect();
        AttemptScope {
            began: job.map(|job| job.attempt_started).unwrap_or_default(),
            control_group: self
                .launchers
                .get(&session.job)
                .and_then(|launcher| launcher.control_group.clone()),
            other_processes: BTreeSet::new(),
            gpus: self.gpus.of_job(&session.job, &ranks),
            processes: ranks,
        }
    }

    /// Whether it could be sent.
    pub(super) fn send(&self, session: &Session, word: ToLauncher) -> bool {
        let orders = self.launchers.get(&session.job).and_then(|launcher| launcher.session.as_ref());
        let current = orders.filter(|(number, _)| *number == session.number);
        current.is_some_and(|(_, orders)| orders.try_send(word).is_ok())
    }
}

/// Whether the verdict is about the job's current attempt.
fn concerned(job: &JobView, session: &Session, verdict: &Verdict) -> bool {
    job.id == session.job && job.attempt == verdict.attempt
}

fn processes(job: &JobView) -> impl Iterator<Item = Pid> {
    job.ranks.values().map(|rank| rank.pid)
}

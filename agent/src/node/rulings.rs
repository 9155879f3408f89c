//! What the agent says to a launcher's proposal: once the job's GPUs were read, or in time without.

use mainstay_core::health::Component;
use mainstay_core::id::{Incident, Pid};
use mainstay_core::testimony::Testimony;
use mainstay_core::verdict::{Cause, Verdict};

use super::{Input, Node, Session, ToLauncher, gpus};
use crate::os::clock;

impl Node {
    /// Rules at once if the job's GPUs have been read since its ranks were gone, else when they are.
    pub(super) fn proposed(&mut self, session: Session, verdict: Verdict) {
        if let Some(held) = self.gpus.held(&session.job) {
            return self.rule(&session, &verdict, held);
        }
        let (inputs, due) = (self.own_inputs.clone(), Input::RulingDue(session.clone(), verdict.incident));
        tokio::spawn(async move {
            tokio::time::sleep(gpus::ANSWER_WITHIN).await;
            let _ = inputs.send(due).await;
        });
        self.waiting.push((session, verdict));
    }

    pub(super) fn rule_on_what_waits(&mut self) {
        for (session, verdict) in std::mem::take(&mut self.waiting) {
            match self.gpus.held(&session.job) {
                Some(held) => self.rule(&session, &verdict, held),
                None => self.waiting.push((session, verdict)),
            }
        }
    }

    pub(super) fn rule_in_any_case(&mut self, session: &Session, incident: Incident) {
        let is_it = |(of, verdict): &(Session, Verdict)| of == session && verdict.incident == incident;
        if let Some(place) = self.waiting.iter().position(is_it) {
            let (session, verdict) = self.waiting.swap_remove(place);
            let unread = "the driver has not told yet whether the GPUs are free".to_owned();
            self.rule(&session, &verdict, vec![unread]);
        }
    }

    /// The agent agrees with what the launcher proposes, and testifies: kernel log, components and GPUs are its to read.
    fn rule(&self, session: &Session, verdict: &Verdict, held: Vec<String>) {
        let orders = self.launchers.get(&session.job).and_then(|launcher| launcher.session.as_ref());
        if let Some((_, orders)) = orders.filter(|(number, _)| *number == session.number) {
            let others = |pid: Pid| {
                let jobs = self.board.view().jobs.iter().filter(|(job, _)| **job != session.job);
                jobs.flat_map(|(_, view)| view.ranks.values()).any(|rank| rank.pid == pid)
            };
            // A GPU that the job was told to do without may be as sick as it likes.
            let counts = |component: &&Component| !self.gpus.is_excluded(&session.job, &component.name);
            let components: Vec<Component> = self.board.view().counting().filter(counts).cloned().collect();
            let testimony = self.hardware.testify(verdict.fault_at, others, &components);
            let seen_before = self.repeats.before(&session.job, &clock::boot_id(), verdict);
            let mut testimony = Testimony { held, seen_before, ..testimony };
            if let (Cause::Hang { .. }, Some(launcher)) = (&verdict.cause, self.launchers.get(&session.job)) {
                testimony.gpus.clone_from(&launcher.gpus_in_hang);
            }
            let _ = orders.try_send(ToLauncher::Ruling(verdict.incident, None, testimony));
        }
    }
}

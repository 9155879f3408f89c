//! The view of one job, from its entries.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{JobPhase, JobView, RankPhase, RankView};
use mainstay_checkpoint::advice::Advised;
use mainstay_checkpoint::copied_step::{self, CopiedStep};
use mainstay_group::spare_ready::SpareReady;
use mainstay_model::entry::{Body, Fact, HostOfRanks, JobSpec, StartedRank};
use mainstay_model::id::{Attempt, JobId, Rank};
use mainstay_model::observation::{HostsEvent, LEADS_HERE, Observation};
use mainstay_model::time::Stamp;
use mainstay_model::verdict::{Decision, FaultDomain};
use mainstay_recovery::job::POLICY;
use mainstay_recovery::policy::{CauseKind, Rung};

impl JobView {
    /// The number of steps after which the job ends, if its ranks reported it.
    pub fn total_steps(&self) -> Option<u64> {
        self.ranks.values().filter_map(|rank| rank.beat.as_ref()?.total_steps).max()
    }

    /// Creates the view of a job from its start and the number of that entry.
    pub(super) fn new(id: JobId, spec: JobSpec, (started, began): (Stamp, u64)) -> JobView {
        JobView {
            id,
            leads: !spec.follows,
            spec: Arc::new(spec),
            phase: JobPhase::Starting,
            attempt: Attempt(0),
            attempt_started: started.mono,
            started,
            began,
            books: Arc::default(),
            step: None,
            step_at: started.mono,
            ranks: BTreeMap::new(),
            hosts: Vec::new(),
            hang: None,
            restarts: 0,
            restarts_in_process: 0,
            restarts_of_some: 0,
            findings: BTreeMap::new(),
            failures: BTreeMap::new(),
            failures_by_host: BTreeMap::new(),
            last_verdict: None,
            last_decision: None,
            end_reason: None,
            policy_troubles: 0,
            policy_trouble: None,
            saving: None,
            copied: None,
            copies_behind: None,
            waits: None,
        }
    }

    pub(super) fn apply_copies(&mut self, at: Stamp, seen: &Observation) {
        if let Some(step) = CopiedStep::read(seen) {
            (self.copied, self.copies_behind) = (Some((step, at)), None);
        } else if let Some(why) = copied_step::read_behind(seen) {
            self.copies_behind = Some(why.to_owned());
        } else if let Some(ready) = SpareReady::read(seen) {
            self.waits = Some(ready.to_owned());
        }
    }

    pub(super) fn apply(&mut self, body: &Body) {
        match body {
            Body::Fact(fact) => self.apply_fact(fact),
            Body::Verdict(verdict) => self.last_verdict = Some(verdict.clone()),
            Body::Decision(decision) => {
                self.count_failure(decision);
                if decision.action.attempt().is_some() {
                    self.restarts = self.restarts.saturating_add(1);
                }
                match decision.action.rung() {
                    Some(Rung::InProcess) => {
                        self.restarts_in_process = self.restarts_in_process.saturating_add(1)
                    }
                    Some(Rung::Ranks) => self.restarts_of_some = self.restarts_of_some.saturating_add(1),
                    _ => {}
                }
                self.last_decision = Some(decision.clone());
            }
            Body::Outcome(outcome) => self.step = Some(outcome.step),
            Body::Finding(finding) => {
                if finding.over {
                    self.findings.remove(&finding.finding);
                } else {
                    self.findings.insert(finding.finding, finding.clone());
                }
            }
            Body::Health(_) => {}
        }
    }

    /// Takes the job's last step from the exits of its ranks. Samples of pages, which are not in the journal, may end earlier.
    fn take_last_steps(&mut self) {
        let ranks = self.ranks.values();
        let steps: Option<Vec<u64>> =
            ranks.map(|rank| rank.last_step.filter(|_| rank.has_exited())).collect();
        if let Some(step) = steps.and_then(|steps| steps.into_iter().min()) {
            self.step = Some(step);
        }
    }

    /// Counts a failure at its first decision: until then its verdict may change.
    fn count_failure(&mut self, decision: &Decision) {
        let is_news = self.last_decision.as_ref().is_none_or(|last| last.incident != decision.incident);
        let of =
            self.last_verdict.as_ref().filter(|verdict| is_news && verdict.incident == decision.incident);
        if let Some(verdict) = of {
            let kind = (CauseKind::from_cause(&verdict.cause), verdict.domain.name());
            *self.failures.entry(kind).or_default() += 1;
            if verdict.domain != FaultDomain::User {
                *self.failures_by_host.entry(verdict.host_at_fault().cloned()).or_default() += 1;
            }
        }
    }

    fn apply_fact(&mut self, fact: &Fact) {
        match fact {
            Fact::AttemptStarted { attempt, ranks, hosts, .. } => {
                self.attempt = *attempt;
                self.phase = JobPhase::Starting;
                self.waits = None;
                // Findings belong to one attempt.
                self.findings.clear();
                self.hang = None;
                let of = |started: &StartedRank| (started.rank, Arc::new(RankView::new(started, hosts)));
                self.ranks = ranks.iter().map(of).collect();
                self.hosts = hosts.iter().map(|of| of.host.clone()).collect();
            }
            Fact::RankConnected { rank, .. } => self.set_phase(*rank, RankPhase::Connected),
            Fact::RankRefused { rank, reason, .. } => {
                if let Some(rank) = self.rank_mut(*rank) {
                    rank.refusal = Some(reason.clone());
                }
            }
            Fact::RanksStepping { step, .. } => {
                self.phase = JobPhase::Running;
                self.step = Some(*step);
            }
            Fact::Progress { step, .. } => self.step = Some(*step),
            Fact::RankRaised { rank, .. } => {
                self.phase = JobPhase::Recovering;
                self.set_phase(*rank, RankPhase::Raised);
            }
            Fact::RankEnding { .. } => {
                if self.phase != JobPhase::Stopping {
                    self.phase = JobPhase::Recovering;
                }
            }
            Fact::RankExited { rank, status, step, .. } => {
                if !status.is_success() && self.phase != JobPhase::Stopping {
                    self.phase = JobPhase::Recovering;
                }
                self.set_phase(*rank, RankPhase::Exited(*status));
                if let Some(rank) = self.rank_mut(*rank) {
                    rank.last_step = *step;
                }
                self.take_last_steps();
            }
            Fact::RanksHung { hang, acts, .. } => {
                if *acts {
                    self.phase = JobPhase::Recovering;
                }
                self.hang = Some(hang.clone());
            }
            Fact::HangPassed { .. } => {
                self.hang = None;
                if self.phase == JobPhase::Recovering {
                    self.phase = JobPhase::Running;
                }
            }
            Fact::WorldChanged { now, .. } => Arc::make_mut(&mut self.spec).world_size = *now,
            Fact::StartFailed { .. } => self.phase = JobPhase::Recovering,
            Fact::Observed(seen) => {
                if seen.component == POLICY {
                    self.policy_troubles += 1;
                    self.policy_trouble = Some(seen.detail.clone());
                }
                self.saving = Advised::read(seen).or(self.saving);
                if let Some(here) =
                    seen.values.get(LEADS_HERE).filter(|_| HostsEvent::LeaderReplaced.is(seen))
                {
                    self.leads = *here == true.to_string();
                }
            }
            Fact::StopRequested { .. } => self.phase = JobPhase::Stopping,
            Fact::LauncherLost { .. } => self.phase = JobPhase::Lost,
            Fact::JobEnded { exit, reason } => {
                self.phase = JobPhase::Ended(*exit);
                self.end_reason = Some(reason.clone());
            }
            Fact::JobStarted(_)
            | Fact::HostLost { .. }
            | Fact::AgentStarted { .. }
            | Fact::AgentStopped
            | Fact::OutOfMemoryKills { .. }
            | Fact::Xid(_)
            | Fact::Sxid(_)
            | Fact::KernelReport(_)
            | Fact::KernelLinesLeftOut { .. }
            | Fact::KernelLogGap { .. }
            | Fact::HostEvidenceReported { .. }
            | Fact::GpuDriverSilent { .. }
            | Fact::GpuDriverAnswered { .. }
            | Fact::EvidenceTaken { .. }
            | Fact::PagesUnavailable { .. }
            | Fact::AttemptEnded { .. }
            | Fact::AgentFound { .. }
            | Fact::AgentLost { .. } => {}
        }
    }

    fn set_phase(&mut self, rank: Rank, phase: RankPhase) {
        if let Some(rank) = self.rank_mut(rank) {
            rank.phase = phase;
        }
    }

    /// Copies the rank if a snapshot shares it.
    pub(super) fn rank_mut(&mut self, rank: Rank) -> Option<&mut RankView> {
        self.ranks.get_mut(&rank).map(Arc::make_mut)
    }
}

impl RankView {
    fn new(started: &StartedRank, hosts: &[HostOfRanks]) -> RankView {
        RankView {
            start_ticks: started.start_ticks,
            host: HostOfRanks::find(hosts, started.rank).map(|of| of.host.clone()),
            rank: started.rank,
            local_rank: started.local_rank,
            pid: started.pid,
            page: started.page.clone(),
            phase: RankPhase::Started,
            refusal: None,
            beat: None,
            last_step: None,
        }
    }

    pub(super) fn has_exited(&self) -> bool {
        matches!(self.phase, RankPhase::Exited(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::entry::ExitStatus;
    use mainstay_model::id::Pid;
    use mainstay_model::time::Span;

    fn exited(rank: u32, step: Option<u64>) -> Fact {
        Fact::RankExited {
            attempt: Attempt(0),
            rank: Rank(rank),
            pid: Pid(100),
            status: ExitStatus::Code(0),
            step,
            data: None,
            after_stop: false,
            stderr_tail: Vec::new(),
            stdout_tail: Vec::new(),
            stderr_times: Vec::new(),
            stdout_times: Vec::new(),
        }
    }

    #[test]
    fn the_last_step_of_a_job_comes_from_the_exits_of_its_ranks() {
        let mut job = JobView::new(JobId("j".to_owned()), JobSpec::default(), (Stamp::default(), 1));
        let ranks = [0, 1].map(|rank| StartedRank {
            rank: Rank(rank),
            local_rank: rank,
            pid: Pid(100),
            page: None,
            start_ticks: None,
        });
        job.apply_fact(&Fact::AttemptStarted {
            attempt: Attempt(0),
            master_port: 1,
            ranks: ranks.to_vec(),
            hosts: vec![],
        });
        job.apply_fact(&Fact::RanksStepping {
            attempt: Attempt(0),
            step: 3,
            counted: false,
            restoring: Span::default(),
        });
        job.apply_fact(&exited(0, Some(42)));
        assert_eq!(job.step, Some(3), "the other rank still runs");
        job.apply_fact(&exited(1, Some(41)));
        assert_eq!(job.step, Some(41));
    }
}

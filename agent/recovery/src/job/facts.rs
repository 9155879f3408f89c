//! What each fact of the journal changes in the job.

use super::{Command, Job, NOT_STARTED_EXIT, Output, Phase, RankState, StopWhy};
use mainstay_diagnosis::diagnose;
use mainstay_diagnosis::root_rank::{LostHost, host_missing, start_failed};
use mainstay_hang::{Hang, PlaceGroup, refine, weigh};
use mainstay_model::entry::{ExitStatus, Fact};
use mainstay_model::hang::Waits;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::Mono;
use mainstay_progress::goodput::TimeCategory;

/// The event that records that the host had no process, thread or file descriptor left for a job. It is an event of the
/// component `job`.
pub const EXHAUSTED: &str = "resources_exhausted";

impl Job {
    /// Facts of attempts that are over change nothing.
    pub(super) fn fact(&mut self, at: Mono, fact: Fact, out: &mut Vec<Output>) {
        match fact {
            Fact::AttemptStarted { attempt, ranks, hosts, .. } => {
                if self.phase == Phase::Starting && attempt == self.attempt {
                    self.on_hosts(hosts);
                    self.attempt_started(at, ranks.iter().map(|started| started.rank), out);
                }
            }
            Fact::StartFailed { attempt, error, missing } => {
                if self.phase == Phase::Starting && attempt == self.attempt {
                    let incident = self.next_incident();
                    let mut verdict = match missing.into_iter().next() {
                        Some(host) => host_missing(incident, attempt, host, &error, at),
                        None => start_failed(incident, attempt, &error, at),
                    };
                    if let Some(reported) = self.exhausted.take() {
                        diagnose::blame_the_limit(&mut verdict, &reported);
                    }
                    self.propose(at, verdict, NOT_STARTED_EXIT, out);
                }
            }
            Fact::RankConnected { attempt, rank, .. } if attempt == self.attempt => self.connected(at, rank),
            Fact::RankRaised { attempt, rank, note, data, .. } if attempt == self.attempt => {
                let fault_at = note.at;
                if let Some(state) = self.ranks.get_mut(&rank) {
                    state.end.detected_at.get_or_insert(at);
                    // A rank may raise again while it cleans up. The first exception is the cause.
                    if state.end.note.is_none() {
                        (state.end.note, state.end.data) = (Some(note), data);
                    }
                }
                self.raised(at, rank, fault_at, out);
            }
            Fact::RankEnding { attempt, rank, status, .. } if attempt == self.attempt => {
                if let Some(state) = self.ranks.get_mut(&rank) {
                    state.end.detected_at.get_or_insert(at);
                    state.ending_at.get_or_insert(at);
                }
                if !status.is_success() {
                    self.raised(at, rank, at, out);
                }
            }
            Fact::RankExited {
                attempt,
                rank,
                status,
                step,
                data,
                after_stop,
                stderr_tail,
                stdout_tail,
                stderr_times,
                stdout_times,
                ..
            } if attempt == self.attempt => {
                if let Some(state) = self.ranks.get_mut(&rank) {
                    state.end.detected_at.get_or_insert(at);
                    state.end.exit = Some((status, state.ending_at.unwrap_or(at)));
                    state.end.after_stop = after_stop;
                    state.end.step = step;
                    state.end.data = state.end.data.or(data);
                    (state.end.stderr_tail, state.end.stdout_tail) = (stderr_tail, stdout_tail);
                    (state.end.stderr_times, state.end.stdout_times) = (stderr_times, stdout_times);
                    // Without the client, its output is the only sign that it lost a peer.
                    state.end = std::mem::take(&mut state.end).with_last_words();
                }
                self.rank_exited(at, rank, status, out);
            }
            Fact::HostLost { attempt, host, ranks, named, how, .. } if attempt == self.attempt => {
                for rank in &ranks {
                    if let Some(state) = self.ranks.get_mut(rank) {
                        let (host, named, how) = (host.clone(), named.clone(), how.clone());
                        state.end.lost = Some(LostHost { host, named, how });
                    }
                }
            }
            Fact::WorldChanged { attempt, now, .. } if attempt == self.attempt => self.world_changed(now),
            Fact::RanksHung { attempt, hang, acts } if attempt == self.attempt => {
                self.ranks_hung(attempt, hang, acts, out);
            }
            Fact::HangPassed { attempt, .. } if attempt == self.attempt && self.phase == Phase::Running => {
                self.hang = None;
            }
            Fact::EvidenceTaken { attempt, file, groups, waits, summary, .. } if attempt == self.attempt => {
                let file = file.map(|file| format!("state of all ranks: {file}"));
                let found = summary.into_iter().chain(file);
                self.evidence_taken(at, &groups, waits, found, out);
            }
            Fact::AttemptEnded { attempt, waiting, .. } if attempt == self.attempt => {
                // A replayed journal does not have the time at which the wait ended.
                self.lost_peer_is_known(at, out);
                self.attempt_ended(at, waiting, out);
            }
            Fact::StopRequested { exit, .. } => self.stop_requested(at, exit, out),
            Fact::Observed(seen) => self.observed(at, &seen, out),
            Fact::OutOfMemoryKills { count } => {
                self.out_of_memory_kills = self.out_of_memory_kills.saturating_add(count);
            }
            // Facts of attempts that are over, and facts that only readers need.
            Fact::RankConnected { .. }
            | Fact::RankRaised { .. }
            | Fact::RankEnding { .. }
            | Fact::RankExited { .. }
            | Fact::HostLost { .. }
            | Fact::WorldChanged { .. }
            | Fact::AttemptEnded { .. }
            | Fact::RanksHung { .. }
            | Fact::HangPassed { .. }
            | Fact::EvidenceTaken { .. }
            | Fact::RankRefused { .. }
            | Fact::PagesUnavailable { .. }
            | Fact::RanksStepping { .. }
            | Fact::Progress { .. }
            | Fact::AgentFound { .. }
            | Fact::AgentLost { .. }
            | Fact::AgentStarted { .. }
            | Fact::AgentStopped
            | Fact::JobStarted(_)
            | Fact::LauncherLost { .. }
            | Fact::Xid(_)
            | Fact::Sxid(_)
            | Fact::KernelReport(_)
            | Fact::KernelLinesLeftOut { .. }
            | Fact::KernelLogGap { .. }
            | Fact::HostEvidenceReported { .. }
            | Fact::GpuDriverSilent { .. }
            | Fact::GpuDriverAnswered { .. }
            | Fact::JobEnded { .. } => {}
        }
    }

    fn attempt_started(&mut self, at: Mono, ranks: impl Iterator<Item = Rank>, out: &mut Vec<Output>) {
        self.ranks = ranks.map(|rank| (rank, RankState::default())).collect();
        self.watch.begin_attempt(self.attempt, self.ranks.keys().copied().collect());
        self.standing.clear();
        self.stepping = false;
        self.saved.1 = self.saved.0;
        self.attempt_began = at;
        self.lead = None;
        (self.hang, self.overdue, self.lost_peer, self.exhausted) = (None, None, None, None);
        self.waiting.clear();
        self.ledger.begin_attempt();
        self.with_incident(|incident| incident.started_at = Some(at));
        self.phase = Phase::Running;
        self.time_restart(at, out);
        if self.stop_requested.is_some() {
            self.stop(StopWhy::Requested, out);
        }
    }

    /// A rank has ended, and its state is recorded: a failure, the end of the job, or neither yet.
    fn rank_exited(&mut self, at: Mono, rank: Rank, status: ExitStatus, out: &mut Vec<Output>) {
        if !status.is_success() {
            self.raised(at, rank, at, out);
        } else if self.phase == Phase::Running
            && !self.asked.ended.any(&self.ranks, |_, state| state.end.exit.is_none())
        {
            self.ledger.enter(at, TimeCategory::Finishing);
            self.stop(StopWhy::Done, out);
        } else {
            self.lost_peer_is_known(at, out);
        }
    }

    fn ranks_hung(&mut self, attempt: Attempt, hang: Box<Hang>, acts: bool, out: &mut Vec<Output>) {
        if self.phase == Phase::Running && self.hang.is_none() {
            // If hangs are only reported, the user still wants to see what the ranks were doing.
            out.push(Output::Command(Command::TakeEvidence { attempt }));
            self.hang = acts.then(|| (hang, Vec::new()));
        }
    }

    fn evidence_taken(
        &mut self,
        at: Mono,
        groups: &[PlaceGroup],
        waits: Vec<Waits>,
        others: impl Iterator<Item = String>,
        out: &mut Vec<Output>,
    ) {
        let Some((hang, found)) = &mut self.hang else { return };
        waits.iter().for_each(|waits| weigh(hang, waits));
        refine(hang, groups);
        *found = waits.into_iter().map(|waits| waits.reported).collect();
        found.extend(groups.iter().map(PlaceGroup::to_string));
        found.extend(others);
        let since = hang.since;
        self.failure(at, since, out);
    }
}

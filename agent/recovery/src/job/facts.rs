//! What each fact of the journal changes in the job, and the steps of the ranks.

use super::attempt::{Course, LostPeer};
use super::findings::{FILE_SYSTEM_ANSWERS, FILE_SYSTEM_SILENT};
use super::ordered::Order;
use super::restart::Overdue;
use super::{Command, Job, Output, Phase, StopWhy};
use mainstay_checkpoint::advice;
use mainstay_diagnosis::diagnose;
use mainstay_diagnosis::root_rank::{LostHost, host_missing, start_failed};
use mainstay_hang::{Hang, PlaceGroup, refine, weigh};
use mainstay_model::entry::{Body, ExitStatus, Fact, StepDone};
use mainstay_model::hang::Waits;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::observation::Observation;
use mainstay_model::time::{Mono, Span};
use mainstay_progress::goodput::TimeCategory;

/// The exit status of a job whose ranks could not be started (`EX_SOFTWARE` of `sysexits.h`).
const NOT_STARTED_EXIT: i32 = 70;

/// Interval of the records of progress in the journal.
const PROGRESS_INTERVAL: Span = Span::seconds(10);

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
                    let incident = self.history.next();
                    let mut verdict = match missing.into_iter().next() {
                        Some(host) => host_missing(incident, attempt, host, &error, at),
                        None => start_failed(incident, attempt, &error, at),
                    };
                    if let Some(reported) = self.course.exhausted.take() {
                        diagnose::blame_the_limit(&mut verdict, &reported);
                    }
                    self.propose(at, verdict, None, NOT_STARTED_EXIT, out);
                }
            }
            Fact::RankConnected { attempt, rank, .. } if attempt == self.attempt => self.connected(at, rank),
            Fact::RankRaised { attempt, rank, note, data, .. } if attempt == self.attempt => {
                let fault_at = note.at;
                if let Some(state) = self.ranks.get_mut(rank) {
                    state.end.detected_at.get_or_insert(at);
                    // A rank may raise again while it cleans up. The first exception is the cause.
                    if state.end.note.is_none() {
                        (state.end.note, state.end.data) = (Some(note), data);
                    }
                }
                self.raised(at, rank, fault_at, out);
            }
            Fact::RankEnding { attempt, rank, status, .. } if attempt == self.attempt => {
                if let Some(state) = self.ranks.get_mut(rank) {
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
                if let Some(state) = self.ranks.get_mut(rank) {
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
                for rank in ranks {
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
                self.course.hang = None;
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
                let kills = &mut self.course.out_of_memory_kills;
                *kills = kills.saturating_add(count);
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
        self.ranks.start(ranks);
        self.findings.begin_attempt(self.attempt, self.ranks.list());
        self.saving.newest_before = self.saving.newest;
        let out_of_memory_kills = self.course.out_of_memory_kills;
        self.course = Course { out_of_memory_kills, ..Course::new(at) };
        self.waiting.ranks.clear();
        self.ledger.begin_attempt();
        let recovers = self.history.open().map(|incident| incident.started_at = Some(at)).is_some();
        self.phase = Phase::Running;
        if let Some(until) = self.restart.begin(at, recovers) {
            out.push(Output::Command(Command::Wake { at: until }));
        }
        if self.stop_requested.is_some() {
            self.stop(StopWhy::Requested, out);
        }
    }

    /// A rank has ended, and its state is recorded: a failure, the end of the job, or neither yet.
    fn rank_exited(&mut self, at: Mono, rank: Rank, status: ExitStatus, out: &mut Vec<Output>) {
        if !status.is_success() {
            self.raised(at, rank, at, out);
        } else if self.phase == Phase::Running && self.ranks.all_ended() {
            self.ledger.enter(at, TimeCategory::Finishing);
            self.stop(StopWhy::Done, out);
        } else {
            self.lost_peer_is_known(at, out);
        }
    }

    fn ranks_hung(&mut self, attempt: Attempt, hang: Box<Hang>, acts: bool, out: &mut Vec<Output>) {
        if self.phase == Phase::Running && self.course.hang.is_none() {
            // If hangs are only reported, the user still wants to see what the ranks were doing.
            out.push(Output::Command(Command::TakeEvidence { attempt }));
            self.course.hang = acts.then(|| (hang, Vec::new()));
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
        let Some((hang, found)) = &mut self.course.hang else { return };
        waits.iter().for_each(|waits| weigh(hang, waits));
        refine(hang, groups);
        *found = waits.into_iter().map(|waits| waits.reported).collect();
        found.extend(groups.iter().map(PlaceGroup::to_string));
        found.extend(others);
        let since = hang.since;
        self.failure(at, since, out);
    }

    /// A rank raised or failed: the others are stopped, unless a lost peer may still be ending.
    fn raised(&mut self, at: Mono, rank: Rank, fault_at: Mono, out: &mut Vec<Output>) {
        if self.phase != Phase::Running || !self.ranks.awaits_a_peers_end(rank) {
            return self.failure(at, fault_at, out);
        }
        if self.course.lost_peer.is_none() {
            let lost = LostPeer::new(at, fault_at);
            self.course.lost_peer = Some(lost);
            out.push(Output::Command(Command::Wake { at: lost.until }));
        }
    }

    /// Everything about a lost peer has been seen.
    fn lost_peer_is_known(&mut self, at: Mono, out: &mut Vec<Output>) {
        if let Some(LostPeer { since, .. }) = self.course.lost_peer {
            self.failure(at, since, out);
        }
    }

    /// It is time to stop waiting for a lost peer, or for the first step after a restart.
    pub(super) fn wake_while_running(&mut self, at: Mono, out: &mut Vec<Output>) {
        if let Some(LostPeer { since, until }) = self.course.lost_peer {
            if at < until {
                out.push(Output::Command(Command::Wake { at: until }));
            } else {
                self.failure(at, since, out);
            }
            return;
        }
        match self.restart.until {
            Some((until, _)) if at < until => out.push(Output::Command(Command::Wake { at: until })),
            // A hang has its own evidence and is judged by that.
            Some((_, overdue)) if !self.course.is_stepping() && self.course.hang.is_none() => {
                out.push(Output::Record(Body::Fact(overdue.observed())));
                self.give_up(at, overdue, out);
            }
            Some(_) | None => {}
        }
    }

    fn give_up(&mut self, at: Mono, overdue: Overdue, out: &mut Vec<Output>) {
        self.restart.until = None;
        self.restart.overdue = Some(overdue);
        self.failure(at, at, out);
    }

    /// Handles orders of people, and what else the journal records as an observation.
    fn observed(&mut self, at: Mono, seen: &Observation, out: &mut Vec<Output>) {
        match Order::from_observation(seen) {
            Some(Order::Restart) => return self.order_restart(at, out),
            Some(Order::Save(exit)) => return self.order_save(exit, out),
            None => {}
        }
        if matches!(seen.event.as_str(), FILE_SYSTEM_SILENT | FILE_SYSTEM_ANSWERS) {
            let step = self.ledger.reached().unwrap_or(0);
            self.findings.file_system_observed(seen, self.attempt, step, out);
        }
        if seen.event == EXHAUSTED {
            self.course.exhausted = Some(seen.detail.clone());
        }
        if self.phase == Phase::Running
            && let Some(overdue) = self.restart.recorded(seen)
        {
            self.give_up(at, overdue, out);
        }
    }

    /// Restarts all ranks, if they run and nothing else is in progress.
    fn order_restart(&mut self, at: Mono, out: &mut Vec<Output>) {
        if self.phase == Phase::Running && self.course.hang.is_none() {
            self.ledger.enter(at, TimeCategory::Stopping);
            self.stop(StopWhy::Ordered, out);
        }
    }

    /// Asks the ranks to save and end, once in each attempt: a scheduler signals each host. Nothing stops ranks that
    /// do not end.
    fn order_save(&mut self, exit: i32, out: &mut Vec<Output>) {
        let is_asked = self.save_ordered.is_some_and(|(_, attempt)| attempt == self.attempt);
        if self.phase == Phase::Running && !is_asked {
            let exit = self.save_ordered.map_or(exit, |(first, _)| first);
            self.save_ordered = Some((exit, self.attempt));
            out.push(Output::Command(Command::ask_to_save(self.attempt)));
        }
    }

    fn connected(&mut self, at: Mono, rank: Rank) {
        self.ranks.connect(rank);
        if self.ledger.state() == TimeCategory::Starting {
            self.ledger.enter(at, TimeCategory::Initialising);
        }
        if self.ranks.all_connected()
            && let Some(incident) = self.history.open()
        {
            incident.connected_at.get_or_insert(at);
        }
    }

    pub(super) fn steps(&mut self, at: Mono, rank: Rank, done: &[StepDone], out: &mut Vec<Output>) {
        let Some(state) = self.ranks.get_mut(rank) else { return };
        let Some(newest) = done.last() else { return };
        state.first.get_or_insert(done[0]);
        state.newest = Some(*newest);
        self.last_step = self.last_step.max(Some(newest.end));
        // The steps of one rank count for the job, the same rank for the whole attempt. Otherwise some would count
        // twice.
        if *self.course.lead.get_or_insert(rank) == rank {
            if matches!(self.ledger.state(), TimeCategory::Starting | TimeCategory::Initialising) {
                let first = done[0];
                let began = if first.first {
                    first.end
                } else {
                    // A rank that stayed in its process.
                    first.start.after(Span(first.restore_ns)).min(first.end)
                };
                self.ledger.enter(began, TimeCategory::Training);
            }
            for step in done {
                self.ledger.step(step);
                if step.checkpoint_ns > 0 {
                    self.saving.saved(step.end);
                }
            }
        }
        self.announce_progress(at, out);
        let found = self.findings.watch.steps(rank, done);
        self.findings.report(found, out);
    }

    /// Records once per attempt that all ranks are stepping, and from then on their progress from time to time.
    fn announce_progress(&mut self, at: Mono, out: &mut Vec<Output>) {
        if self.course.recorded_at.is_some_and(|last| at.since(last) < PROGRESS_INTERVAL) {
            return;
        }
        let Some(stepped) = self.ranks.steps() else { return };
        let attempt = self.attempt;
        if self.course.recorded_at.replace(at).is_none() {
            self.saving.begin(at);
            // Pages are read less often than quick steps complete: use the first step, not the newest.
            let step = stepped.iter().map(|(first, _)| first.step).max().unwrap_or(0);
            let last = stepped.iter().map(|(first, _)| first.end).max().unwrap_or(at);
            self.restart.longest = self.restart.longest.max(Some(last.since(self.course.began)));
            let counted = stepped.iter().any(|(first, _)| first.counted);
            let lead = self.course.lead.and_then(|lead| self.ranks.get_mut(lead)?.first);
            let restoring = Span(lead.map_or(0, |first| first.restore_ns));
            out.push(Output::Record(Body::Fact(Fact::RanksStepping { attempt, step, counted, restoring })));
            let outcome = self.history.outcome(last, attempt, step, counted, &self.ledger);
            out.extend(outcome.map(|outcome| Output::Record(Body::Outcome(outcome))));
        } else {
            let step = stepped.iter().map(|(_, newest)| newest.step).min().unwrap_or(0);
            let loss = stepped.iter().find_map(|(_, newest)| newest.loss);
            let (saving, saves) = self.ledger.take_saved();
            out.push(Output::Record(Body::Fact(Fact::Progress { attempt, step, loss, saving, saves })));
            let advised = advice::advice_for(&self.ledger.accounting(at), self.history.count());
            out.extend(self.saving.advise(advised).map(|fact| Output::Record(Body::Fact(fact))));
        }
    }
}

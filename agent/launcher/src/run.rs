//! The loop of the launcher.

use std::collections::VecDeque;
use std::time::Duration;

use mainstay_model::entry::Fact;
use mainstay_model::id::{JobId, Pid};
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::in_process::Word;
use mainstay_recovery::job::{Job, Summary};
use mainstay_recovery::policy;
use tokio::sync::mpsc;

use crate::agent_link::AgentLink;
use crate::agent_link::stream::LinkEvent;
use crate::checkpoints::Checkpoints;
use crate::checkpoints::moving::next_moved;
use crate::checkpoints::replicas::next_news;
use crate::checkpoints::sealing::next_stage;
use crate::drill::Drill;
use crate::group::Group;
use crate::hang::Evidence;
use crate::hang::Hang;
use crate::journal::Journal;
use crate::order::Ordered;
use crate::output::Output;
use crate::output::Terminal;
use crate::policy::Policy;
use crate::policy::in_job;
use crate::ranks::guardian::Guardian;
use crate::ranks::round_server::RoundServer;
use crate::ranks::spec::RankSpec;
use crate::ranks::stop::{Stop, sweep};
use crate::ranks::{Ranks, Stopping};
use crate::settings::Settings;
use mainstay_recovery::protocol::{Command, Event};
use mainstay_sys::clock;
use mainstay_sys::inotify::Watcher;

/// Pages are read this often even if nothing rings.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long an agent may take to answer with its evidence before the launcher decides alone.
pub(crate) const EVIDENCE_TIMEOUT: Duration = Duration::from_millis(250);

/// The channels to what runs outside the loop.
#[derive(Debug)]
pub struct Outside {
    /// From the agent's link.
    pub link_events: mpsc::Receiver<LinkEvent>,
    /// Whether an agent's socket existed at the start.
    pub agent_expected: bool,
    /// From the host's sensing.
    pub host: mpsc::Receiver<SensorReport>,
    /// Signals that ask the launcher to stop.
    pub signals: mpsc::Receiver<i32>,
    /// Signals that ask for a save.
    pub save_signals: mpsc::Receiver<i32>,
    /// Orders of people.
    pub orders: mpsc::Receiver<Ordered>,
}

/// A rank's process ended.
pub(crate) struct Ended {
    pub(crate) pid: Pid,
    pub(crate) at: Mono,
}

/// The launcher of one job.
#[derive(Debug)]
pub struct Launcher {
    pub(crate) id: JobId,
    pub(crate) settings: Settings,
    pub(crate) rank_spec: RankSpec,
    pub(crate) group: Group,
    /// Commands to carry out, in order.
    pub(crate) tasks: VecDeque<Command>,
    pub(crate) ranks: Ranks,
    pub(crate) stopping: Stopping,
    pub(crate) hang: Hang,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) journal: Journal,
    pub(crate) output: Output,
    pub(crate) agent: AgentLink,
    pub(crate) drill: Drill,
    pub(crate) looks: u32,
    /// When the job wants to look again.
    pub(crate) wake_at: Option<tokio::time::Instant>,
    pub(crate) exit: Option<i32>,
    /// The user's own policy, where this launcher decides.
    pub(crate) policy: Option<Policy>,
}

/// How a launcher's part in a job ended.
#[derive(Debug)]
pub struct JobEnd {
    /// The exit status.
    pub exit: i32,
    /// What happened.
    pub summary: Summary,
    /// For final messages.
    pub terminal: Terminal,
    /// Whether the job goes on without this launcher, and a new one on this host may take part.
    pub may_return: bool,
}

impl Launcher {
    /// Runs the job to its end, or to the end of this launcher's part in it.
    pub async fn run(mut self, mut outside: Outside) -> JobEnd {
        let (ended_sender, mut ended) = mpsc::unbounded_channel();
        let mut looks = tokio::time::interval(POLL_INTERVAL);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Each publication copies the state of all ranks of the job, so entries that arrive together are published together.
        self.journal.snapshots.hold();
        loop {
            self.carry_out(&ended_sender).await;
            if let Some(exit) = self.exit {
                return self.end(exit, outside).await;
            }
            let force_at = self.stopping.stop.as_ref().map(|stop| from_now(stop.force_at));
            let report_at = self.stopping.stop.as_ref().and_then(|stop| stop.report_at).map(from_now);
            let spared_at = self.stopping.stop.as_ref().and_then(Stop::wake_at).map(from_now);
            let (ruling_until, wake_at) = (self.agent.ruling_until, self.wake_at);
            // In order of importance when several are ready.
            tokio::select! {
                biased;
                Some(end) = ended.recv() => self.rank_ended(&end).await,
                Some(pid) = self.ranks.endings.1.recv() => self.rank_ending(pid),
                Some(signal) = outside.signals.recv() => self.asked_to_stop(signal),
                Some(signal) = outside.save_signals.recv() => self.save_requested_by(signal),
                (pid, word) = next_word(self.ranks.round_server.as_mut()) => self.received(pid, word).await,
                Some(event) = outside.link_events.recv() => self.link(event),
                () = until(ruling_until) => self.rule(None),
                () = until(wake_at) => {
                    self.wake_at = None;
                    self.step(clock::mono(), Event::Wake);
                }
                stage = next_stage(&mut self.checkpoints.starting) => self.stage(stage, &ended_sender).await,
                update = next_news(self.checkpoints.replicas.as_mut()) => self.checkpoints_news(update),
                moved = next_moved(self.checkpoints.moving.as_mut()) => self.moved(moved),
                () = until(report_at) => self.ask_to_end(),
                () = until(spared_at) => self.look_at_spared(),
                () = until(force_at) => {
                    self.force();
                    self.end_attempt_if_over().await;
                }
                event = self.group.next() => self.others_sent(event),
                taken = next_evidence(&mut self.hang.evidence) => self.evidence_taken(taken),
                Some(report) = outside.host.recv() => self.host(report),
                Some(ordered) = outside.orders.recv() => self.ordered(ordered),
                update = self.ranks.warm.update() => {
                    if let Some(fact) = self.ranks.warm.received(update) {
                        self.fact(fact);
                    }
                }
                _ = looks.tick() => self.regular_look(),
                news = in_job::next_news(self.policy.as_mut()) => self.policy_news(news),
                () = std::future::ready(()), if self.journal.snapshots.is_due() => self.journal.snapshots.show_due(),
                () = between_parts(), if self.agent.has.is_some() => {
                    self.agent.catch_up(&mut self.journal.snapshots, self.rank_spec.own_ranks());
                }
                // Last: ranks may ring without a pause.
                Ok(_) = next_ring(self.ranks.watcher.as_ref()) => self.look(),
            }
        }
    }

    async fn carry_out(&mut self, ended: &mpsc::UnboundedSender<Ended>) {
        while let Some(command) = self.tasks.pop_front() {
            self.obey(command, ended).await;
        }
    }

    /// Processes below the launcher that do not belong to the ranks: the guardian, a coordination store, and those of the
    /// user's policy.
    pub(crate) fn helpers(&self) -> Vec<Pid> {
        let mut helpers = self.policy_processes();
        helpers.extend(self.ranks.guardian.as_ref().map(Guardian::pid));
        helpers.extend(self.group.store_process());
        helpers
    }

    /// The policy of this job.
    pub(crate) fn policy(&self) -> policy::Settings {
        self.settings.policy_of_job(&self.rank_spec.job)
    }

    /// Passes to a job what earlier runs learned of it.
    pub(crate) fn recall(&self, job: &mut Job) {
        if let Some(learned) = self.journal.memory.as_ref().and_then(|(memory, _)| memory.read()) {
            job.recall(&learned);
        }
    }

    async fn end(mut self, exit: i32, mut outside: Outside) -> JobEnd {
        self.journal.snapshots.release();
        self.finish_moving().await;
        // What it keeps for others is in the pool, which is removed.
        self.checkpoints.replicas = None;
        if outside.agent_expected && self.agent.orders.is_none() {
            // A job that ended at once must reach the agent all the same.
            let found = tokio::time::timeout(EVIDENCE_TIMEOUT, outside.link_events.recv()).await;
            if let Ok(Some(event)) = found {
                self.link(event);
            }
        }
        while let Ok(event) = outside.link_events.try_recv() {
            self.link(event);
        }
        self.sample();
        self.record_end(exit);
        self.journal.snapshots.sync();
        if self.journal.snapshots.unwritten() > 0 {
            self.output.terminal.print(format!(
                "{} entries are not in the journal: its file system in {} does not answer",
                self.journal.snapshots.unwritten(),
                self.rank_spec.run_dir.display()
            ));
        }
        self.remember();
        self.announce_end().await;
        let summary = self.group.summary(clock::mono(), exit).unwrap_or_else(|| self.recount(exit));
        self.end_policy().await;
        self.ranks.warm.end();
        // Its template may have just forked: no process of the job may outlive it.
        let helpers = self.helpers();
        sweep(None, || helpers.clone(), Span::default()).await;
        if let Some(pool_owner) = self.checkpoints.pool_owner.take() {
            // The guardian stays until this is done: if this launcher is killed meanwhile, the guardian completes it.
            let messages = tokio::task::spawn_blocking(move || pool_owner.finish()).await.unwrap_or_default();
            messages.into_iter().for_each(|line| self.output.terminal.print(line));
        }
        let is_stopped = self.stopping.asked_by.is_some() || self.stopping.leave_within.is_some();
        let may_return = self.group.may_return() && !is_stopped;
        // Last: until then messages to the leader are delivered.
        self.group.leave(exit, &summary.reason, self.stopping.asked_by.is_some()).await;
        if let Some(guardian) = self.ranks.guardian.take() {
            guardian.dismiss();
        }
        JobEnd { exit, summary, terminal: self.output.terminal, may_return }
    }
}

async fn next_ring(watcher: Option<&Watcher>) -> std::io::Result<()> {
    match watcher {
        Some(watcher) => watcher.next().await.map(drop),
        None => std::future::pending().await,
    }
}

async fn next_word(round_server: Option<&mut RoundServer>) -> (Pid, Word) {
    match round_server {
        Some(round_server) => round_server.next().await,
        None => std::future::pending().await,
    }
}

async fn next_evidence(evidence: &mut Option<Evidence>) -> Fact {
    match evidence {
        Some(evidence) => evidence.taken().await,
        None => std::future::pending().await,
    }
}

/// Parts of the journal are sent to the agent one after the other; all other work runs between two parts.
async fn between_parts() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

async fn until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Converts a point of this program's clock to one of the runtime's.
pub(crate) fn from_now(at: Mono) -> tokio::time::Instant {
    tokio::time::Instant::now() + Duration::from_nanos(at.since(clock::mono()).0)
}

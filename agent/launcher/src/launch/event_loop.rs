//! The loop of the launcher.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_health::host::contention::SlowdownHints;
use mainstay_model::entry::Fact;
use mainstay_model::id::{Attempt, Incident, JobId, Pid, Rank};
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::FaultDomain;
use mainstay_recovery::in_process::{Round, Word};
use mainstay_recovery::job::{Job, Summary};
use mainstay_recovery::policy;
use mainstay_tier::pool::PoolOwner;
use tokio::sync::mpsc;

use crate::act::guardian::Guardian;
use crate::act::output::Terminal;
use crate::act::policy::Policy;
use crate::act::port::HeldPort;
use crate::act::rank_processes::RankProcess;
use crate::act::rank_spec::RankSpec;
use crate::act::round_server::RoundServer;
use crate::act::stop::{Stop, sweep};
use crate::launch::drill::Injected;
use crate::launch::group::Group;
use crate::launch::hang::{Evidence, Judge};
use crate::launch::move_memory::{Moving, next_moved};
use crate::launch::order::Ordered;
use crate::launch::rank_output::RankOutput;
use crate::launch::replicas::{Replicas, next_news};
use crate::launch::sealing::{Sealing, Starting, next_stage};
use crate::launch::{POLL_INTERVAL, Settings, Warm, user_policy};
use crate::launcher_link::agent::{LinkEvent, LinkOrder};
use mainstay_journal::state::StateWriter;
use mainstay_journal::store::learned::Memory;
use mainstay_recovery::protocol::{Command, Event};
use mainstay_sensors::source::nvrx::Monitor;
use mainstay_sensors::source::oom::OomKills;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sensors::source::process_limit::ProcessLimits;
use mainstay_sys::cgroup::Cgroup;
use mainstay_sys::clock;
use mainstay_sys::inotify::Watcher;

/// How long an agent may take to answer with its evidence before the launcher decides alone.
pub(super) const EVIDENCE_TIMEOUT: Duration = Duration::from_millis(250);

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
pub(super) struct Ended {
    pub(super) pid: Pid,
    pub(super) at: Mono,
}

/// The launcher of one job.
#[derive(Debug)]
pub struct Launcher {
    pub(super) id: JobId,
    pub(super) settings: Settings,
    pub(super) rank_spec: RankSpec,
    pub(super) group: Group,
    pub(super) hangs: Judge,
    /// Where what is learned of the job is kept, and from how many runs so far; none if it is not kept.
    pub(super) memory: Option<(Memory, u32)>,
    pub(super) tasks: VecDeque<Command>,
    pub(super) snapshots: StateWriter,
    pub(super) terminal: Terminal,
    /// The verdict that the terminal showed last: its incident, headline and domain.
    pub(super) shown: Option<(Incident, String, FaultDomain)>,
    /// The attempt whose start the terminal reported last.
    pub(super) outcome_shown: Option<Attempt>,
    pub(super) guardian: Option<Guardian>,
    /// Keeps the checkpoints that ranks copy to memory.
    pub(super) pool_owner: Option<PoolOwner>,
    pub(super) cgroup: Option<Cgroup>,
    pub(super) watcher: Option<Watcher>,
    pub(super) warm: Warm,
    pub(super) attempt: Attempt,
    pub(super) ranks: Vec<RankProcess>,
    /// The pages of ranks that have one.
    pub(super) pages: BTreeMap<Rank, PageReader>,
    /// The channel on which lifelines report that a rank's process is ending.
    pub(super) endings: (mpsc::UnboundedSender<Pid>, mpsc::UnboundedReceiver<Pid>),
    /// The sockets of ranks that may connect to a rank monitor of NVRx.
    pub(super) monitors: BTreeMap<Rank, Monitor>,
    pub(super) stop: Option<Stop>,
    /// Where ranks that can stay in their processes agree on rounds; none without a directory for it.
    pub(super) round_server: Option<RoundServer>,
    /// Where ranks receive faults to inject, in a job that opted in.
    pub(super) drill: Option<RoundServer>,
    /// Faults that wait for their step.
    pub(super) drills: Vec<(Injected, Rank)>,
    /// The round of the current attempt.
    pub(super) round: Round,
    /// The step after which ranks that are stopped are asked to save, if a leader chose it for all hosts.
    pub(super) save_after: Option<u64>,
    /// The signal that asked the launcher to stop, if one has, and when; the ranks get the same.
    pub(super) asked_by: Option<(i32, Mono)>,
    /// The signal that asked for a save, and the attempt for which this launcher has passed it on.
    pub(super) save_by: Option<(i32, Option<Attempt>)>,
    /// The attempt whose ranks were asked to save, and the step after which they do.
    pub(super) asked_to_save: Option<(Attempt, Option<u64>)>,
    /// How long the ranks have to leave a machine that is taken away, once they were asked to.
    pub(super) leave_within: Option<Span>,
    /// Held until the next attempt takes another port.
    pub(super) port: Option<HeldPort>,
    /// The channel to the agent, while there is one.
    pub(super) agent: Option<mpsc::Sender<LinkOrder>>,
    /// The last entry that the agent has, while it is being sent what it lacks.
    pub(super) agent_has: Option<u64>,
    pub(super) ruling_until: Option<tokio::time::Instant>,
    /// When the job wants to look again.
    pub(super) wake_at: Option<tokio::time::Instant>,
    /// Processes of the previous attempt that did not die of SIGKILL.
    pub(super) undying: Vec<Pid>,
    pub(super) evidence: Option<Evidence>,
    pub(super) looks: u32,
    /// How long steps of a rank took since the last sample.
    pub(super) step_times: Vec<StepTime>,
    pub(super) oom_kills: OomKills,
    pub(super) process_limits: ProcessLimits,
    /// The attempt in which a silent file system of the checkpoints was reported.
    pub(super) silence_reported: Option<Attempt>,
    /// What ranks write, and when.
    pub(super) spoken: RankOutput,
    /// What was last seen here without an agent and may explain slow ranks.
    pub(super) rank_context: SlowdownHints,
    pub(super) exit: Option<i32>,
    /// The trainer's own checkpoints; none where none are watched.
    pub(super) sealing: Option<Sealing>,
    /// The start that waits for a decision about them.
    pub(super) starting: Option<Starting>,
    /// Copies of checkpoints on the job's other hosts; none for a job of one host.
    pub(super) replicas: Option<Replicas>,
    /// The user's own policy, where this launcher decides.
    pub(super) policy: Option<Policy>,
    /// The memory for checkpoints, while this host gets other ranks.
    pub(super) moving: Option<Moving>,
}

impl Launcher {
    /// Runs the job to its end. Returns the exit status, the summary, and the terminal for final messages.
    pub async fn run(mut self, mut outside: Outside) -> (i32, Summary, Terminal) {
        let (ended_sender, mut ended) = mpsc::unbounded_channel();
        let mut looks = tokio::time::interval(POLL_INTERVAL);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Each publication copies the state of all ranks of the job, so entries that arrive together are published together.
        self.snapshots.hold();
        loop {
            self.carry_out(&ended_sender).await;
            if let Some(exit) = self.exit {
                return self.end(exit, outside).await;
            }
            let force_at = self.stop.as_ref().map(|stop| from_now(stop.force_at));
            let report_at = self.stop.as_ref().and_then(|stop| stop.report_at).map(from_now);
            let spared_at = self.stop.as_ref().and_then(Stop::wake_at).map(from_now);
            let (ruling_until, wake_at) = (self.ruling_until, self.wake_at);
            // In order of importance when several are ready.
            tokio::select! {
                biased;
                Some(end) = ended.recv() => self.rank_ended(&end).await,
                Some(pid) = self.endings.1.recv() => self.rank_ending(pid),
                Some(signal) = outside.signals.recv() => self.asked_to_stop(signal),
                Some(signal) = outside.save_signals.recv() => self.save_requested_by(signal),
                (pid, word) = next_word(self.round_server.as_mut()) => self.received(pid, word).await,
                Some(event) = outside.link_events.recv() => self.link(event),
                () = until(ruling_until) => self.rule(None),
                () = until(wake_at) => {
                    self.wake_at = None;
                    self.step(clock::mono(), Event::Wake);
                }
                stage = next_stage(&mut self.starting) => self.stage(stage, &ended_sender).await,
                update = next_news(self.replicas.as_mut()) => self.checkpoints_news(update),
                moved = next_moved(self.moving.as_mut()) => self.moved(moved),
                () = until(report_at) => self.ask_to_end(),
                () = until(spared_at) => self.look_at_spared(),
                () = until(force_at) => {
                    self.force();
                    self.end_attempt_if_over().await;
                }
                event = self.group.next() => self.others_sent(event),
                taken = next_evidence(&mut self.evidence) => self.evidence_taken(taken),
                Some(report) = outside.host.recv() => self.host(report),
                Some(ordered) = outside.orders.recv() => self.ordered(ordered),
                update = self.warm.update() => {
                    if let Some(fact) = self.warm.received(update) {
                        self.fact(fact);
                    }
                }
                _ = looks.tick() => self.regular_look(),
                news = user_policy::next_news(self.policy.as_mut()) => self.policy_news(news),
                () = std::future::ready(()), if self.snapshots.is_due() => self.snapshots.show_due(),
                () = between_parts(), if self.agent_has.is_some() => self.catch_up(),
                // Last: ranks may ring without a pause.
                Ok(_) = next_ring(self.watcher.as_ref()) => self.look(),
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
    pub(super) fn helpers(&self) -> Vec<Pid> {
        let mut helpers = self.policy_processes();
        helpers.extend(self.guardian.as_ref().map(Guardian::pid));
        helpers.extend(self.group.store_process());
        helpers
    }

    /// The policy of this job.
    pub(super) fn policy(&self) -> policy::Settings {
        self.settings.policy_of_job(&self.rank_spec.job)
    }

    /// Passes to a job what earlier runs learned of it.
    pub(super) fn recall(&self, job: &mut Job) {
        if let Some(learned) = self.memory.as_ref().and_then(|(memory, _)| memory.read()) {
            job.recall(&learned);
        }
    }

    async fn end(mut self, exit: i32, mut outside: Outside) -> (i32, Summary, Terminal) {
        self.snapshots.release();
        self.finish_moving().await;
        // What it keeps for others is in the pool, which is removed.
        self.replicas = None;
        if outside.agent_expected && self.agent.is_none() {
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
        self.snapshots.sync();
        if self.snapshots.unwritten() > 0 {
            self.terminal.print(format!(
                "{} entries are not in the journal: its file system in {} does not answer",
                self.snapshots.unwritten(),
                self.rank_spec.run_dir.display()
            ));
        }
        self.remember();
        self.announce_end().await;
        let summary = self.group.summary(clock::mono(), exit).unwrap_or_else(|| self.recount(exit));
        self.end_policy().await;
        self.warm.end();
        // Its template may have just forked: no process of the job may outlive it.
        let helpers = self.helpers();
        sweep(None, || helpers.clone(), Span::default()).await;
        if let Some(pool_owner) = self.pool_owner.take() {
            // The guardian stays until this is done: if this launcher is killed meanwhile, the guardian completes it.
            let messages = tokio::task::spawn_blocking(move || pool_owner.finish()).await.unwrap_or_default();
            messages.into_iter().for_each(|line| self.terminal.print(line));
        }
        // Last: until then messages to the leader are delivered.
        self.group.leave(exit, &summary.reason, self.asked_by.is_some()).await;
        if let Some(guardian) = self.guardian.take() {
            guardian.dismiss();
        }
        (exit, summary, self.terminal)
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
pub(super) fn from_now(at: Mono) -> tokio::time::Instant {
    tokio::time::Instant::now() + Duration::from_nanos(at.since(clock::mono()).0)
}

//! The shell of the agent: one task owns the agent's state. It receives launchers' entries, samples and
//! questions and the host's reports; it publishes the snapshots.

mod allowance;
mod calls;
pub mod config;
mod evidence;
mod gpus;
mod hardware;
pub mod hook;
mod host;
mod inputs;
mod job_entries;
mod late;
mod launchers;
mod owners;
mod resets;

use std::collections::BTreeMap;
use std::sync::Arc;

use mainstay_diagnosis::repeats::Repeats;
use mainstay_health::host::cloud::leave::Leave;
use mainstay_model::entry::{Body, Fact};
use mainstay_model::id::{JobId, Pid};
use mainstay_model::kernel::LogCursor;
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Mono;
use mainstay_model::verdict::Verdict;
use mainstay_tier::peer::Service;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub use calls::{CALLS_COMPONENT, Called, CalledBy};
pub use gpus::GpuLook;
pub use hardware::{Hardware, LogReport};
pub use inputs::{Attached, Hello, Input, NoSuchComponent, Session, ToLauncher};

use allowance::Allowance;
use evidence::AnsweredFailure;
use gpus::Gpus;
use launchers::Launcher;
use resets::Resets;

use hook::Hooks;
use mainstay_journal::state::StateWriter;
use mainstay_journal::store::sync_thread::Forcing;
use mainstay_sys::clock;

/// Inputs that are processed before the loop checks the clock again.
const MAX_INPUTS_PER_TURN: usize = 64;

/// Inputs of callers that are processed before the loop checks the reports of the agent's own sensors.
const OF_CALLERS_AT_ONCE: usize = 16;

/// How often the journal is synced to disk.
const SYNC_EVERY: std::time::Duration = std::time::Duration::from_secs(1);

/// The GPUs' driver on the roster of sensors.
pub const DEVICES: &str = "GPUs";

/// The kernel log on the roster of sensors.
pub const KERNEL_LOG: &str = "kernel log";

/// The agent's state.
#[derive(Debug)]
pub struct Node {
    snapshots: StateWriter,
    launchers: BTreeMap<JobId, Launcher>,
    sessions: u64,
    hardware: Hardware,
    gpus: Gpus,
    resets: Resets,
    hooks: Hooks,
    repeats: Repeats,
    calls: Allowance,
    /// What the launchers of each user may put into the journal, in bytes.
    job_entries: Allowance,
    /// Agents of other hosts, with which failures are exchanged.
    peers: Option<Arc<Service>>,
    /// The notice that the machine will be taken away, until it is over: launchers that attach later receive it
    /// too.
    leave: Option<(String, Leave)>,
    /// Failures that wait for a reading of the GPUs.
    waiting: Vec<(Session, Verdict)>,
    /// Recent failures with the evidence that was sent for each.
    answered: Vec<AnsweredFailure>,
    /// For work that runs next to the loop.
    own_inputs: mpsc::Sender<Input>,
    /// Stores the position in the kernel log once everything read is on the disk.
    forcing: Forcing<Option<LogCursor>>,
}

/// What the journal contains about jobs before this start, and the agents that receive it.
#[derive(Debug, Default)]
pub struct Before {
    /// The newest entry of a launcher in it, by job.
    pub origins: BTreeMap<JobId, u64>,
    /// How jobs failed.
    pub repeats: Repeats,
    /// When the agent itself last decided to reset GPUs.
    pub resets: BTreeMap<PciAddress, Mono>,
    /// Agents of other hosts, which receive failures.
    pub peers: Option<Arc<Service>>,
}

impl Node {
    /// The node with its snapshots, with the contents of its journal.
    pub fn new(
        snapshots: StateWriter,
        before: Before,
        hardware: Hardware,
        look: GpuLook,
        hooks: Hooks,
        own_inputs: mpsc::Sender<Input>,
        forcing: Forcing<Option<LogCursor>>,
    ) -> Node {
        let Before { origins, repeats, resets, peers } = before;
        let journal_bytes = snapshots.journal_bytes();
        let launchers = snapshots.view().jobs.iter().map(|(job, view)| {
            let have_seq = origins.get(job).copied().unwrap_or(0);
            (job.clone(), Launcher::of_journal(view, have_seq))
        });
        Node {
            launchers: launchers.collect(),
            snapshots,
            sessions: 0,
            hardware,
            gpus: Gpus::new(look),
            resets: Resets::new(resets),
            hooks,
            repeats,
            calls: calls::allowance(),
            job_entries: job_entries::allowance(journal_bytes),
            peers,
            leave: None,
            waiting: Vec::new(),
            answered: Vec::new(),
            own_inputs,
            forcing,
        }
    }

    /// Runs until asked to stop. `inputs` are reports of the agent's own parts and what cannot wait; `callers` are
    /// messages of launchers and other callers, in any number.
    pub async fn run(
        mut self,
        mut inputs: mpsc::Receiver<Input>,
        mut callers: mpsc::Receiver<Input>,
        alive: impl Fn(),
        stop: CancellationToken,
    ) {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let pid = Pid(i32::try_from(std::process::id()).unwrap_or(0));
        self.record(None, Fact::AgentStarted { version, pid });
        self.find_jobs_again();
        self.report_failures_to_peers();
        let mut sync = tokio::time::interval(SYNC_EVERY);
        // A late tick is not made up for at once: messages are processed between two ticks.
        sync.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut waiting, mut response) =
            (Vec::with_capacity(MAX_INPUTS_PER_TURN), Vec::with_capacity(OF_CALLERS_AT_ONCE));
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                // Before messages: with any number of them there is a tick every second. The watchdog is fed from
                // here: it guards the loop, not a timer.
                _ = sync.tick() => {
                    self.report_events();
                    self.look_at_the_clock();
                    self.send_rank_context();
                    self.report_late_evidence();
                    self.forget_launchers();
                    self.sync();
                    alive();
                }
                // Before messages of callers: no sensor and no new launcher waits behind a flood of entries.
                count = inputs.recv_many(&mut waiting, MAX_INPUTS_PER_TURN) => self.step_all(&mut waiting, count),
                count = callers.recv_many(&mut response, OF_CALLERS_AT_ONCE) => self.step_all(&mut response, count),
            }
        }
        self.record(None, Fact::AgentStopped);
        self.end_syncing();
    }

    /// Syncs the journal to disk, unless the previous sync is still in progress.
    fn sync(&mut self) {
        if let Some(forced) = self.forcing.done() {
            self.snapshots.forced(forced);
        }
        if !self.forcing.is_busy()
            && let Some(unforced) = self.snapshots.unforced()
        {
            self.forcing.begin(unforced, self.hardware.cursor());
        }
    }

    /// The last sync: waits for it.
    fn end_syncing(mut self) {
        if let Some(forced) = self.forcing.done() {
            self.snapshots.forced(forced);
        }
        if let Some(unforced) = self.snapshots.unforced() {
            self.forcing.begin(unforced, self.hardware.cursor());
        }
        if let Some(forced) = self.forcing.finish() {
            self.snapshots.forced(forced);
        }
    }

    /// Processes queued inputs in order. Reports of launchers are published together: published one by one, a
    /// launcher with many reports would cause a copy of the whole snapshot for each.
    fn step_all(&mut self, waiting: &mut Vec<Input>, count: usize) {
        if count == 0 {
            return;
        }
        for input in waiting.drain(..) {
            match input {
                Input::Entry(..) | Input::Beats(..) => self.snapshots.hold(),
                _ => self.snapshots.release(),
            }
            self.step(input);
        }
        self.snapshots.release();
    }

    fn step(&mut self, input: Input) {
        match input {
            Input::Attach { hello, orders, answer } => {
                // The caller may have gone in the meantime; its session then ends by itself.
                let _ = answer.send(self.attach(hello, orders));
            }
            Input::Entry(session, entry) => self.entry(&session, *entry),
            Input::Beats(session, attempt, beats) => {
                if self.is_current(&session) {
                    for (rank, beat) in beats {
                        self.snapshots.sample(&session.job, attempt, rank, beat);
                    }
                    self.snapshots.publish();
                }
            }
            Input::Failure(session, verdict) => self.failed(session, *verdict),
            Input::Detached(session) => self.detached(&session),
            Input::LauncherEnded(job, pid) => self.launcher_ended(&job, pid),
            Input::Sensed(report) => self.sensed(report),
            Input::Unwatched(names) => self.unwatched(&names),
            Input::Looked { sensor, components } => {
                if self.snapshots.roster().has_looked(&sensor, clock::mono(), components) {
                    // Callers may wait for the very first look.
                    self.snapshots.publish();
                }
            }
            Input::Devices { began, report } => self.devices(began, report),
            Input::LateVerdict(job, verdict) => self.late_verdict(&job, *verdict),
            Input::EvidenceDue(session, incident) => self.answer_in_any_case(&session, incident),
            Input::SecondOpinions(opinions) => {
                self.hardware.second_opinions(opinions);
                self.show(clock::now(), Vec::new());
                self.snapshots.publish();
            }
            Input::GpuEvents(events) => self.gpu_events(&events),
            Input::KernelLog(report) => self.kernel_log(report),
            Input::ResetGpu { uid, gpu, reason, answer } => self.order_reset(uid, &gpu, reason, answer),
            Input::ResetBegins(order) => self.record(None, order.starts()),
            Input::GpuReset { order, outcome } => self.was_reset(&order, outcome),
            Input::Called(of) => self.called(&of),
            Input::Operator { uid, component, word, answer } => {
                let _ = answer.send(self.operator(uid, &component, &word));
            }
        }
    }

    fn record(&mut self, job: Option<&JobId>, fact: Fact) {
        match job {
            Some(job) => _ = self.record_of_job(clock::now(), job, None, Body::Fact(fact)),
            None => _ = self.snapshots.record(clock::now(), None, None, Body::Fact(fact)),
        }
    }

    /// Sends the failures of this host's jobs to other hosts.
    fn report_failures_to_peers(&self) {
        if let Some(peers) = &self.peers {
            peers.set_failures(self.repeats.recent());
        }
    }

    fn is_current(&self, session: &Session) -> bool {
        let launcher = self.launchers.get(&session.job);
        launcher
            .and_then(|launcher| launcher.session.as_ref())
            .is_some_and(|(number, _)| *number == session.number)
    }
}

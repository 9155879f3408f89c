//! Floor 3. The shell of the agent: the one task that owns what the agent knows. Launchers' entries, samples and
//! proposals and the host's reports come in; the board is what goes out.

mod calls;
mod gpus;
mod hardware;
mod host;
mod late;
mod launchers;
mod owners;
mod resets;
mod rulings;
mod words;

use std::collections::BTreeMap;
use std::sync::Arc;

use mainstay_core::base::id::{JobId, Pid};
use mainstay_core::base::pci::PciAddress;
use mainstay_core::base::time::Mono;
use mainstay_core::failure::repeats::Repeats;
use mainstay_core::host::cloud::leave::Leave;
use mainstay_core::model::entry::{Body, Fact};
use mainstay_core::model::kernel::LogCursor;
use mainstay_core::model::verdict::Verdict;
use mainstay_tier::peer::Service;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub use calls::{CALLS, Called};
pub use gpus::GpuLook;
pub use hardware::{Hardware, LogReport};
pub use words::{Attached, Hello, Input, NoSuchComponent, Session, ToLauncher};

use gpus::Gpus;
use launchers::Launcher;
use resets::Resets;
use rulings::Ruled;

use crate::act::hook::Hooks;
use crate::os::clock;
use crate::state::StateWriter;
use crate::store::forcing::Forcing;

/// Inputs that are taken in before the loop looks at the clock again.
const AT_ONCE: usize = 64;

/// Inputs of callers that are taken in before the loop looks at what the agent's own sensors report.
const OF_CALLERS_AT_ONCE: usize = 16;

/// How often what the journal holds is forced onto the disk.
const SYNC_EVERY: std::time::Duration = std::time::Duration::from_secs(1);

/// The GPUs' driver on the roster of rooms.
pub const DEVICES: &str = "GPUs";

/// The kernel log on the roster of rooms.
pub const KERNEL_LOG: &str = "kernel log";

/// The agent's own state.
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
    calls: calls::Calls,
    /// Agents of other hosts, with whom failures are told.
    peers: Option<Arc<Service>>,
    /// That the machine is to be left, until that is over: launchers that come later are told too.
    leave: Option<(String, Leave)>,
    /// Proposals that wait for the GPUs to be read.
    waiting: Vec<(Session, Verdict)>,
    /// Failures that were ruled on lately, and what was said of each.
    ruled: Vec<Ruled>,
    /// For what is watched beside the loop.
    own_inputs: mpsc::Sender<Input>,
    /// Keeps how far the kernel log was read once what was read is on the disk.
    forcing: Forcing<Option<LogCursor>>,
}

/// What the journal tells of jobs before this start, and whom it concerns.
#[derive(Debug, Default)]
pub struct Before {
    /// The newest launcher's entry that it holds, by job.
    pub origins: BTreeMap<JobId, u64>,
    /// How jobs failed.
    pub repeats: Repeats,
    /// When the agent last reset GPUs of its own accord.
    pub resets: BTreeMap<PciAddress, Mono>,
    /// Agents of other hosts, which hear of it.
    pub peers: Option<Arc<Service>>,
}

impl Node {
    /// The node over a board, with what its journal holds.
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
            calls: calls::Calls::default(),
            peers,
            leave: None,
            waiting: Vec::new(),
            ruled: Vec::new(),
            own_inputs,
            forcing,
        }
    }

    /// Runs until told to stop. `inputs` are what the agent's own parts report and what cannot wait; `callers` is what launchers
    /// and other callers say, of which there may be any amount.
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
        // One that comes late is not made up for at once: what others say has its turn between two.
        sync.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut waiting, mut said) = (Vec::with_capacity(AT_ONCE), Vec::with_capacity(OF_CALLERS_AT_ONCE));
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                // Before what others say: however much that is, there is a tick in each second. The watchdog is fed from here: it
                // guards the loop, not a timer.
                _ = sync.tick() => {
                    self.tell_events();
                    self.look_at_the_clock();
                    self.tell_surroundings();
                    self.tell_what_came_late();
                    self.forget_launchers();
                    self.sync();
                    alive();
                }
                // Before what callers say: no sensor and no new launcher waits behind a flood of entries.
                count = inputs.recv_many(&mut waiting, AT_ONCE) => self.step_all(&mut waiting, count),
                count = callers.recv_many(&mut said, OF_CALLERS_AT_ONCE) => self.step_all(&mut said, count),
            }
        }
        self.record(None, Fact::AgentStopped);
        self.end_syncing();
    }

    /// Has what the journal holds forced onto the disk, unless that is still busy with the last time.
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

    /// The last time: waits for it.
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

    /// What waits, in its order. What launchers report is shown together: shown one by one, a launcher that says very much would have the
    /// whole board copied for each word.
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
                // The caller may have gone meanwhile; its session then ends by itself.
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
            Input::Proposal(session, proposal) => self.proposed(session, *proposal),
            Input::Detached(session) => self.detached(&session),
            Input::LauncherEnded(job, pid) => self.launcher_ended(&job, pid),
            Input::Sensed(judged) => self.sensed(judged),
            Input::Unwatched(names) => self.unwatched(&names),
            Input::Looked { room, components } => {
                if self.snapshots.roster().has_looked(&room, clock::mono(), components) {
                    // Someone may wait for the first look of all.
                    self.snapshots.publish();
                }
            }
            Input::Devices { began, report } => self.devices(began, report),
            Input::JudgedLate(job, verdict) => self.judged_late(&job, *verdict),
            Input::RulingDue(session, incident) => self.rule_in_any_case(&session, incident),
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
        self.snapshots.record(clock::now(), job, None, Body::Fact(fact));
    }

    /// Other hosts hear of how jobs failed here.
    fn report_failures_to_peers(&self) {
        if let Some(peers) = &self.peers {
            peers.failed(self.repeats.reported());
        }
    }

    fn is_current(&self, session: &Session) -> bool {
        let launcher = self.launchers.get(&session.job);
        launcher
            .and_then(|launcher| launcher.session.as_ref())
            .is_some_and(|(number, _)| *number == session.number)
    }
}

//! The parts of a launcher.

use std::collections::BTreeMap;

use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_health::host::contention::SlowdownHints;
use mainstay_model::id::{Attempt, Incident, Pid, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::FaultDomain;
use mainstay_recovery::in_process::Round;
use mainstay_tier::pool::PoolOwner;
use tokio::sync::mpsc;

use super::Warm;
use super::drill::Injected;
use super::hang::{Evidence, Judge};
use super::move_memory::Moving;
use super::rank_output::RankOutput;
use super::replicas::Replicas;
use super::sealing::{Sealing, Starting};
use crate::act::guardian::Guardian;
use crate::act::output::Terminal;
use crate::act::port::HeldPort;
use crate::act::rank_processes::RankProcess;
use crate::act::round_server::RoundServer;
use crate::act::stop::Stop;
use crate::launcher_link::agent::LinkOrder;
use mainstay_journal::state::StateWriter;
use mainstay_journal::store::learned::Memory;
use mainstay_sensors::source::nvrx::Monitor;
use mainstay_sensors::source::oom::OomKills;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sensors::source::process_limit::ProcessLimits;
use mainstay_sys::cgroup::Cgroup;
use mainstay_sys::inotify::Watcher;

/// The ranks of this host, and what is theirs.
#[derive(Debug)]
pub(super) struct Ranks {
    pub(super) attempt: Attempt,
    pub(super) processes: Vec<RankProcess>,
    /// The pages of ranks that have one.
    pub(super) pages: BTreeMap<Rank, PageReader>,
    pub(super) watcher: Option<Watcher>,
    /// The channel on which lifelines report that a rank's process is ending.
    pub(super) endings: (mpsc::UnboundedSender<Pid>, mpsc::UnboundedReceiver<Pid>),
    /// The sockets of ranks that may connect to a rank monitor of NVRx.
    pub(super) monitors: BTreeMap<Rank, Monitor>,
    pub(super) guardian: Option<Guardian>,
    pub(super) cgroup: Option<Cgroup>,
    pub(super) warm: Warm,
    /// Where ranks that can stay in their processes agree on rounds; none without a directory for it.
    pub(super) round_server: Option<RoundServer>,
    /// The round of the current attempt.
    pub(super) round: Round,
    /// Held until the next attempt takes another port.
    pub(super) port: Option<HeldPort>,
    /// Processes of the previous attempt that did not die of SIGKILL.
    pub(super) undying: Vec<Pid>,
    pub(super) oom_kills: OomKills,
    pub(super) limits: ProcessLimits,
}

impl Ranks {
    /// The ranks that have not ended.
    pub(super) fn living(&self) -> impl Iterator<Item = &RankProcess> {
        self.processes.iter().filter(|rank| rank.exit.is_none())
    }

    /// Whether any has not ended.
    pub(super) fn are_running(&self) -> bool {
        self.living().next().is_some()
    }
}

/// A stop in progress, and requests of others to stop or to save.
#[derive(Debug, Default)]
pub(super) struct Stopping {
    pub(super) stop: Option<Stop>,
    /// The signal that asked the launcher to stop, if one has, and when; the ranks get the same.
    pub(super) asked_by: Option<(i32, Mono)>,
    /// How long the ranks have to leave a machine that is taken away, once they were asked to.
    pub(super) leave_within: Option<Span>,
    /// The step after which ranks that are stopped are asked to save, if a leader chose it for all hosts.
    pub(super) save_after: Option<u64>,
    /// The signal that asked for a save, and the attempt for which this launcher has passed it on.
    pub(super) save_by: Option<(i32, Option<Attempt>)>,
    /// The attempt whose ranks were asked to save, and the step after which they do.
    pub(super) asked_to_save: Option<(Attempt, Option<u64>)>,
}

/// Checkpoints of the ranks of this host.
#[derive(Debug)]
pub(super) struct Checkpoints {
    /// Keeps the checkpoints that ranks copy to memory.
    pub(super) pool_owner: Option<PoolOwner>,
    /// Copies of checkpoints on the job's other hosts; none for a job of one host.
    pub(super) replicas: Option<Replicas>,
    /// The trainer's own checkpoints; none where none are watched.
    pub(super) sealing: Option<Sealing>,
    /// The start that waits for a decision about them.
    pub(super) starting: Option<Starting>,
    /// The memory for checkpoints, while this host gets other ranks.
    pub(super) moving: Option<Moving>,
    /// The attempt in which a silent file system of the checkpoints was reported.
    pub(super) silence_reported: Option<Attempt>,
}

/// The journal, and what people have seen of it.
#[derive(Debug)]
pub(super) struct Journal {
    pub(super) snapshots: StateWriter,
    /// Where what is learned of the job is kept, and from how many runs so far; none if it is not kept.
    pub(super) memory: Option<(Memory, u32)>,
    /// The verdict that the terminal showed last: its incident, headline and domain.
    pub(super) shown: Option<(Incident, String, FaultDomain)>,
    /// The attempt whose start the terminal reported last.
    pub(super) outcome_shown: Option<Attempt>,
}

/// What the launcher and its ranks print.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) terminal: Terminal,
    /// What ranks write, and when.
    pub(super) spoken: RankOutput,
}

/// The agent of this host.
#[derive(Debug, Default)]
pub(super) struct AgentLink {
    /// The channel to it, while there is one.
    pub(super) orders: Option<mpsc::Sender<LinkOrder>>,
    /// The last entry that it has, while it is being sent what it lacks.
    pub(super) has: Option<u64>,
    /// Until when its evidence is awaited.
    pub(super) ruling_until: Option<tokio::time::Instant>,
    /// How long steps of a rank took since the last sample.
    pub(super) step_times: Vec<StepTime>,
    /// What was last seen here without an agent and may explain slow ranks.
    pub(super) rank_context: SlowdownHints,
}

/// Whether ranks hang.
#[derive(Debug)]
pub(super) struct Hang {
    pub(super) judge: Judge,
    /// What ranks that hang are doing, while it is recorded.
    pub(super) evidence: Option<Evidence>,
}

/// Faults for ranks, in a job that opted in.
#[derive(Debug, Default)]
pub(super) struct Drill {
    /// Where ranks receive them.
    pub(super) server: Option<RoundServer>,
    /// Those that wait for their step.
    pub(super) due: Vec<(Injected, Rank)>,
}

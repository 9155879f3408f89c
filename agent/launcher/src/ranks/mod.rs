//! The ranks of this host: how they are started, stopped and counted.

pub mod devices;
mod end;
pub mod environment;
pub mod guardian;
mod last_words;
pub(crate) mod port;
pub mod process;
mod resume;
mod round;
pub(crate) mod round_server;
pub(crate) mod save;
pub mod spec;
pub(crate) mod start;
pub mod stop;
pub mod warm;

use std::collections::BTreeMap;

use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::in_process::Round;
use mainstay_sensors::source::nvrx::Monitor;
use mainstay_sensors::source::oom::OomKills;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sensors::source::process_limit::ProcessLimits;
use mainstay_sys::cgroup::Cgroup;
use mainstay_sys::inotify::Watcher;
use tokio::sync::mpsc;

use guardian::Guardian;
use port::HeldPort;
use process::RankProcess;
use round_server::RoundServer;
use stop::Stop;
use warm::Warm;

/// The ranks of this host, and what is theirs.
#[derive(Debug)]
pub(crate) struct Ranks {
    pub(crate) attempt: Attempt,
    pub(crate) processes: Vec<RankProcess>,
    /// The pages of ranks that have one.
    pub(crate) pages: BTreeMap<Rank, PageReader>,
    pub(crate) watcher: Option<Watcher>,
    /// The channel on which lifelines report that a rank's process is ending.
    pub(crate) endings: (mpsc::UnboundedSender<Pid>, mpsc::UnboundedReceiver<Pid>),
    /// The sockets of ranks that may connect to a rank monitor of NVRx.
    pub(crate) monitors: BTreeMap<Rank, Monitor>,
    pub(crate) guardian: Option<Guardian>,
    pub(crate) cgroup: Option<Cgroup>,
    pub(crate) warm: Warm,
    /// Where ranks that can stay in their processes agree on rounds; none without a directory for it.
    pub(crate) round_server: Option<RoundServer>,
    /// The round of the current attempt.
    pub(crate) round: Round,
    /// Held until the next attempt takes another port.
    pub(crate) port: Option<HeldPort>,
    /// Processes of the previous attempt that did not die of SIGKILL.
    pub(crate) undying: Vec<Pid>,
    pub(crate) oom_kills: OomKills,
    pub(crate) limits: ProcessLimits,
}

impl Ranks {
    /// The ranks that have not ended.
    pub(crate) fn living(&self) -> impl Iterator<Item = &RankProcess> {
        self.processes.iter().filter(|rank| rank.exit.is_none())
    }

    /// Whether any has not ended.
    pub(crate) fn are_running(&self) -> bool {
        self.living().next().is_some()
    }
}

/// A stop in progress, and requests of others to stop or to save.
#[derive(Debug, Default)]
pub(crate) struct Stopping {
    pub(crate) stop: Option<Stop>,
    /// The signal that asked the launcher to stop, if one has, and when; the ranks get the same.
    pub(crate) asked_by: Option<(i32, Mono)>,
    /// How long the ranks have to leave a machine that is taken away, once they were asked to.
    pub(crate) leave_within: Option<Span>,
    /// The step after which ranks that are stopped are asked to save, if a leader chose it for all hosts.
    pub(crate) save_after: Option<u64>,
    /// The signal that asked for a save, and the attempt for which this launcher has passed it on.
    pub(crate) save_by: Option<(i32, Option<Attempt>)>,
    /// The attempt whose ranks were asked to save, and the step after which they do.
    pub(crate) asked_to_save: Option<(Attempt, Option<u64>)>,
}

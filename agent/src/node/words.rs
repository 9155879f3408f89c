//! What the node is told, and what it tells launchers.

use std::collections::BTreeMap;

use mainstay_core::base::id::{Attempt, Incident, JobId, Pid, Rank};
use mainstay_core::base::pci::PciAddress;
use mainstay_core::base::time::Mono;
use mainstay_core::hardware::gpu::reset::{ResetError, ResetOrder};
use mainstay_core::hardware::gpu::{DeviceReport, GpuEvent, Opinion};
use mainstay_core::host::cloud::leave::Leave;
use mainstay_core::host::contention::SlowdownHints;
use mainstay_core::model::entry::Entry;
use mainstay_core::model::host_context::HostEvidence;
use mainstay_core::model::operator::OperatorAction;
use mainstay_core::model::report::SensorReport;
use mainstay_core::model::verdict::Verdict;
use mainstay_core::view::node::BeatView;
use tokio::sync::{mpsc, oneshot};

use super::{Called, LogReport};

/// What the node is told.
#[derive(Debug)]
pub enum Input {
    /// A launcher wants to report.
    Attach {
        /// Who and what.
        hello: Hello,
        /// The way back to it.
        orders: mpsc::Sender<ToLauncher>,
        /// Taken up, or refused with the reason.
        answer: oneshot::Sender<Result<Attached, String>>,
    },
    /// An entry of a launcher's journal.
    Entry(Session, Box<Entry>),
    /// A sample of a job's pages.
    Beats(Session, Attempt, Vec<(Rank, BeatView)>),
    /// A verdict, and what the launcher would do about it.
    Proposal(Session, Box<Verdict>),
    /// A proposal has waited for the GPUs to be read as long as it may.
    RulingDue(Session, Incident),
    /// What came late of a failure changes its verdict, and its job is over.
    JudgedLate(JobId, Box<Verdict>),
    /// A launcher's connection ended.
    Detached(Session),
    /// A launcher's process ended.
    LauncherEnded(JobId, Pid),
    /// A room that watches a part of the host has looked at it.
    Sensed(SensorReport),
    /// A room does not watch these components any more.
    Unwatched(Vec<String>),
    /// A room has looked, and what it saw was told before.
    Looked {
        /// Its name on the roster.
        room: String,
        /// The components that it told of.
        components: Vec<String>,
    },
    /// The GPUs' driver was asked.
    Devices {
        /// When they began to be read.
        began: Mono,
        /// What came of it.
        report: DeviceReport,
    },
    /// What another one who watches GPUs says of them, all of it.
    SecondOpinions(BTreeMap<PciAddress, Vec<Opinion>>),
    /// The GPUs' driver told something unasked.
    GpuEvents(Vec<GpuEvent>),
    /// The kernel log was read.
    KernelLog(LogReport),
    /// An operator orders a GPU to be reset.
    ResetGpu {
        /// Who, on the kernel's word.
        uid: u32,
        /// Which: a component, an address or a UUID.
        gpu: String,
        /// Why.
        reason: String,
        /// How it went.
        answer: oneshot::Sender<Result<(), ResetError>>,
    },
    /// A GPU is idle and is about to be reset.
    ResetBegins(ResetOrder),
    /// A reset is over.
    GpuReset {
        /// What was ordered.
        order: ResetOrder,
        /// How it went.
        outcome: Result<(), ResetError>,
    },
    /// A call was refused, or changes something.
    Called(Called),
    /// An operator says something of a component.
    Operator {
        /// Who, on the kernel's word.
        uid: u32,
        /// The component.
        component: String,
        /// What.
        word: OperatorAction,
        /// Whether there is such a component.
        answer: oneshot::Sender<Result<(), NoSuchComponent>>,
    },
}

/// No component has that name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no component {name:?} here; known: {}", known.join(", "))]
pub struct NoSuchComponent {
    /// What was asked for.
    pub name: String,
    /// What there is.
    pub known: Vec<String>,
}

/// What a launcher says of itself; process and user are the kernel's word, not its own.
#[derive(Clone, Debug)]
pub struct Hello {
    /// Its job.
    pub job: JobId,
    /// Its process.
    pub pid: Pid,
    /// Its user.
    pub uid: u32,
}

/// One connection of one launcher.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Session {
    /// The job.
    pub job: JobId,
    /// Counts the connections.
    pub number: u64,
}

/// A launcher was taken up.
#[derive(Clone, Debug)]
pub struct Attached {
    /// Its session.
    pub session: Session,
    /// The newest of its entries that the journal holds; 0 for none.
    pub have_seq: u64,
}

/// What the node tells a launcher.
#[derive(Clone, Debug)]
pub enum ToLauncher {
    /// What the host has to say of the failure that a proposal is about.
    Ruling(Incident, HostEvidence),
    /// All that the host has to say of a failure by now, where that is more than it said when it was asked.
    Late(Incident, HostEvidence),
    /// What is known of the host that may explain why ranks are slow.
    RankContext(SlowdownHints),
    /// The machine is to be taken away.
    Leave(Leave),
}

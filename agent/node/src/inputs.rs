//! The inputs of the node, and its messages to launchers.

use std::collections::BTreeMap;

use mainstay_health::hardware::gpu::reset::{ResetError, ResetOrder};
use mainstay_health::hardware::gpu::{DeviceReport, GpuEvent, Opinion};
use mainstay_health::host::cloud::leave::Leave;
use mainstay_health::host::contention::SlowdownHints;
use mainstay_model::entry::Entry;
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Attempt, Incident, JobId, Pid, Rank};
use mainstay_model::operator::OperatorAction;
use mainstay_model::pci::PciAddress;
use mainstay_model::report::SensorReport;
use mainstay_model::time::Mono;
use mainstay_model::verdict::Verdict;
use mainstay_view::node::BeatView;
use tokio::sync::{mpsc, oneshot};

use super::{Called, LogReport};

/// An input of the node.
#[derive(Debug)]
pub enum Input {
    /// A launcher wants to report.
    Attach {
        /// Its job and process.
        hello: Hello,
        /// The channel back to it.
        orders: mpsc::Sender<ToLauncher>,
        /// Accepted, or refused with the reason.
        answer: oneshot::Sender<Result<Attached, String>>,
    },
    /// An entry of a launcher's journal.
    Entry(Session, Box<Entry>),
    /// A sample of a job's pages.
    Beats(Session, Attempt, Vec<(Rank, BeatView)>),
    /// A failure, for which the launcher asks for the host's evidence.
    Failure(Session, Box<Verdict>),
    /// A failure has waited for the reading of the GPUs as long as it may.
    EvidenceDue(Session, Incident),
    /// Late evidence changes the verdict of a failure whose job has ended.
    LateVerdict(JobId, Box<Verdict>),
    /// A launcher's connection ended.
    Detached(Session),
    /// A launcher's process ended.
    LauncherEnded(JobId, Pid),
    /// A sensor that watches a part of the host has looked at it.
    Sensed(SensorReport),
    /// A sensor no longer watches these components.
    Unwatched(Vec<String>),
    /// A sensor has looked, and its observations were sent before.
    Looked {
        /// Its name on the roster.
        sensor: String,
        /// The components that it reported.
        components: Vec<String>,
    },
    /// The GPUs' driver was read.
    Devices {
        /// When the reading started.
        began: Mono,
        /// The result.
        report: DeviceReport,
    },
    /// All opinions of another GPU monitor.
    SecondOpinions(BTreeMap<PciAddress, Vec<Opinion>>),
    /// Events of the GPUs' driver.
    GpuEvents(Vec<GpuEvent>),
    /// The kernel log was read.
    KernelLog(LogReport),
    /// An operator orders a GPU to be reset.
    ResetGpu {
        /// The user, as reported by the kernel.
        uid: u32,
        /// A component, an address or a UUID.
        gpu: String,
        /// Why.
        reason: String,
        /// Receives the result.
        answer: oneshot::Sender<Result<(), ResetError>>,
    },
    /// A GPU is idle and is about to be reset.
    ResetBegins(ResetOrder),
    /// A reset has ended.
    GpuReset {
        /// What was ordered.
        order: ResetOrder,
        /// The result.
        outcome: Result<(), ResetError>,
    },
    /// A call was refused, or changes something.
    Called(Called),
    /// An operator acts on a component.
    Operator {
        /// The user, as reported by the kernel.
        uid: u32,
        /// The component.
        component: String,
        /// The action.
        word: OperatorAction,
        /// Receives whether there is such a component.
        answer: oneshot::Sender<Result<(), NoSuchComponent>>,
    },
}

/// No component has that name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no component {name:?} here; known: {}", known.join(", "))]
pub struct NoSuchComponent {
    /// The requested name.
    pub name: String,
    /// The components that exist.
    pub known: Vec<String>,
}

/// A launcher that attaches; process and user come from the kernel, not from the launcher.
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

/// A launcher was accepted.
#[derive(Clone, Debug)]
pub struct Attached {
    /// Its session.
    pub session: Session,
    /// The newest of its entries in the journal; 0 for none.
    pub have_seq: u64,
}

/// A message of the node to a launcher.
#[derive(Clone, Debug)]
pub enum ToLauncher {
    /// The host's evidence about a failure.
    AgentEvidence(Incident, HostEvidence),
    /// All of the host's evidence about a failure so far, if there is more than before.
    Late(Incident, HostEvidence),
    /// Observations of the host that may explain why ranks are slow.
    RankContext(SlowdownHints),
    /// The machine will be taken away.
    Leave(Leave),
    /// The last report is not accepted, and the connection ends.
    Refused(String),
}

//! The protocol between the probe and its parent: requests, answers and results.

use serde::{Deserialize, Serialize};

use super::reading::{GpuIdentity, GpuReading};
use mainstay_model::pci::PciAddress;

/// Why no GPU can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverTrouble {
    /// The library cannot be loaded.
    LibraryMissing,
    /// The kernel driver is not loaded.
    DriverNotLoaded,
    /// Library and kernel driver have different versions: one was updated and the host not rebooted.
    VersionMismatch,
    /// Permission is denied.
    NoPermission,
    /// It lost a GPU and answers for none of them.
    GpuLost,
    /// It answers for no GPU until one is reset.
    ResetRequired,
    /// Anything else.
    Other,
}

/// The probe's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbeAnswer {
    /// The GPUs were read.
    Gpus {
        /// The version of the driver.
        driver: Option<String>,
        /// One for each GPU that the driver lists.
        gpus: Vec<GpuReading>,
        /// GPUs bound to the kernel driver, as far as they can be determined.
        #[serde(default)]
        bound: Vec<PciAddress>,
    },
    /// No GPU could be read.
    Trouble {
        /// The reason.
        trouble: DriverTrouble,
        /// The driver's message.
        detail: String,
    },
}

/// An event that the driver reports unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEvent {
    /// The GPU; `None` if the driver does not report it.
    pub gpu: Option<PciAddress>,
    /// The kind, by the bits of NVML's event types.
    pub kind: u64,
    /// The data of the event: for an XID, its code.
    pub data: u64,
    /// The GPU instance if the GPU is split (MIG).
    pub instance: Option<u32>,
}

impl GpuEvent {
    /// NVML's event type for an XID.
    pub const XID: u64 = 0x8;
    /// Not an NVML type: the probe itself saw that a GPU is lost or answers again. It triggers a reading at once and is
    /// not a fact.
    pub const TURNED: u64 = 1 << 63;
}

/// A line of the probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbeLine {
    /// It starts to read the GPU at this index of the driver's list.
    Reading(u32),
    /// The number of GPUs that the driver lists.
    Counted(u32),
    /// The reading of one GPU.
    Gpu(Box<GpuReading>),
    /// The answer to a request. Its GPUs were sent one by one before.
    Answer(ProbeAnswer),
    /// An event.
    Event(GpuEvent),
}

/// A request to the probe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProbeRequest {
    /// Whether to read the rarely read details too.
    pub details: bool,
    /// The last known identity at each index of the driver's list: a lost GPU does not report its own. Sent to each
    /// probe only once.
    pub known: Vec<(u32, GpuIdentity)>,
    /// PCI addresses from the kernel driver, by the GPUs' names: some libraries do not report them. Rarely sent.
    pub places: Vec<(String, PciAddress)>,
    /// Indices of GPUs for which calls have hung: they are skipped.
    pub skip: Vec<u32>,
    /// Indices of GPUs for which calls have hung and which are tried again, after all others.
    pub last: Vec<u32>,
}

/// The result of asking the probe.
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceReport {
    /// It answered.
    Answered(ProbeAnswer),
    /// There is no sign of a GPU on this host, and none is expected.
    NoGpus,
    /// It does not answer.
    Silent {
        /// The start of the call that does not return.
        since: mainstay_model::time::Mono,
        /// The GPU that was being read, by its index in the driver's list.
        reading: Option<u32>,
    },
    /// It could not be started, or it exited.
    Broken(String),
}

//! The words between the probe and its parent: what is asked, what is told, and what came of it.

use serde::{Deserialize, Serialize};

use super::reading::{GpuIdentity, GpuReading};
use crate::base::pci::PciAddress;

/// Why there is nothing to be read of any GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverTrouble {
    /// The library cannot be loaded.
    LibraryMissing,
    /// The kernel's part of the driver is not loaded.
    DriverNotLoaded,
    /// Library and kernel's part are of different versions: one was updated, the host not rebooted.
    VersionMismatch,
    /// We may not.
    NoPermission,
    /// It answers for none of its GPUs since it lost one.
    GpuLost,
    /// It answers for none of its GPUs until one is reset.
    ResetRequired,
    /// Anything else.
    Other,
}

/// What the probe answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbeAnswer {
    /// The GPUs were read.
    Gpus {
        /// The version of the driver.
        driver: Option<String>,
        /// One for each GPU that the driver counts.
        gpus: Vec<GpuReading>,
        /// GPUs that the kernel's part of the driver holds, as far as that is to be seen.
        #[serde(default)]
        bound: Vec<PciAddress>,
    },
    /// No GPU could be read.
    Trouble {
        /// Why.
        trouble: DriverTrouble,
        /// In the driver's words.
        detail: String,
    },
}

/// What a driver tells unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEvent {
    /// Which GPU; none if the driver does not tell.
    pub gpu: Option<PciAddress>,
    /// Which kind, by the bits of NVML's event types.
    pub kind: u64,
    /// What goes with it: the code of an XID.
    pub data: u64,
    /// The GPU instance, where the GPU is split (MIG).
    pub instance: Option<u32>,
}

impl GpuEvent {
    /// NVML's type of events that tell of an XID.
    pub const XID: u64 = 0x8;
    /// None of NVML's types: the probe itself saw that a GPU is lost, or answers again. It asks for a reading at once
    /// and is no fact of its own.
    pub const TURNED: u64 = 1 << 63;
}

/// A line of the probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbeLine {
    /// It begins to read the GPU at this place of the driver's list.
    Reading(u32),
    /// So many GPUs the driver counts.
    Counted(u32),
    /// What it read of one GPU.
    Gpu(Box<GpuReading>),
    /// The answer to a request. Its GPUs were told one by one before.
    Answer(ProbeAnswer),
    /// Something happened.
    Event(GpuEvent),
}

/// What the probe is asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProbeRequest {
    /// Whether to read what is read seldom too.
    pub details: bool,
    /// Who sat where in the driver's list when it was last known: a lost GPU does not tell. Not sent again to the
    /// same probe.
    pub known: Vec<(u32, GpuIdentity)>,
    /// Where GPUs sit by the kernel's part of the driver, by their names: some libraries do not tell. Sent seldom.
    pub places: Vec<(String, PciAddress)>,
    /// Places of GPUs for which calls have hung: they are left out.
    pub skip: Vec<u32>,
    /// Places of GPUs for which calls have hung, and which are tried again, after all others.
    pub last: Vec<u32>,
}

/// What came of asking the probe.
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceReport {
    /// It answered.
    Answered(ProbeAnswer),
    /// There is no sign of a GPU on this host, and nobody said that there is one.
    NoGpus,
    /// It has not answered since then.
    Silent {
        /// When the call began that has no answer.
        since: crate::base::time::Mono,
        /// The GPU that was being read, by its place in the driver's list, if one was.
        reading: Option<u32>,
    },
    /// It could not be started, or ended by itself.
    Broken(String),
}

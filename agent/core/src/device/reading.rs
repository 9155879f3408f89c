//! What was read of the GPUs at one moment. The words between the probe and its parent; absent is not zero.

use serde::{Deserialize, Serialize};

use crate::id::Pid;
use crate::pci::PciAddress;

/// One reading of one thing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Read<T> {
    /// It was read.
    Value(T),
    /// This GPU, or this version of the driver, does not have it.
    #[default]
    NotOffered,
    /// It should be there and could not be read.
    Failed(String),
}

impl<T> Read<T> {
    /// The value, if there is one.
    pub fn value(&self) -> Option<&T> {
        match self {
            Read::Value(value) => Some(value),
            Read::NotOffered | Read::Failed(_) => None,
        }
    }
}

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
    },
    /// No GPU could be read.
    Trouble {
        /// Why.
        trouble: DriverTrouble,
        /// In the driver's words.
        detail: String,
    },
}

/// What is wrong with a GPU as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuTrouble {
    /// It is not reachable any more.
    Lost,
    /// It has to be reset before it can be used.
    ResetRequired,
    /// We may not look at it.
    NoPermission,
    /// Anything else, in the driver's words.
    Other(String),
}

/// Which GPU it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuIdentity {
    /// Where it sits.
    pub address: PciAddress,
    /// Its name for the driver: `GPU-…`.
    pub uuid: String,
    /// Its make.
    pub name: String,
    /// The serial number of its board, where it tells.
    pub serial: Option<String>,
}

/// Rows of memory that were replaced by spare ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemappedRows {
    /// After errors that could be corrected.
    pub corrected: u32,
    /// After errors that could not.
    pub uncorrected: u32,
    /// Whether some wait for a reset.
    pub pending: bool,
    /// Whether one could not be replaced.
    pub failed: bool,
}

/// Generation and width of the PCIe link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PcieLink {
    /// The generation.
    pub generation: u32,
    /// Lanes.
    pub width: u32,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuReading {
    /// Its place in the driver's list.
    pub index: u32,
    /// Which one it is; cached, since a lost GPU does not tell any more.
    pub identity: Option<GpuIdentity>,
    /// What is wrong with it as a whole.
    pub trouble: Option<GpuTrouble>,
    /// Errors of memory that could not be corrected since the driver was loaded or the GPU was reset.
    pub ecc_volatile: Read<u64>,
    /// The same over its whole life.
    pub ecc_aggregate: Read<u64>,
    /// Rows replaced by spare ones (from Ampere on).
    pub remapped: Read<RemappedRows>,
    /// Whether pages wait for a reset to be taken out of use (before Ampere).
    pub pages_pending: Read<bool>,
    /// What the driver says it needs, by its numbers.
    pub recovery_action: Read<u64>,
    /// In degrees Celsius.
    pub temperature: Read<u32>,
    /// In milliwatts.
    pub power: Read<u32>,
    /// Why its clocks are not higher, by the driver's bits.
    pub clock_reasons: Read<u64>,
    /// The PCIe link as it is; it rests when the GPU does.
    pub pcie: Read<PcieLink>,
    /// The best that GPU and slot can do.
    pub pcie_max: Read<PcieLink>,
    /// PCIe packets that were sent again.
    pub pcie_replays: Read<u32>,
    /// NVLinks by number, and whether they are up.
    pub nvlinks: Vec<(u32, bool)>,
    /// Whether it is split (MIG).
    pub mig: Read<bool>,
    /// Share of time in which it worked, in percent.
    pub utilization: Read<u32>,
    /// Memory in use and in all, in bytes.
    pub memory: Read<(u64, u64)>,
    /// Processes with a compute context.
    pub processes: Read<Vec<Pid>>,
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
        since: crate::time::Mono,
    },
    /// It could not be started, or ended by itself.
    Broken(String),
}

//! Typed kernel log lines: XIDs of GPUs, SXIDs of switches, and reports about the host.
//!
//! These are facts of the journal: fields and variants are added, never renamed or removed. Their meaning is in the
//! catalog.

use serde::{Deserialize, Serialize};

use crate::id::{BootId, Pid};
use crate::pci::PciAddress;
use crate::time::Mono;

/// The driver reported an error or an event of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Xid {
    /// The GPU.
    pub gpu: PciAddress,
    /// The code.
    pub code: u32,
    /// The GPU instance, if the GPU is split (MIG).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_instance: Option<u32>,
    /// The process that used the GPU, if the driver reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<Pid>,
    /// Its name, cut to 15 characters by the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// Whether the driver reports that the GPU must be reset (`RST:` of 94 and 95).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset_needed: Option<bool>,
    /// Whether work has to be drained before a reset (`D-RST:`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_and_reset_needed: Option<bool>,
    /// The new recovery action, by the driver's number (154).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery_action: Option<u32>,
    /// The report of the NVLink unit (144 to 150).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink: Option<NvlinkError>,
    /// The link and its registers (74).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_registers: Option<LinkRegisters>,
    /// The code that the driver reports as the cause (newer drivers, 45).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caused_by: Option<u32>,
    /// Whether it was reported by an NVML event, without a log line.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_event: bool,
    /// The position of the line.
    #[serde(flatten)]
    pub place: LogPlace,
}

/// A report of an NVLink 5 unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvlinkError {
    /// The unit: `NETIR_LINK_EVT`.
    pub unit: String,
    /// Whether the line says that it is fatal; `None` if it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fatal: Option<bool>,
    /// The link; `None` if the unit has no link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u32>,
    /// The first word in brackets: unit and sub-code.
    pub intrinfo: u32,
    /// The second word in brackets.
    pub status: u32,
}

/// The registers of an NVLink of an earlier generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkRegisters {
    /// The link.
    pub link: u32,
    /// Its registers in the order of the line, at most seven. Their meaning is in the catalog.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registers: Vec<u32>,
}

/// The driver reported an NVSwitch error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sxid {
    /// The switch as the driver numbers it: `nvidia-nvswitch3`.
    pub switch: String,
    /// Its PCI address.
    pub address: PciAddress,
    /// The code.
    pub code: u32,
    /// Whether the line says that it is fatal; `None` if it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fatal: Option<bool>,
    /// The link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u32>,
    /// The position of the line.
    #[serde(flatten)]
    pub place: LogPlace,
}

/// The kernel reported an event on the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelReport {
    /// The class of the event.
    pub class: KernelClass,
    /// The device, file system, CPU or card that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// The affected process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<Pid>,
    /// The name of that process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// The control group of that process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The position of the line.
    #[serde(flatten)]
    pub place: LogPlace,
}

/// A position in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPlace {
    /// The position after the line: the next one to read. Counts records in /dev/kmsg and bytes in a file; for
    /// systemd's journal it is the `journal_position` of the line's time.
    pub position: u64,
    /// The line, unchanged.
    pub line: String,
}

/// How far a log was read: lines before the cursor are not read again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogCursor {
    /// The boot in which it was read.
    pub boot: BootId,
    /// The log: each log has its own cursor.
    pub log: String,
    /// The position to continue from.
    pub next: u64,
    /// The last entry read from systemd's journal, as its `__CURSOR`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub journal: Option<String>,
}

/// The position after an entry of systemd's journal that the kernel wrote at `at`: microseconds since the boot, plus
/// one. It is computed from the fact's time, which distinguishes it from a position in another log.
pub fn journal_position(at: Mono) -> u64 {
    (at.0 / 1000).saturating_add(1)
}

impl KernelClass {
    /// Whether a report counts against the GPU that its line names, if it names one.
    pub fn is_of_a_gpu(self) -> bool {
        use KernelClass::{GpuInitFailed, GpuMemoryWornOut, GpuOffBus, GpuResetFailed, GpuUncorrected};
        matches!(self, GpuOffBus | GpuInitFailed | GpuUncorrected | GpuMemoryWornOut | GpuResetFailed)
    }
}

macro_rules! kernel_classes {
    ($( $(#[doc = $doc:literal])+ $class:ident = $name:literal, )*) => {
        /// Classes of kernel log lines about a host.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum KernelClass {
            $( $(#[doc = $doc])+ #[serde(rename = $name)] $class, )*
        }

        impl KernelClass {
            /// All classes.
            pub const ALL: &'static [KernelClass] = &[$( KernelClass::$class, )*];

            /// Its name in the journal and in the catalog.
            pub fn name(self) -> &'static str {
                match self { $( KernelClass::$class => $name, )* }
            }
        }
    };
}

kernel_classes! {
    /// A GPU has fallen off the bus, reported with or without an XID 79.
    GpuOffBus = "gpu_off_bus",
    /// A GPU could not be initialized, reported without an XID.
    GpuInitFailed = "gpu_init_failed",
    /// The GPU driver itself has failed.
    GpuDriverFatal = "gpu_driver_fatal",
    /// Uncorrected errors of a GPU's memory, engines or links (AMD).
    GpuUncorrected = "gpu_uncorrected",
    /// A GPU has so much bad memory that it has no spare memory left (AMD).
    GpuMemoryWornOut = "gpu_memory_worn_out",
    /// A GPU could not be reset (AMD).
    GpuResetFailed = "gpu_reset_failed",
    /// A GPU was reset (AMD).
    GpuReset = "gpu_reset",
    /// The NVIDIA driver was loaded.
    GpuDriverLoaded = "gpu_driver_loaded",
    /// The kernel started: earlier lines are from another boot.
    KernelStarted = "kernel_started",
    /// Corrected PCIe errors.
    AerCorrected = "aer_corrected",
    /// Uncorrected PCIe errors from which the device recovers.
    AerNonFatal = "aer_non_fatal",
    /// Uncorrected PCIe errors after which the device cannot be used.
    AerUncorrected = "aer_uncorrected",
    /// A slot lost its device.
    PcieSlotDown = "pcie_slot_down",
    /// A slot has its device again.
    PcieSlotUp = "pcie_slot_up",
    /// Machine checks and EDAC reports of corrected errors.
    MachineCheckCorrected = "machine_check_corrected",
    /// Machine checks and EDAC reports of uncorrected errors.
    MachineCheck = "machine_check",
    /// A CPU is slowed down because of heat.
    CpuThrottled = "cpu_throttled",
    /// A temperature at which the hardware is about to switch off.
    CriticalTemperature = "critical_temperature",
    /// An OOM kill.
    OutOfMemory = "out_of_memory",
    /// A process stuck in the kernel.
    HungTask = "hung_task",
    /// A CPU stuck in the kernel.
    Lockup = "lockup",
    /// An oops.
    KernelBug = "kernel_bug",
    /// The kernel's fast clock source is unreliable.
    ClockUnstable = "clock_unstable",
    /// A block could not be read or written.
    DiskError = "disk_error",
    /// An inconsistent file system.
    FileSystemError = "file_system_error",
    /// A file system was made read-only.
    RemountedReadOnly = "remounted_read_only",
    /// An NVMe disk did not answer.
    Nvme = "nvme",
    /// The kernel abandoned an NVMe disk.
    NvmeLost = "nvme_lost",
    /// The server of a network file system or disk does not answer.
    NetworkStorage = "network_storage",
    /// The server of a network file system or disk answers again.
    NetworkStorageBack = "network_storage_back",
    /// A network card failed.
    NetworkCard = "network_card",
    /// A network card is too hot, gets too little power or rejects its cable.
    NetworkCardWarning = "network_card_warning",
    /// A network card recovered.
    NetworkCardBack = "network_card_back",
    /// A network card did not transmit in time.
    TransmitTimeout = "transmit_timeout",
    /// A process crashed.
    Segfault = "segfault",
}

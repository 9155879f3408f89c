//! What the kernel log tells, typed: XIDs of GPUs, SXIDs of switches, and what it reports of the host.
//!
//! These are facts of the journal: fields and variants are added, never renamed or removed. What they mean is not
//! said here but in the catalogue.

use serde::{Deserialize, Serialize};

use crate::base::id::{BootId, Pid};
use crate::base::pci::PciAddress;
use crate::base::time::Mono;

/// The driver reported an error of a GPU, or something worth knowing of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Xid {
    /// Which GPU.
    pub gpu: PciAddress,
    /// Which code.
    pub code: u32,
    /// The GPU instance, where the GPU is split (MIG).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_instance: Option<u32>,
    /// The process that was at it, where the driver knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<Pid>,
    /// Its name, cut to 15 characters by the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// Whether the driver says that the GPU has to be reset (`RST:` of 94 and 95).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset_needed: Option<bool>,
    /// Whether work has to be drained before a reset (`D-RST:`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_and_reset_needed: Option<bool>,
    /// What the recovery action changed to, by the driver's numbers (154).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery_action: Option<u32>,
    /// The NVLink unit's own words (144 to 150).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink: Option<NvlinkError>,
    /// The link and its registers (74).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_registers: Option<LinkRegisters>,
    /// The code that the driver names as the cause (newer drivers, 45).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caused_by: Option<u32>,
    /// Whether it was told by an event of NVML, and no line of the log is known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_event: bool,
    /// Where the line stood.
    #[serde(flatten)]
    pub place: LogPlace,
}

/// What an NVLink 5 unit reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvlinkError {
    /// The unit: `NETIR_LINK_EVT`.
    pub unit: String,
    /// Whether the line says that it is fatal; none if it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fatal: Option<bool>,
    /// The link; none where the unit has no link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u32>,
    /// The first word in brackets: unit and sub-code.
    pub intrinfo: u32,
    /// The second word in brackets.
    pub status: u32,
}

/// What an NVLink of an earlier generation tells of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkRegisters {
    /// The link.
    pub link: u32,
    /// Its registers in the order of the line, at most seven; what they mean stands in the catalogue.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registers: Vec<u32>,
}

/// The driver reported an error of an NVSwitch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sxid {
    /// The switch as the driver numbers it: `nvidia-nvswitch3`.
    pub switch: String,
    /// Where it sits.
    pub address: PciAddress,
    /// Which code.
    pub code: u32,
    /// Whether the line says that it is fatal; none if it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fatal: Option<bool>,
    /// The link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u32>,
    /// Where the line stood.
    #[serde(flatten)]
    pub place: LogPlace,
}

/// The kernel reported something of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelReport {
    /// What kind of thing.
    pub class: KernelClass,
    /// The device, file system, CPU or card that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// The process that it hit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<Pid>,
    /// The name of that process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// The control group of that process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Where the line stood.
    #[serde(flatten)]
    pub place: LogPlace,
}

/// Where a line stood in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPlace {
    /// The position behind it: the next one to read. Counts records in /dev/kmsg, bytes in a file; in systemd's
    /// journal it is the `journal_position` of its time.
    pub position: u64,
    /// The line, as it stood.
    pub line: String,
}

/// How far a log was read: what is before it is never looked at again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogCursor {
    /// The boot in which it was read.
    pub boot: BootId,
    /// Which log: one that is another has another cursor.
    pub log: String,
    /// The position to go on from.
    pub next: u64,
    /// The entry of systemd's journal that was read last, in the journal's own words (`__CURSOR`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub journal: Option<String>,
}

/// The position behind an entry of systemd's journal that the kernel wrote at `at`: microseconds since the boot, and
/// one. It follows from the fact's time, which tells it from a position in another log.
pub fn journal_position(at: Mono) -> u64 {
    (at.0 / 1000).saturating_add(1)
}

impl KernelClass {
    /// Whether it is held against the GPU that the line names, by the code that it then stands under; none of the
    /// drivers' own codes is so large.
    pub fn code_of_a_gpu(self) -> Option<u32> {
        let place = match self {
            KernelClass::GpuInitFailed => 0,
            KernelClass::GpuUncorrected => 1,
            KernelClass::GpuMemoryWornOut => 2,
            KernelClass::GpuResetFailed => 3,
            _ => return None,
        };
        Some(u32::MAX - place)
    }
}

macro_rules! kernel_classes {
    ($( $(#[doc = $doc:literal])+ $class:ident = $name:literal, )*) => {
        /// Kinds of lines that the kernel writes of a host.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum KernelClass {
            $( $(#[doc = $doc])+ #[serde(rename = $name)] $class, )*
        }

        impl KernelClass {
            /// All of them.
            pub const ALL: &'static [KernelClass] = &[$( KernelClass::$class, )*];

            /// Its name in the journal and in the catalogue.
            pub fn name(self) -> &'static str {
                match self { $( KernelClass::$class => $name, )* }
            }
        }
    };
}

kernel_classes! {
    /// A GPU has fallen off the bus, said beside or without an XID 79.
    GpuOffBus = "gpu_off_bus",
    /// A GPU that could not be initialised, said without an XID.
    GpuInitFailed = "gpu_init_failed",
    /// The GPUs' driver itself cannot go on.
    GpuDriverFatal = "gpu_driver_fatal",
    /// Errors of a GPU's memory, engines or links that were not corrected (AMD).
    GpuUncorrected = "gpu_uncorrected",
    /// A GPU of which so much memory is bad that it has no more to put in its place (AMD).
    GpuMemoryWornOut = "gpu_memory_worn_out",
    /// A GPU that could not be reset (AMD).
    GpuResetFailed = "gpu_reset_failed",
    /// A GPU that was reset (AMD).
    GpuReset = "gpu_reset",
    /// The NVIDIA driver was loaded.
    GpuDriverLoaded = "gpu_driver_loaded",
    /// The kernel started: what the log told before was of another boot.
    KernelStarted = "kernel_started",
    /// PCIe errors that were corrected.
    AerCorrected = "aer_corrected",
    /// PCIe errors that were not corrected and from which the device recovers.
    AerNonFatal = "aer_non_fatal",
    /// PCIe errors after which the device cannot be used.
    AerUncorrected = "aer_uncorrected",
    /// A slot lost its device.
    PcieSlotDown = "pcie_slot_down",
    /// A slot has its device again.
    PcieSlotUp = "pcie_slot_up",
    /// Machine checks and EDAC reports of errors that were corrected.
    MachineCheckCorrected = "machine_check_corrected",
    /// The same of errors that were not.
    MachineCheck = "machine_check",
    /// A CPU that runs slower because it is hot.
    CpuThrottled = "cpu_throttled",
    /// So hot that the hardware is about to switch off.
    CriticalTemperature = "critical_temperature",
    /// A kill for lack of memory.
    OutOfMemory = "out_of_memory",
    /// A process stuck in the kernel.
    HungTask = "hung_task",
    /// A CPU stuck in the kernel.
    Lockup = "lockup",
    /// An oops.
    KernelBug = "kernel_bug",
    /// The clock that the kernel reads most cheaply cannot be trusted.
    ClockUnstable = "clock_unstable",
    /// A block that could not be read or written.
    DiskError = "disk_error",
    /// An inconsistent file system.
    FileSystemError = "file_system_error",
    /// A file system that was made read-only.
    RemountedReadOnly = "remounted_read_only",
    /// An NVMe disk that did not answer.
    Nvme = "nvme",
    /// An NVMe disk that was given up.
    NvmeLost = "nvme_lost",
    /// A file system or a disk over the network whose server does not answer.
    NetworkStorage = "network_storage",
    /// It answers again.
    NetworkStorageBack = "network_storage_back",
    /// A network card in trouble.
    NetworkCard = "network_card",
    /// A network card that is too hot, gets too little power or dislikes its cable.
    NetworkCardWarning = "network_card_warning",
    /// A network card that recovered.
    NetworkCardBack = "network_card_back",
    /// A network card that did not send in time.
    TransmitTimeout = "transmit_timeout",
    /// A process that crashed.
    Segfault = "segfault",
}

//! The readings of the operating system at one moment.

use crate::parse::ipmi::Sensor;
pub use crate::parse::systemd::Service;
use std::collections::BTreeMap;

use crate::host::os::Reading;
use mainstay_model::id::Pid;
use mainstay_model::time::{Mono, Span, Wall};

/// The operating system at one moment. What a host does not have is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SystemSample {
    /// The wall clock.
    pub wall: Wall,
    /// The clock since boot that also runs during suspend, read at the same moment; `None` if the two could not be read
    /// close together.
    pub since_boot: Option<Mono>,
    /// The clock's synchronization.
    pub clock: Reading<ClockReading>,
    /// Kernel tables.
    pub tables: Tables,
    /// The processes, if they were scanned this time: scans are less frequent.
    pub scan: Option<Reading<ProcessScan>>,
    /// Network file systems.
    pub mounts: Vec<MountReading>,
    /// Services, if systemd runs.
    pub services: Option<Reading<Services>>,
    /// Sensors of the management controller, if there is one.
    pub sensors: Option<Reading<Vec<Sensor>>>,
    /// The relevant kernel modules, if there is a GPU.
    pub modules: Option<Reading<Modules>>,
    /// Memory with error correction.
    pub memory: Vec<MemoryModule>,
    /// Heat throttling events of each CPU package since boot.
    pub throttled: BTreeMap<String, u64>,
    /// Number of CPUs by frequency governor.
    pub governors: BTreeMap<String, u32>,
    /// CPUs that their governor keeps at the lowest frequency: `powersave` with drivers in which it means that.
    pub held_low: u32,
    /// CPUs with a capped frequency, if the kernel sets their frequency.
    pub capped: Option<Capped>,
    /// Ports of PCIe switches above GPUs, if there are any and they can be read.
    pub switch_ports: Option<SwitchPorts>,
}

/// The frequency caps of the CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Capped {
    /// CPUs whose frequency is known.
    pub cpus: u32,
    /// The lowest cap, as a percentage of a CPU's highest frequency.
    pub least: f64,
    /// How many CPUs have that cap.
    pub at_least: u32,
}

/// Ports of PCIe switches that lead to GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SwitchPorts {
    /// How many were read.
    pub read: u32,
    /// Addresses of those that route the traffic between a switch's devices up to the root.
    pub redirecting: Vec<String>,
}

/// How full a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Entries in use.
    pub used: u64,
    /// Maximum number of entries.
    pub limit: u64,
}

/// Kernel tables.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tables {
    /// Open files.
    pub files: Reading<Usage>,
    /// Tasks: processes and threads.
    pub tasks: Reading<Usage>,
    /// Tasks in our own control group, if it has a limit.
    pub group_tasks: Option<Usage>,
}

/// One scan of all processes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProcessScan {
    /// Number of processes.
    pub processes: u64,
    /// Number of zombies.
    pub zombies: u64,
    /// The parent with the most zombies: PID, name and count.
    pub most: Option<(Pid, String, u64)>,
    /// Processes in uninterruptible sleep.
    pub blocked: Vec<Blocked>,
}

/// A process in uninterruptible sleep (state D).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Blocked {
    /// Its id.
    pub pid: i32,
    /// Its start time in the kernel's ticks since boot; with the id it identifies the process.
    pub start: u64,
    /// Its name.
    pub name: String,
    /// It is a kernel thread.
    pub kernel_thread: bool,
    /// Where it waits, if the kernel reports it: functions, innermost first.
    pub waits_in: Vec<String>,
    /// How often it was scheduled: a stuck process never is. `None` if the kernel does not report it.
    pub ran: Option<u64>,
}

/// The clock's synchronization, by adjtimex(2).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClockReading {
    /// A time service keeps it synchronized.
    pub synchronised: bool,
    /// Its maximum error.
    pub max_error: Span,
    /// The clock source: `tsc`.
    pub source: Option<String>,
    /// The CPUs of this machine, which is no guest, have a fast counter that never stops.
    pub has_fast: bool,
}

/// A mount of a network file system.
#[derive(Clone, Debug, PartialEq)]
pub struct MountReading {
    /// Its mount point.
    pub point: String,
    /// Its type: `nfs4`.
    pub kind: String,
    /// The server and its export.
    pub from: String,
    /// The result of querying it.
    pub state: MountState,
}

/// The result of querying a file system.
#[derive(Clone, Debug, PartialEq)]
pub enum MountState {
    /// It was queried for the first time and has not answered yet.
    Asked,
    /// It answered.
    Answers,
    /// It answered with an error.
    Fails(String),
    /// It did not answer in time.
    Silent {
        /// The time of the first query without an answer.
        since: Mono,
    },
}

/// The monitored services.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Services {
    /// The units that exist.
    pub units: Vec<Service>,
    /// NVIDIA GPUs on the PCI bus.
    pub gpus: u32,
    /// There are NVSwitches, without whose fabric manager the GPUs cannot be used.
    pub switches: bool,
}

/// Kernel modules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Modules {
    /// The loaded ones among the requested modules.
    pub loaded: Vec<String>,
    /// The modules that the operator requires and that are not loaded.
    pub lacking: Vec<String>,
    /// There is InfiniBand or RoCE.
    pub rdma: bool,
    /// RDMA devices that programs cannot open because they have no verbs device.
    pub without_verbs: Vec<String>,
    /// NVIDIA GPUs on the PCI bus.
    pub gpus: u32,
    /// The driver and the kernel can share GPU memory with cards themselves (DMA-BUF).
    pub dma_buf: bool,
}

/// A memory module, or a controller whose modules are not distinguished.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryModule {
    /// `mc0 CPU_SrcID#0_MC#0_Chan#1_DIMM#0`.
    pub name: String,
    /// Corrected errors since the driver was loaded.
    pub corrected: u64,
    /// Uncorrected errors.
    pub uncorrected: u64,
}

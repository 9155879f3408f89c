//! What was read of the operating system at one moment.

use crate::formats::parse::ipmi::Sensor;
pub use crate::formats::parse::systemd::Service;
use std::collections::BTreeMap;

use crate::base::id::Pid;
use crate::base::time::{Mono, Span, Wall};
use crate::host::os::Reading;

/// The operating system at one moment. What a host does not have is none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SystemSample {
    /// The wall clock.
    pub wall: Wall,
    /// The clock since boot that also runs while the host sleeps, read in the same moment; none if they could not be
    /// read close together.
    pub since_boot: Option<Mono>,
    /// How well the clock is kept.
    pub clock: Reading<ClockReading>,
    /// Tables of the kernel.
    pub tables: Tables,
    /// The processes, if they were looked through this time: that is done at a slower pace.
    pub scan: Option<Reading<ProcessScan>>,
    /// Network file systems.
    pub mounts: Vec<MountReading>,
    /// Services, where systemd runs.
    pub services: Option<Reading<Services>>,
    /// Sensors of the management controller, where there is one.
    pub sensors: Option<Reading<Vec<Sensor>>>,
    /// Kernel modules that matter, where there is a GPU.
    pub modules: Option<Reading<Modules>>,
    /// Memory with error correction.
    pub memory: Vec<MemoryModule>,
    /// How often each CPU package was throttled for heat since boot.
    pub throttled: BTreeMap<String, u64>,
    /// CPUs by their frequency governor.
    pub governors: BTreeMap<String, u32>,
    /// CPUs whose governor holds them at their lowest frequency: `powersave` of drivers for which that is its meaning.
    pub held_low: u32,
    /// CPUs that may not run as fast as they can, where the kernel sets their frequency.
    pub capped: Option<Capped>,
    /// Ports of PCIe switches above GPUs, where there are any and they can be read.
    pub switch_ports: Option<SwitchPorts>,
}

/// How fast the CPUs may run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Capped {
    /// CPUs whose frequency is known.
    pub cpus: u32,
    /// The least share of its highest frequency that one of them may run at, in percent.
    pub least: f64,
    /// How many may run at no more than that.
    pub at_least: u32,
}

/// Ports of PCIe switches that lead to GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SwitchPorts {
    /// How many were read.
    pub read: u32,
    /// Those that send traffic between the devices of a switch up to the root, by address.
    pub redirecting: Vec<String>,
}

/// How full a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Entries in use.
    pub used: u64,
    /// Entries that there may be.
    pub limit: u64,
}

/// Tables of the kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tables {
    /// Open files.
    pub files: Reading<Usage>,
    /// Tasks: processes and threads.
    pub tasks: Reading<Usage>,
    /// Tasks in our own control group, where it has a limit.
    pub group_tasks: Option<Usage>,
}

/// All processes, looked through once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProcessScan {
    /// How many there are.
    pub processes: u64,
    /// How many of them have ended and were not waited for.
    pub zombies: u64,
    /// Who has most of those, and how many.
    pub most: Option<(Pid, String, u64)>,
    /// Processes in uninterruptible sleep.
    pub blocked: Vec<Blocked>,
}

/// A process in uninterruptible sleep (state D).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Blocked {
    /// Its id.
    pub pid: i32,
    /// When it started, in the kernel's ticks since boot: with the id, no other process.
    pub start: u64,
    /// Its name.
    pub name: String,
    /// It is a thread of the kernel.
    pub kernel_thread: bool,
    /// What it waits in, as far as the kernel tells: functions, innermost first.
    pub waits_in: Vec<String>,
    /// How often it was given a CPU: one that does not move gets none. None where the kernel does not tell.
    pub ran: Option<u64>,
}

/// How well the clock is kept, by adjtimex(2).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClockReading {
    /// Somebody keeps it right.
    pub synchronised: bool,
    /// How wrong it can be at most.
    pub max_error: Span,
    /// The hardware that it runs by: `tsc`.
    pub source: Option<String>,
    /// The CPUs of this machine, which is no guest, have a counter that is fast and never stops.
    pub has_fast: bool,
}

/// A mount of a network file system.
#[derive(Clone, Debug, PartialEq)]
pub struct MountReading {
    /// Where it is mounted.
    pub point: String,
    /// Its type: `nfs4`.
    pub kind: String,
    /// The server and what it exports.
    pub from: String,
    /// What became of asking it.
    pub state: MountState,
}

/// What became of asking a file system.
#[derive(Clone, Debug, PartialEq)]
pub enum MountState {
    /// It was asked for the first time, and has not answered yet.
    Asked,
    /// It answered.
    Answers,
    /// It answered with an error.
    Fails(String),
    /// It has not answered for too long.
    Silent {
        /// When it was asked first of the times that it did not answer.
        since: Mono,
    },
}

/// The services that matter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Services {
    /// Each unit that is there.
    pub units: Vec<Service>,
    /// GPUs of NVIDIA on the PCI bus.
    pub gpus: u32,
    /// There are NVSwitches, so that GPUs are of no use without the fabric manager.
    pub switches: bool,
}

/// Kernel modules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Modules {
    /// Those that are loaded, of the ones that are asked about.
    pub loaded: Vec<String>,
    /// Those that the operator wants and that are not loaded.
    pub lacking: Vec<String>,
    /// There is InfiniBand or RoCE.
    pub rdma: bool,
    /// RDMA devices that programs cannot open, since they have no verbs device.
    pub without_verbs: Vec<String>,
    /// GPUs of NVIDIA on the PCI bus.
    pub gpus: u32,
    /// The driver and the kernel can share GPU memory with cards by themselves (DMA-BUF).
    pub dma_buf: bool,
}

/// A memory module, or a controller whose modules are not told apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryModule {
    /// `mc0 CPU_SrcID#0_MC#0_Chan#1_DIMM#0`.
    pub name: String,
    /// Errors that were corrected since the driver was loaded.
    pub corrected: u64,
    /// Errors that could not be.
    pub uncorrected: u64,
}

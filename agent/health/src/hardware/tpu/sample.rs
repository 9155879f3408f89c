//! The readings of a host's TPUs.

use std::collections::BTreeMap;

use super::driver::DriverReport;
use mainstay_model::id::Pid;
use mainstay_model::pci::PciAddress;

/// One sample of the TPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct TpuSample {
    /// The chips on the PCI bus, by number; or why sysfs could not be read.
    pub chips: Result<Vec<Chip>, String>,
    /// The answers of the metrics services. None is asked while no process can hold a chip.
    pub services: Vec<RuntimeService>,
    /// Stall summaries that libtpu has written since the last sample.
    pub stalls: Vec<Stall>,
    /// Relevant lines that the driver has logged since the last sample.
    pub driver: Vec<DriverReport>,
}

/// A file with the cores' positions that libtpu wrote when it detected a stall.
#[derive(Clone, Debug, PartialEq)]
pub struct Stall {
    /// The file's name.
    pub file: String,
    /// The cores' positions; or why the file cannot be read.
    pub cores: Result<Vec<CoreState>, String>,
}

/// A chip on the PCI bus.
#[derive(Clone, Debug, PartialEq)]
pub struct Chip {
    /// Its number in the order of the device nodes: 0, 1, 2.
    pub number: u32,
    /// Its PCI address.
    pub address: PciAddress,
    /// Its first PCI function; a chip has several where each core is a function.
    pub function: u8,
    /// Its generation.
    pub kind: &'static str,
    /// Its device nodes: `/dev/accel0`, `/dev/vfio/3`; two where each core is a PCI function. Empty if no driver is
    /// loaded.
    pub nodes: Vec<String>,
    /// The processes that have one of them open.
    pub holders: Holders,
}

impl Chip {
    /// Its address with the function, as the kernel and `tpu-info` write it: `0000:00:05.0`.
    pub fn bus_id(&self) -> String {
        format!("{}.{}", self.address, self.function)
    }
}

/// A chip's generation by Google's name (`v5p`), from its PCI device and subsystem ids; `None` if it is not a TPU:
/// Google's network cards and disks have the same vendor id. Source: the table in Google's tpu-info.
pub fn chip_kind(device: u16, subsystem: u16) -> Option<&'static str> {
    Some(match (device, subsystem) {
        (0x0027, 0x004e) => "v2",
        (0x0027, 0x004f) => "v3",
        (0x005e, _) => "v4",
        (0x0063, _) => "v5e",
        (0x0062, _) => "v5p",
        (0x006f, _) => "v6e",
        (0x0076, _) => "7x",
        _ => return None,
    })
}

/// The processes that have a chip's device node open.
#[derive(Clone, Debug, PartialEq)]
pub enum Holders {
    /// These processes and no others: all processes could be inspected.
    Known(Vec<ChipHolder>),
    /// These and possibly others: how many processes could not be inspected, and why.
    Partly(Vec<ChipHolder>, String),
}

impl Holders {
    /// The known processes.
    pub fn known(&self) -> &[ChipHolder] {
        match self {
            Holders::Known(holders) | Holders::Partly(holders, _) => holders,
        }
    }

    /// Whether it is certain that no process has it open.
    pub fn is_free(&self) -> bool {
        matches!(self, Holders::Known(holders) if holders.is_empty())
    }
}

/// A process that has a chip open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChipHolder {
    /// The process.
    pub pid: Pid,
    /// Its name (`/proc/PID/comm`).
    pub name: String,
}

/// A metrics service and its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct RuntimeService {
    /// Its address: `localhost:8431`.
    pub endpoint: String,
    /// Its answer.
    pub answer: RuntimeReply,
}

/// The result of asking a metrics service.
#[derive(Clone, Debug, PartialEq)]
pub enum RuntimeReply {
    /// It answered.
    Reported(Runtime),
    /// Nothing listens at the address.
    Refused,
    /// No answer within the deadline.
    Silent,
    /// An error, or an answer that libtpu would not give; the reason.
    Improper(String),
}

/// What libtpu reports about the process that it runs in. Values are by core or by chip, depending on the generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Runtime {
    /// Memory in use, in bytes.
    pub hbm_used: BTreeMap<i64, u64>,
    /// Total memory, in bytes.
    pub hbm_total: BTreeMap<i64, u64>,
    /// Share of time in which the TensorCore was busy, in percent.
    pub duty_cycle: BTreeMap<i64, f64>,
    /// How long the TensorCore has been idle, in seconds.
    pub idle_seconds: BTreeMap<i64, f64>,
    /// Share of the memory bandwidth in use, in percent.
    pub hbm_bandwidth: BTreeMap<i64, f64>,
    /// Number of supported metrics; `None` if this libtpu does not list them.
    pub supported: Option<usize>,
    /// The cores' positions; `None` if this libtpu does not report them.
    pub cores: Option<Vec<CoreState>>,
}

/// The position of a core.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CoreState {
    /// Its number in the whole slice.
    pub core: i32,
    /// The number of its chip, if reported.
    pub chip: Option<i32>,
    /// Whether it is a TensorCore; the others (SparseCores) run their own programs.
    pub tensor_core: bool,
    /// Fingerprint of the loaded program, in hex; empty if none is loaded.
    pub program: String,
    /// The number of program launches.
    pub launch: Option<i64>,
    /// Program counters other than 0 of the core's sequencers, in order.
    pub counters: Vec<i64>,
    /// Its current operation; empty if not reported.
    pub hlo: String,
    /// Number of queued programs.
    pub queued: usize,
    /// Why its state is unknown, or what is wrong with it.
    pub error: Option<String>,
}

impl CoreState {
    /// Whether the position equals an earlier one. The operation's text is not compared: it is requested only once
    /// nothing moves.
    pub fn stands_as(&self, before: &CoreState) -> bool {
        let without_text = |core: &CoreState| CoreState { hlo: String::new(), ..core.clone() };
        without_text(self) == without_text(before)
    }

    /// Whether it runs a program or has programs queued.
    pub fn is_busy(&self) -> bool {
        self.queued > 0 || !self.counters.is_empty()
    }
}

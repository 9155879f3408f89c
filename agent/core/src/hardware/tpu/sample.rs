//! What is read of the TPUs of a host.

use std::collections::BTreeMap;

use super::driver::DriverReport;
use crate::base::id::Pid;
use crate::base::pci::PciAddress;

/// One look at the TPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct TpuSample {
    /// The chips on the PCI bus, by their number; or why sysfs could not be read.
    pub chips: Result<Vec<Chip>, String>,
    /// What the metrics services told that were asked. None is asked while nobody can hold a chip.
    pub services: Vec<Service>,
    /// Stall summaries that libtpu has written since the last look.
    pub stalls: Vec<Stall>,
    /// What the driver has written into its logs since the last look that matters.
    pub driver: Vec<DriverReport>,
}

/// A file in which libtpu wrote down where its cores stood when it found that they stall.
#[derive(Clone, Debug, PartialEq)]
pub struct Stall {
    /// The file's name.
    pub file: String,
    /// Where the cores stood; or why it cannot be read.
    pub cores: Result<Vec<CoreState>, String>,
}

/// A chip on the PCI bus.
#[derive(Clone, Debug, PartialEq)]
pub struct Chip {
    /// Its place in the order of the device nodes: 0, 1, 2.
    pub number: u32,
    /// Where it is on the bus.
    pub address: PciAddress,
    /// Its first PCI function; where each core is a function of its own, the chip has several.
    pub function: u8,
    /// Which generation it is of.
    pub kind: &'static str,
    /// Its device nodes: `/dev/accel0`, `/dev/vfio/3`; two where each core is a PCI function of its own. None when no
    /// driver is loaded.
    pub nodes: Vec<String>,
    /// Who has one of them open.
    pub holders: Holders,
}

impl Chip {
    /// Its address as the kernel and `tpu-info` write it, with the function: `0000:00:05.0`.
    pub fn bus_id(&self) -> String {
        format!("{}.{}", self.address, self.function)
    }
}

/// Which generation a chip is of, as Google names it (`v5p`), by its PCI device and subsystem numbers; none for what is
/// no TPU: Google's network cards and disks have the same vendor. Source: the table of Google's tpu-info.
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

/// Who has a chip's device node open.
#[derive(Clone, Debug, PartialEq)]
pub enum Holders {
    /// These processes, and no others: all processes could be looked into.
    Known(Vec<Holder>),
    /// These, and perhaps others: how many processes could not be looked into, and why.
    Partly(Vec<Holder>, String),
}

impl Holders {
    /// The processes that are known.
    pub fn known(&self) -> &[Holder] {
        match self {
            Holders::Known(holders) | Holders::Partly(holders, _) => holders,
        }
    }

    /// Whether it is certain that nobody has it open.
    pub fn is_free(&self) -> bool {
        matches!(self, Holders::Known(holders) if holders.is_empty())
    }
}

/// A process that has a chip open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process.
    pub pid: Pid,
    /// Its name (`/proc/PID/comm`).
    pub name: String,
}

/// A metrics service and what came of asking it.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// Its address: `localhost:8431`.
    pub endpoint: String,
    /// What it told.
    pub answer: Answer,
}

/// What came of asking a metrics service.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// It told this.
    Reported(Runtime),
    /// Nothing listens there.
    Refused,
    /// No answer within the deadline.
    Silent,
    /// There was an answer that libtpu would not give, or an error: what was wrong.
    Improper(String),
}

/// What libtpu tells of the process that it runs in. Values are by core or by chip, as the generation has it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Runtime {
    /// Memory in use, in bytes.
    pub hbm_used: BTreeMap<i64, u64>,
    /// Memory in all, in bytes.
    pub hbm_total: BTreeMap<i64, u64>,
    /// Share of time in which the TensorCore had work, in percent.
    pub duty_cycle: BTreeMap<i64, f64>,
    /// How long the TensorCore has had none, in seconds.
    pub idle_seconds: BTreeMap<i64, f64>,
    /// Share of the memory's bandwidth that is in use, in percent.
    pub hbm_bandwidth: BTreeMap<i64, f64>,
    /// How many metrics it has; none from a libtpu that does not list them.
    pub supported: Option<usize>,
    /// Where the cores stand; none if this libtpu does not tell.
    pub cores: Option<Vec<CoreState>>,
}

/// Where a core stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CoreState {
    /// Its number in the whole slice.
    pub core: i32,
    /// The number of its chip, if it is told.
    pub chip: Option<i32>,
    /// Whether it is a TensorCore; the others (SparseCores) run programs of their own.
    pub tensor_core: bool,
    /// Fingerprint of the loaded program, in hex; empty if there is none.
    pub program: String,
    /// Counts the launches of programs.
    pub launch: Option<i64>,
    /// Program counters that are not 0, of the core's sequencers, in their order.
    pub counters: Vec<i64>,
    /// The operation it is at; empty if it is not told.
    pub hlo: String,
    /// Programs that wait for it.
    pub queued: usize,
    /// Why its state is not known, or what is wrong with it.
    pub error: Option<String>,
}

impl CoreState {
    /// Whether it stands where it stood at another look. The operation's text is not part of that: it is asked for only
    /// once nothing moves.
    pub fn stands_as(&self, before: &CoreState) -> bool {
        let without_text = |core: &CoreState| CoreState { hlo: String::new(), ..core.clone() };
        without_text(self) == without_text(before)
    }

    /// Whether it runs something or something waits for it.
    pub fn is_busy(&self) -> bool {
        self.queued > 0 || !self.counters.is_empty()
    }
}

//! A reading of a GPU at one moment. Absent is not zero.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::details::GpuDetails;
pub use super::read::Sampled;
use mainstay_model::id::Pid;
use mainstay_model::pci::PciAddress;

/// What is wrong with a GPU as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuTrouble {
    /// It is no longer reachable.
    Lost,
    /// It has to be reset before it can be used.
    ResetRequired,
    /// Permission is denied.
    NoPermission,
    /// Its power cables are not connected correctly.
    NoPower,
    /// Its interrupts do not arrive.
    NoInterrupts,
    /// The driver lists it but cannot open it; the driver's message.
    Unopened(String),
    /// A call for it has not returned since this time.
    Hangs(mainstay_model::time::Mono),
    /// Any other error; the driver's message.
    Other(String),
}

impl GpuTrouble {
    /// The trouble in words.
    pub fn describe(&self) -> String {
        match self {
            GpuTrouble::Lost => "the driver lost it".to_owned(),
            GpuTrouble::ResetRequired => "it has to be reset before it can be used".to_owned(),
            GpuTrouble::NoPermission => "the agent may not look at it".to_owned(),
            GpuTrouble::NoPower => "its power cables are not connected as they should be".to_owned(),
            GpuTrouble::NoInterrupts => "its interrupts do not reach the driver".to_owned(),
            GpuTrouble::Unopened(what) => format!("the driver cannot open it: {what}"),
            GpuTrouble::Hangs(_) => "a call of the driver for it does not return".to_owned(),
            GpuTrouble::Other(what) => what.clone(),
        }
    }
}

/// The identity of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuIdentity {
    /// Its PCI address.
    pub address: PciAddress,
    /// The driver's UUID of it: `GPU-…`.
    pub uuid: String,
    /// Its model.
    pub name: String,
    /// The serial number of its board, if reported.
    pub serial: Option<String>,
}

/// Ensures that no GPU is listed twice. A GPU that does not report its identity has the one last known at its index. If
/// that identity answers at another index (the driver was reloaded and lists GPUs in another order), the GPU gets the
/// only identity left over, or none if several are left.
pub fn settle<'a>(readings: &mut [GpuReading], known: impl IntoIterator<Item = &'a GpuIdentity>) {
    let mut order: Vec<usize> = (0..readings.len()).collect();
    order.sort_by_key(|index| (readings[*index].trouble.is_some(), *index));
    let mut taken = BTreeSet::new();
    let mut nameless = Vec::new();
    for index in order {
        let reading = &mut readings[index];
        if reading.identity.take_if(|identity| !taken.insert(identity.address)).is_some()
            || reading.identity.is_none()
        {
            nameless.push(index);
        }
    }
    let left: BTreeMap<PciAddress, &GpuIdentity> = known
        .into_iter()
        .filter(|identity| !taken.contains(&identity.address))
        .map(|identity| (identity.address, identity))
        .collect();
    let left: Vec<&GpuIdentity> = left.into_values().collect();
    if let ([index], [one]) = (nameless.as_slice(), left.as_slice())
        && readings[*index].trouble.is_some()
    {
        readings[*index].identity = Some(GpuIdentity::clone(one));
    }
}

/// Rows of memory that were replaced by spare rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemappedRows {
    /// After corrected errors.
    pub corrected: u32,
    /// After uncorrected errors.
    pub uncorrected: u32,
    /// Whether some rows wait for a reset.
    pub pending: bool,
    /// Whether a row could not be replaced.
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

/// How long clocks were slowed down since the driver was loaded, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowdownTimes {
    /// By the hardware because of heat.
    pub thermal: u64,
    /// By the power supply's brake, which affects all GPUs of a rack at once.
    pub brake: u64,
}

/// Current clocks, in MHz.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clocks {
    /// Multiprocessor clock.
    pub sm: u32,
    /// Memory clock.
    pub memory: u32,
}

/// Registration of the GPU with the NVSwitch fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricInfo {
    /// The driver's state: 0 not supported, 1 not started, 2 in progress, 3 completed.
    pub state: u32,
    /// The result, as an NVML code: 0 is success.
    pub status: u32,
    /// Parts of its health, by the driver's bits; 0 if not reported.
    pub health_mask: u32,
    /// 0 not reported, 1 healthy, 2 unhealthy, 3 limited capacity.
    pub health_summary: u32,
}

/// A process with a compute context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Its PID, in the driver's PID namespace.
    pub pid: Pid,
    /// Its memory on the GPU, in bytes, if reported.
    pub memory: Option<u64>,
}

/// The state of one NVLink.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkReading {
    /// Its number.
    pub link: u32,
    /// Whether it is up.
    pub up: Sampled<bool>,
}

/// The reading of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuReading {
    /// Its index in the driver's list.
    pub index: u32,
    /// Its identity; cached, since a lost GPU does not report it.
    pub identity: Option<GpuIdentity>,
    /// What is wrong with the GPU as a whole.
    pub trouble: Option<GpuTrouble>,
    /// Uncorrected memory errors since the driver was loaded or the GPU was reset.
    pub ecc_volatile: Sampled<u64>,
    /// Uncorrected memory errors over its whole life.
    pub ecc_aggregate: Sampled<u64>,
    /// Corrected memory errors since the driver was loaded or the GPU was reset.
    pub ecc_corrected: Sampled<u64>,
    /// Rows replaced by spare rows (Ampere and later).
    pub remapped: Sampled<RemappedRows>,
    /// Whether pages wait for a reset to be retired (before Ampere).
    pub pages_pending: Sampled<bool>,
    /// Whether memory is damaged beyond repair.
    pub unrepairable: Sampled<bool>,
    /// The driver's recommended recovery action, by its number.
    pub recovery_action: Sampled<u64>,
    /// Temperature, in degrees Celsius.
    pub temperature: Sampled<u32>,
    /// Temperature of its memory, in degrees Celsius.
    pub memory_temperature: Sampled<u32>,
    /// Degrees Celsius left until clocks are slowed down; may be 0 or less on healthy boards.
    pub margin: Sampled<i32>,
    /// Power draw, in milliwatts.
    pub power: Sampled<u32>,
    /// Why its clocks are not higher, by the driver's bits.
    pub clock_reasons: Sampled<u64>,
    /// How long its clocks were slowed down.
    pub slowdown: Sampled<SlowdownTimes>,
    /// Its current clocks.
    pub clocks: Sampled<Clocks>,
    /// The current PCIe link; it slows down when the GPU is idle.
    pub pcie: Sampled<PcieLink>,
    /// The maximum that GPU and slot support.
    pub pcie_max: Sampled<PcieLink>,
    /// Replayed PCIe packets.
    pub pcie_replays: Sampled<u32>,
    /// NVLinks, ordered by number.
    pub nvlinks: Vec<LinkReading>,
    /// Its registration with the fabric.
    pub fabric: Sampled<FabricInfo>,
    /// Whether it is split (MIG).
    pub mig: Sampled<bool>,
    /// Share of time in which it was busy, in percent.
    pub utilization: Sampled<u32>,
    /// Used and total memory, in bytes.
    pub memory: Sampled<(u64, u64)>,
    /// Processes with a compute context.
    pub processes: Sampled<Vec<GpuProcess>>,
    /// Rarely read details; `None` if they were not read this time.
    pub details: Option<Box<GpuDetails>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(bus: u8) -> GpuIdentity {
        let address = PciAddress { domain: 0, bus, device: 0 };
        GpuIdentity { address, uuid: format!("GPU-{bus}"), name: "H100".to_owned(), serial: None }
    }

    /// Addresses after [`settle`] for the buses `reported`, by index; the indices in `lost` do not answer.
    fn settled(buses: &[u8], lost: &[u32], known: &[u8]) -> Vec<Option<u8>> {
        let mut readings: Vec<GpuReading> = (0..)
            .zip(buses)
            .map(|(index, bus)| {
                let trouble = lost.contains(&index).then_some(GpuTrouble::Lost);
                let identity = (*bus > 0).then(|| identity(*bus));
                GpuReading { index, identity, trouble, ..GpuReading::default() }
            })
            .collect();
        let known: Vec<GpuIdentity> = known.iter().map(|bus| identity(*bus)).collect();
        settle(&mut readings, &known);
        readings.into_iter().map(|reading| reading.identity.map(|identity| identity.address.bus)).collect()
    }

    #[test]
    fn a_gpu_lost_after_a_reorder_gets_the_identity_left_over() {
        // 4 was listed last and is listed first now; 3 does not answer at the index where 4 was.
        assert_eq!(settled(&[4, 1, 2, 4], &[3], &[1, 2, 3, 4]), [Some(4), Some(1), Some(2), Some(3)]);
        assert_eq!(settled(&[1, 2, 3], &[2], &[1, 2, 3]), [Some(1), Some(2), Some(3)], "in its place");
        assert_eq!(settled(&[2, 1, 0], &[2], &[1, 2, 3]), [Some(2), Some(1), Some(3)]);
    }

    #[test]
    fn a_lost_gpu_gets_no_identity_if_several_are_possible() {
        assert_eq!(settled(&[4, 3, 3, 4], &[2, 3], &[1, 2, 3, 4]), [Some(4), Some(3), None, None]);
        assert_eq!(settled(&[1, 0], &[1], &[1]), [Some(1), None]);
    }

    #[test]
    fn two_gpus_that_report_the_same_address_are_not_merged() {
        assert_eq!(settled(&[1, 1], &[], &[1]), [Some(1), None]);
        assert_eq!(settled(&[1, 1], &[], &[1, 2]), [Some(1), None], "it answers: it is not the missing one");
    }
}

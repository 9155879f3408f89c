//! What was read of a GPU at one moment. Absent is not zero.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::details::GpuDetails;
pub use super::read::Read;
use crate::base::id::Pid;
use crate::base::pci::PciAddress;

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
    /// Its power cables are not connected as they should be.
    NoPower,
    /// Its interrupts do not arrive.
    NoInterrupts,
    /// The driver knows it and cannot open it, in the driver's words.
    Unopened(String),
    /// A call for it has not returned; since when.
    Hangs(crate::base::time::Mono),
    /// Anything else, in the driver's words.
    Other(String),
}

impl GpuTrouble {
    /// It, in words.
    pub fn words(&self) -> String {
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

/// Sees to it that no GPU is told of twice. One that does not say who it is stands under the name of who was at its place
/// before; where that one answers from another place (the driver was loaded anew, and counts in another order), it is the
/// only one that is left, or nobody knows which.
pub fn settle<'a>(readings: &mut [GpuReading], known: impl IntoIterator<Item = &'a GpuIdentity>) {
    let mut order: Vec<usize> = (0..readings.len()).collect();
    order.sort_by_key(|place| (readings[*place].trouble.is_some(), *place));
    let mut taken = BTreeSet::new();
    let mut nameless = Vec::new();
    for place in order {
        let reading = &mut readings[place];
        if reading.identity.take_if(|of| !taken.insert(of.address)).is_some() || reading.identity.is_none() {
            nameless.push(place);
        }
    }
    let left: BTreeMap<PciAddress, &GpuIdentity> =
        known.into_iter().filter(|of| !taken.contains(&of.address)).map(|of| (of.address, of)).collect();
    let left: Vec<&GpuIdentity> = left.into_values().collect();
    if let ([place], [one]) = (nameless.as_slice(), left.as_slice())
        && readings[*place].trouble.is_some()
    {
        readings[*place].identity = Some(GpuIdentity::clone(one));
    }
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

/// For how long clocks were held down since the driver was loaded, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowdownTimes {
    /// By hardware, for heat.
    pub thermal: u64,
    /// By the brake of the power supply, which hits all GPUs of a rack at once.
    pub brake: u64,
}

/// Present clocks, in MHz.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clocks {
    /// Of the multiprocessors.
    pub sm: u32,
    /// Of the memory.
    pub memory: u32,
}

/// Whether the GPU was taken up into the fabric of NVSwitches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricInfo {
    /// By the driver's numbers: 0 not supported, 1 not started, 2 in progress, 3 completed.
    pub state: u32,
    /// How it completed, as a code of NVML: 0 is success.
    pub status: u32,
    /// Parts of its health, by the driver's bits; 0 where this is not told.
    pub health_mask: u32,
    /// 0 not told, 1 healthy, 2 unhealthy, 3 of limited capacity.
    pub health_summary: u32,
}

/// A process with a compute context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Its number, in the PID namespace of the driver.
    pub pid: Pid,
    /// Its memory on the GPU, in bytes, where the driver tells.
    pub memory: Option<u64>,
}

/// One NVLink, as it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkReading {
    /// Its number.
    pub link: u32,
    /// Whether it is up.
    pub up: Read<bool>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
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
    /// Errors of memory that were corrected since the driver was loaded or the GPU was reset.
    pub ecc_corrected: Read<u64>,
    /// Rows replaced by spare ones (from Ampere on).
    pub remapped: Read<RemappedRows>,
    /// Whether pages wait for a reset to be taken out of use (before Ampere).
    pub pages_pending: Read<bool>,
    /// Whether memory is damaged beyond repair.
    pub unrepairable: Read<bool>,
    /// What the driver says it needs, by its numbers.
    pub recovery_action: Read<u64>,
    /// In degrees Celsius.
    pub temperature: Read<u32>,
    /// That of its memory, in degrees Celsius.
    pub memory_temperature: Read<u32>,
    /// Degrees that are left until clocks are held down; it may be at or below 0 on healthy boards.
    pub margin: Read<i32>,
    /// In milliwatts.
    pub power: Read<u32>,
    /// Why its clocks are not higher, by the driver's bits.
    pub clock_reasons: Read<u64>,
    /// For how long they were held down.
    pub slowdown: Read<SlowdownTimes>,
    /// The clocks themselves.
    pub clocks: Read<Clocks>,
    /// The PCIe link as it is; it rests when the GPU does.
    pub pcie: Read<PcieLink>,
    /// The best that GPU and slot can do.
    pub pcie_max: Read<PcieLink>,
    /// PCIe packets that were sent again.
    pub pcie_replays: Read<u32>,
    /// NVLinks in the order of their numbers.
    pub nvlinks: Vec<LinkReading>,
    /// Whether it is part of the fabric.
    pub fabric: Read<FabricInfo>,
    /// Whether it is split (MIG).
    pub mig: Read<bool>,
    /// Share of time in which it worked, in percent.
    pub utilization: Read<u32>,
    /// Memory in use and in all, in bytes.
    pub memory: Read<(u64, u64)>,
    /// Processes with a compute context.
    pub processes: Read<Vec<GpuProcess>>,
    /// What changes slowly and is read seldom; none if it was not read this time.
    pub details: Option<Box<GpuDetails>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(bus: u8) -> GpuIdentity {
        let address = PciAddress { domain: 0, bus, device: 0 };
        GpuIdentity { address, uuid: format!("GPU-{bus}"), name: "H100".to_owned(), serial: None }
    }

    /// Buses as they are told by place; `lost` are the places that do not answer and stand under an older name.
    fn settled(reported: &[u8], lost: &[u32], known: &[u8]) -> Vec<Option<u8>> {
        let mut readings: Vec<GpuReading> = (0..)
            .zip(reported)
            .map(|(index, bus)| {
                let trouble = lost.contains(&index).then_some(GpuTrouble::Lost);
                let identity = (*bus > 0).then(|| identity(*bus));
                GpuReading { index, identity, trouble, ..GpuReading::default() }
            })
            .collect();
        let known: Vec<GpuIdentity> = known.iter().map(|bus| identity(*bus)).collect();
        settle(&mut readings, &known);
        readings.into_iter().map(|of| of.identity.map(|of| of.address.bus)).collect()
    }

    #[test]
    fn a_gpu_that_is_lost_in_another_order_is_the_one_that_is_left() {
        // 4 was counted last and is counted first now; 3 does not answer at the place where 4 was.
        assert_eq!(settled(&[4, 1, 2, 4], &[3], &[1, 2, 3, 4]), [Some(4), Some(1), Some(2), Some(3)]);
        assert_eq!(settled(&[1, 2, 3], &[2], &[1, 2, 3]), [Some(1), Some(2), Some(3)], "in its place");
        assert_eq!(settled(&[2, 1, 0], &[2], &[1, 2, 3]), [Some(2), Some(1), Some(3)]);
    }

    #[test]
    fn where_it_may_be_one_of_several_nobody_is_blamed() {
        assert_eq!(settled(&[4, 3, 3, 4], &[2, 3], &[1, 2, 3, 4]), [Some(4), Some(3), None, None]);
        assert_eq!(settled(&[1, 0], &[1], &[1]), [Some(1), None]);
    }

    #[test]
    fn two_that_say_they_sit_in_the_same_place_are_not_one() {
        assert_eq!(settled(&[1, 1], &[], &[1]), [Some(1), None]);
        assert_eq!(settled(&[1, 1], &[], &[1, 2]), [Some(1), None], "it answers: it is not the missing one");
    }
}

//! GPU values that are read rarely: they change slowly, or reading them is expensive. Absent is not zero.

use serde::{Deserialize, Serialize};

use super::read::Sampled;
use mainstay_model::pci::PciAddress;

/// GPU values that are read rarely: they change slowly, or reading them is expensive.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuDetails {
    /// ECC errors by place.
    pub ecc: Vec<EccCount>,
    /// Errors of the memory on the chip.
    pub sram: Sampled<SramErrors>,
    /// Retired pages (before Ampere): after many corrected errors, and after an uncorrected one.
    pub pages_retired: Sampled<(u32, u32)>,
    /// Maximum temperature of the GPU, in degrees Celsius.
    pub hottest: Sampled<u32>,
    /// Maximum temperature of its memory, in degrees Celsius.
    pub memory_hottest: Sampled<u32>,
    /// The temperature at which clocks are slowed down, in degrees Celsius.
    pub slowdown_at: Sampled<u32>,
    /// The thermal margin below which clocks are slowed down, in degrees Celsius.
    pub slowdown_margin: Sampled<i32>,
    /// The power limit, in milliwatts.
    pub power_limit: Sampled<u32>,
    /// Whether the driver stays loaded while no process uses the GPU (persistence mode).
    pub persistence: Sampled<bool>,
    /// Whether ECC is on.
    pub ecc_on: Sampled<bool>,
    /// Whether a processor on the GPU does the driver's work (GSP).
    pub gsp: Sampled<bool>,
    /// Version of the board's firmware (VBIOS).
    pub vbios: Sampled<String>,
    /// Whether the board's configuration memory (InfoROM) is intact.
    pub inforom_valid: Sampled<bool>,
    /// Parts of the GPU that its next reset replaces by spare ones: memory channels, processors.
    pub repairs: Sampled<(bool, bool)>,
    /// Errors on the NVLinks.
    pub links: Vec<LinkErrors>,
    /// Which other GPUs it reaches over NVLink.
    pub peers: Vec<PeerAccess>,
}

/// Whether a GPU reaches another one over NVLink (peer to peer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerAccess {
    /// The other GPU.
    pub peer: PciAddress,
    /// NVML's status: 0 reached, 4 switched off, 6 unknown, others not reached.
    pub status: u32,
}

/// ECC errors in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EccCount {
    /// Where.
    pub place: EccPlace,
    /// Whether they were corrected.
    pub corrected: bool,
    /// Whether they are counted over the GPU's life; otherwise since the driver was loaded or the GPU was reset.
    pub lifetime: bool,
    /// How many.
    pub count: u64,
}

/// A part of a GPU with ECC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EccPlace {
    /// The memory outside the chip.
    Dram,
    /// The memory on the chip.
    Sram,
}

/// Errors of the memory on the chip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SramErrors {
    /// Uncorrected, since the driver was loaded or the GPU was reset.
    pub uncorrected: u64,
    /// Uncorrected, over the GPU's life.
    pub uncorrected_lifetime: u64,
    /// Corrected, since the driver was loaded or the GPU was reset.
    pub corrected: u64,
    /// The driver reports that the errors are too many and the board should be replaced.
    pub threshold_exceeded: bool,
}

/// Errors on one NVLink since the driver was loaded; `None` where the driver does not report them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LinkErrors {
    /// Its number.
    pub link: u32,
    /// Replayed packets.
    pub replays: Option<u64>,
    /// Recoveries of the link.
    pub recoveries: Option<u64>,
    /// Packets damaged by checksum (CRC).
    pub crc: Option<u64>,
    /// Damaged packets received, and symbols that the link itself found damaged (fifth generation).
    pub damaged_packets: Option<u64>,
    /// Successful recoveries (fifth generation).
    pub recovered: Option<u64>,
    /// Failed recoveries (fifth generation).
    pub recovery_failed: Option<u64>,
    /// Bit error rate after correction (fifth generation).
    pub effective_ber: Option<f64>,
    /// Symbol error rate after correction (fifth generation).
    pub symbol_ber: Option<f64>,
    /// The PCI address of the switch or GPU at the other end.
    pub remote: Option<PciAddress>,
}

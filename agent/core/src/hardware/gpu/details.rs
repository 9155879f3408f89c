//! What is read of a GPU seldom: it changes slowly, or each reading costs much. Absent is not zero.

use serde::{Deserialize, Serialize};

use super::reading::Read;
use crate::base::pci::PciAddress;

/// What is read of a GPU seldom: it changes slowly, or each reading costs much.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuDetails {
    /// ECC errors by place.
    pub ecc: Vec<EccCount>,
    /// Errors of the memory on the chip.
    pub sram: Read<SramErrors>,
    /// Pages taken out of use (before Ampere): after many corrected errors, after one that could not be.
    pub pages_retired: Read<(u32, u32)>,
    /// Temperature of the GPU above which it counts as too hot, in degrees Celsius.
    pub hottest: Read<u32>,
    /// The same of its memory.
    pub memory_hottest: Read<u32>,
    /// The temperature at which clocks are held down.
    pub slowdown_at: Read<u32>,
    /// The margin below which clocks are held down, in degrees.
    pub slowdown_margin: Read<i32>,
    /// The power it may draw, in milliwatts.
    pub power_limit: Read<u32>,
    /// Whether the driver stays loaded while nobody uses the GPU.
    pub persistence: Read<bool>,
    /// Whether ECC is on.
    pub ecc_on: Read<bool>,
    /// Whether the driver's work is done by a processor on the GPU.
    pub gsp: Read<bool>,
    /// Version of the board's firmware.
    pub vbios: Read<String>,
    /// Whether the board's own memory of its configuration is intact.
    pub inforom_valid: Read<bool>,
    /// Parts of the GPU that are replaced by spare ones at its next reset: of its memory's channels, of its processors.
    pub repairs: Read<(bool, bool)>,
    /// What went over the NVLinks wrongly.
    pub links: Vec<LinkErrors>,
    /// Which other GPUs it reaches over NVLink.
    pub peers: Vec<PeerAccess>,
}

/// Whether a GPU reaches another one over NVLink (peer to peer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerAccess {
    /// The other one.
    pub peer: PciAddress,
    /// By NVML's numbers: 0 it does, 4 it was switched off, 6 not known, others it does not.
    pub status: u32,
}

/// ECC errors in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EccCount {
    /// Where.
    pub place: EccPlace,
    /// Whether they were corrected.
    pub corrected: bool,
    /// Whether they are counted over the GPU's life; else since the driver was loaded or the GPU was reset.
    pub lifetime: bool,
    /// How many.
    pub count: u64,
}

/// A part of a GPU with ECC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EccPlace {
    /// The memory beside the chip.
    Dram,
    /// The memory on the chip.
    Sram,
}

/// Errors of the memory on the chip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SramErrors {
    /// Not corrected, since the driver was loaded or the GPU was reset.
    pub uncorrected: u64,
    /// The same over its life.
    pub uncorrected_lifetime: u64,
    /// Corrected, since the driver was loaded or the GPU was reset.
    pub corrected: u64,
    /// The driver says that there are so many that the board should be replaced.
    pub threshold_exceeded: bool,
}

/// What went wrong on one NVLink since the driver was loaded; none where the driver does not tell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LinkErrors {
    /// Its number.
    pub link: u32,
    /// Packets sent again.
    pub replays: Option<u64>,
    /// Times the link had to recover.
    pub recoveries: Option<u64>,
    /// Damaged packets, by checksum.
    pub crc: Option<u64>,
    /// Packets that came damaged, and words that the link itself found so (fifth generation).
    pub damaged_packets: Option<u64>,
    /// Times a recovery worked (fifth generation).
    pub recovered: Option<u64>,
    /// Times a recovery failed (fifth generation).
    pub recovery_failed: Option<u64>,
    /// Share of bits that are wrong after correction (fifth generation).
    pub effective_ber: Option<f64>,
    /// Share of symbols that are wrong after correction (fifth generation).
    pub symbol_ber: Option<f64>,
    /// What is at the other end: the PCI address of a switch or a GPU.
    pub remote: Option<PciAddress>,
}

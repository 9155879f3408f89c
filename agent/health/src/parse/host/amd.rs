//! Messages of AMD's GPU driver: `amdgpu 0000:c1:00.0: amdgpu: GPU reset(4) failed`.

use super::{OfDevice, about, contains_any};
use mainstay_model::kernel::{KernelClass, KernelReport};
use mainstay_model::pci::PciAddress;

use KernelClass::{GpuInitFailed, GpuMemoryWornOut, GpuOffBus, GpuReset, GpuResetFailed, GpuUncorrected};

pub(super) fn of_device(_: &str, (driver, device, text): OfDevice<'_>) -> Option<KernelReport> {
    if driver != "amdgpu" {
        return None;
    }
    let text = text.strip_prefix("amdgpu: ").unwrap_or(text);
    let lower = text.to_ascii_lowercase();
    let gpu = PciAddress::parse(device)?.to_string();
    let class = if contains_any(&lower, &["lost from bus", "lost from the bus"]) {
        GpuOffBus
    } else if lower.starts_with("fatal error during gpu init") {
        GpuInitFailed
    } else if lower.starts_with("gpu reset") && lower.contains("succeeded") {
        GpuReset
    } else if contains_any(&lower, &["gpu recovery failed", "asic reset failed"])
        || (lower.starts_with("gpu reset") && lower.contains("failed"))
    {
        GpuResetFailed
    } else if is_worn_out(&lower) {
        GpuMemoryWornOut
    } else if is_uncorrected(&lower) {
        GpuUncorrected
    } else {
        return None;
    };
    Some(about(class, Some(&gpu)))
}

/// `2 uncorrectable hardware errors detected in umc block`, `uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!`. A count
/// of zero is no error.
fn is_uncorrected(lower: &str) -> bool {
    let Some((before, rest)) = lower.split_once("uncorrectable hardware error") else { return false };
    let count = before
        .trim_end()
        .trim_end_matches(" new")
        .rsplit(' ')
        .next()
        .and_then(|word| word.parse::<u64>().ok());
    rest.contains("detected") && count != Some(0)
}

/// `RAS records:257 exceeds threshold:256`, `Saved bad pages 270 reaches threshold value 256`.
fn is_worn_out(lower: &str) -> bool {
    (lower.starts_with("ras records") && lower.contains("exceed"))
        || (lower.contains("bad page") && contains_any(lower, &["reaches threshold", "exceeds threshold"]))
}

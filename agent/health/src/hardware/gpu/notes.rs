//! Unusual readings of a GPU that do not count against it yet, and why.

use super::limits::{BUSY_PERCENT, DeviceLimits};
use super::reading::GpuReading;
use super::readings::{BRAKE, HARDWARE, HEAT, Readings};
use super::rules::POWER_BRAKE;

/// The notes as sentences. They repeat nothing that already counts against the GPU.
pub(super) fn notes(readings: &Readings, limits: &DeviceLimits) -> Vec<String> {
    let Some(reading) = readings.last.as_ref().filter(|reading| reading.trouble.is_none()) else {
        return Vec::new();
    };
    [slowdown(readings, reading, limits), lanes(readings, reading)].into_iter().flatten().collect()
}

fn slowdown(readings: &Readings, reading: &GpuReading, limits: &DeviceLimits) -> Option<String> {
    let reasons = *reading.clock_reasons.value()?;
    let (check, by, minutes) = if reasons & BRAKE != 0 {
        (POWER_BRAKE, "the power supply's brake", readings.brake.count())
    } else if reasons & HEAT != 0 {
        ("slowed_down", "heat", readings.slow.count())
    } else if reasons & HARDWARE != 0 {
        ("slowed_down", "the hardware", readings.slow.count())
    } else {
        return None;
    };
    (!readings.holds(check)).then(|| {
        let limit = limits.slow_minutes;
        format!(
            "its clocks are held down by {by}; this counts from {limit} of 10 minutes on, and was so in {minutes}"
        )
    })
}

/// Every idle link drops to a lower generation, but never to fewer lanes.
fn lanes(readings: &Readings, reading: &GpuReading) -> Option<String> {
    let (now, best) = (reading.pcie.value()?, reading.pcie_max.value()?);
    let narrow = now.width > 0 && now.width < best.width;
    (narrow && !readings.holds("pcie_link")).then(|| {
        format!(
            "its PCIe link has {} of {} lanes; this counts when it stays so while the GPU is at least {BUSY_PERCENT} % busy",
            now.width, best.width
        )
    })
}

//! PCIe, memory, CPUs, heat.

use super::{OfDevice, about, between, contains_any, starts_with_any, word_after};
use mainstay_model::kernel::{KernelClass, KernelReport};
use mainstay_model::pci::PciAddress;

use KernelClass::{
    AerCorrected, AerNonFatal, AerUncorrected, CpuThrottled, CriticalTemperature, GpuOffBus, MachineCheck,
    MachineCheckCorrected, NetworkCard, NvmeLost, PcieSlotDown, PcieSlotUp,
};

pub(super) fn report(message: &str) -> Option<KernelReport> {
    const LINE_PARSERS: [fn(&str) -> Option<KernelReport>; 5] =
        [heat, edac, memory_failure, firmware, machine_check];
    LINE_PARSERS.iter().find_map(|reader| reader(message))
}

/// PCIe error reporting and hotplug: `pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: …`, `nvidia 0000:01:00.0: PCIe
/// Bus Error: severity=Corrected, …`, `pcieport …: pciehp: Slot(3): Link Down`.
pub(super) fn of_device(_: &str, (driver, reporter, text): OfDevice<'_>) -> Option<KernelReport> {
    if is_gone(text) {
        return Some(gone(driver, reporter));
    }
    if let Some(slot) = text.strip_prefix("pciehp: Slot(") {
        let (_, what) = slot.split_once("): ")?;
        let class = match what {
            what if starts_with_any(what, &["Link Down", "Card not present"]) => PcieSlotDown,
            what if starts_with_any(what, &["Link Up", "Card present"]) => PcieSlotUp,
            _ => return None,
        };
        return Some(about(class, Some(reporter)));
    }
    if let Some(rest) = text.strip_prefix("DPC: ") {
        let contained = starts_with_any(rest, &["containment event", "unmasked uncorrectable"]);
        return contained.then(|| about(AerUncorrected, Some(reporter)));
    }
    let rest = text.strip_prefix("AER: ").or_else(|| text.strip_prefix("PCIe Bus Error: "))?;
    let lower = rest.to_ascii_lowercase();
    let class = if starts_with_any(&lower, &["device recovery failed", "subordinate device reset failed"]) {
        AerUncorrected
    } else if lower.contains("uncorrect") {
        if contains_any(&lower, &["non-fatal", "nonfatal"]) { AerNonFatal } else { AerUncorrected }
    } else if lower.contains("correct") {
        AerCorrected
    } else {
        return None;
    };
    // A port may report on behalf of the device behind it.
    let behind = rest.split_once(" from ").or_else(|| rest.split_once("received: "));
    let behind =
        behind.and_then(|(_, device)| device.split_whitespace().next()).filter(|word| word.contains(':'));
    Some(about(class, behind.or(Some(reporter))))
}

/// `nvidia 0000:3b:00.0: Unable to change power state from D3cold to D0, device inaccessible`, `vfio-pci 0000:3b:00.0: not ready
/// 65535ms after bus reset; giving up`: all reads from the device return ones.
fn is_gone(text: &str) -> bool {
    let asleep = text.contains("inaccessible")
        && contains_any(text, &["nable to change power state from", "can't change power state from"])
        && contains_any(text, &["device inaccessible", "config space inaccessible"]);
    asleep || (text.starts_with("not ready ") && text.ends_with("; giving up"))
}

fn gone(driver: &str, device: &str) -> KernelReport {
    let class = match driver {
        "nvidia" => GpuOffBus,
        "nvme" => NvmeLost,
        "mlx5_core" | "mlx4_core" | "bnxt_en" | "ice" => NetworkCard,
        _ => AerUncorrected,
    };
    let gpu = PciAddress::parse(device).filter(|_| class == GpuOffBus).map(|gpu| gpu.to_string());
    about(class, Some(gpu.as_deref().unwrap_or(device)))
}

/// `CPU3: Package temperature above threshold, cpu clock throttled (total events = 7)`. Since 5.5 the kernel writes `is above
/// threshold, cpu clock is throttled`.
fn heat(message: &str) -> Option<KernelReport> {
    let text = message.strip_prefix("mce: ").unwrap_or(message);
    let throttled = ["above threshold, cpu clock throttled", "above threshold, cpu clock is throttled"];
    if text.starts_with("CPU") && contains_any(text, &throttled) {
        return Some(about(CpuThrottled, text.split(':').next()));
    }
    if !text.contains("emperature reached") {
        return None;
    }
    let lower = text.to_ascii_lowercase();
    let critical = lower.contains("critical temperature reached")
        && starts_with_any(&lower, &["thermal", "acpi", "critical"]);
    critical.then(|| about(CriticalTemperature, None))
}

/// `EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (…)`. Older kernels omit the number.
fn edac(message: &str) -> Option<KernelReport> {
    let (controller, what) = message.strip_prefix("EDAC ")?.split_once(": ")?;
    let class = what.split_whitespace().take(2).find_map(|word| match word {
        "CE" => Some(MachineCheckCorrected),
        "UE" => Some(MachineCheck),
        _ => None,
    })?;
    let module = word_after(what, " on ").unwrap_or(controller);
    Some(about(class, Some(module)))
}

fn memory_failure(message: &str) -> Option<KernelReport> {
    // ARM CPUs: an asynchronous error from memory or a device.
    if message.starts_with("SError Interrupt on CPU") {
        return Some(about(MachineCheck, word_after(message, "SError Interrupt on ")));
    }
    const LOST: [&str; 5] = [
        "Memory failure: ",
        "MCE: Killing ",
        "mce: Uncorrected hardware memory error",
        "NMI: PCI system error (SERR)",
        "NMI: memory parity error",
    ];
    if starts_with_any(message, &LOST) {
        return Some(about(MachineCheck, None));
    }
    message.starts_with("RAS: Soft-offlining pfn").then(|| about(MachineCheckCorrected, None))
}

/// The firmware's own reports: `{1}[Hardware Error]: event severity: fatal`. Reports without the leading number are about the previous
/// boot (BERT) and cannot be acted on.
fn firmware(message: &str) -> Option<KernelReport> {
    let (number, what) = of_firmware(message)?;
    let severity = what.strip_prefix("event severity: ")?;
    let corrected = starts_with_any(severity, &["corrected", "info"]);
    if corrected {
        return Some(about(MachineCheckCorrected, None));
    }
    Some(about(MachineCheck, Some(&report_of_firmware(number))))
}

/// A later line of the same report names its subject: `{1}[Hardware Error]:   section_type: PCIe error`. Returns the report if it is
/// about PCIe and not about memory or a CPU.
pub(in crate::parse) fn pcie_of_firmware(message: &str) -> Option<String> {
    let (number, what) = of_firmware(message)?;
    what.starts_with("section_type: PCIe").then(|| report_of_firmware(number))
}

fn of_firmware(message: &str) -> Option<(&str, &str)> {
    let (number, what) = message.strip_prefix('{')?.split_once("}[Hardware Error]: ")?;
    Some((number, what.trim_start()))
}

fn report_of_firmware(number: &str) -> String {
    format!("report {number} of the firmware")
}

fn machine_check(message: &str) -> Option<KernelReport> {
    let what = message
        .strip_prefix("mce: [Hardware Error]: ")
        .or_else(|| message.strip_prefix("[Hardware Error]: "))?;
    if starts_with_any(what, &["Corrected error", "Machine check events logged"]) {
        return Some(about(MachineCheckCorrected, None));
    }
    // Errors found by polling, and not by an exception, were corrected or are left from the previous boot.
    let polled = contains_any(what, &[": Machine Check: 0 Bank ", ": Machine Check Exception: 0 Bank "]);
    if what.starts_with("CPU ") && polled {
        return Some(about(MachineCheckCorrected, between(what, "CPU ", ":")));
    }
    let uncorrected = what.contains("Machine Check Exception")
        || starts_with_any(
            what,
            &[
                "Uncorrected",
                "System Fatal error",
                "Deferred error",
                "Machine check: Processor context corrupt",
            ],
        );
    uncorrected.then(|| about(MachineCheck, between(what, "CPU ", ":")))
}

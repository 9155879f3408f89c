//! Network cards. Link changes are read from the ports themselves.

use super::{OfDevice, about, between, contains_any};
use mainstay_model::kernel::{KernelClass, KernelReport};

use KernelClass::{NetworkCard, NetworkCardBack, NetworkCardWarning, TransmitTimeout};

pub(super) fn report(message: &str) -> Option<KernelReport> {
    // IPoIB: `ib0: transmit timeout: latency 1234 msecs`.
    if let Some((name, _)) = message.split_once(": transmit timeout: latency ") {
        return (!name.contains(' ')).then(|| about(TransmitTimeout, Some(name)));
    }
    let rest = message.strip_prefix("NETDEV WATCHDOG: ")?;
    Some(about(TransmitTimeout, rest.split([' ', ':']).next()))
}

/// Messages of a card's own driver.
pub(super) fn of_device(_: &str, (driver, device, text): OfDevice<'_>) -> Option<KernelReport> {
    // Since 6.3 the kernel puts the card first, as in all messages about a card.
    if let Some((name, _)) = text.split_once(": NETDEV WATCHDOG: ") {
        return Some(about(TransmitTimeout, Some(name)));
    }
    // Used by many cards, in two forms.
    if contains_any(text, &["Unit Hang", "transmit timed out"]) {
        return Some(about(TransmitTimeout, Some(device)));
    }
    let class = match driver {
        "mlx5_core" | "mlx4_core" => mellanox(text)?,
        "bnxt_en" => broadcom(text)?,
        "ice" | "idpf" | "iavf" | "i40e" | "ixgbe" | "igb" | "igc" | "e1000e" => intel(text)?,
        "ena" | "efa" => amazon(text)?,
        "gve" => google(text)?,
        _ => return None,
    };
    Some(about(class, Some(device)))
}

fn mellanox(text: &str) -> Option<KernelClass> {
    const TROUBLE: [&str; 18] = [
        "Internal error detected",
        "initializing state, aborting",
        "health compromised",
        "unrecoverable",
        "Will cause a leak of a command resource",
        "Fatal error",
        "fatal sensor",
        "firmware internal error",
        "handling bad device",
        "not responding",
        "device is gone",
        "health recovery failed",
        "health recovery flow aborted",
        "recovery failed",
        "mlx5_init_one failed",
        "mlx5_load_one failed",
        "probe_one failed",
        "pci_err_detected",
    ];
    const WARNING: [&str; 4] =
        ["port module event[error]", "high temperature", "insufficient power", "power budget exceeded"];
    const BACK: [&str; 2] = ["health recovery succeeded", "recovery succeeded"];
    // A command that the firmware refused is the caller's fault, and such lines come in floods.
    if text.starts_with("mlx5_cmd_out_err") || text.starts_with("mlx5_cmd_check") {
        return None;
    }
    if contains_any(text, &BACK) {
        return Some(NetworkCardBack);
    }
    // The firmware reports minor events in the same form, with their severity.
    if let Some(severity) = between(text, "severity(", ")").and_then(|number| number.parse::<u8>().ok()) {
        return match severity {
            0..=3 => Some(NetworkCard),
            4 => Some(NetworkCardWarning),
            _ => None,
        };
    }
    if contains_any(text, &TROUBLE) {
        return Some(NetworkCard);
    }
    if contains_any(&text.to_ascii_lowercase(), &WARNING) {
        return Some(NetworkCardWarning);
    }
    text.contains("TX timeout detected").then_some(TransmitTimeout)
}

fn broadcom(text: &str) -> Option<KernelClass> {
    const TROUBLE: [&str; 6] = [
        "Firmware not responding",
        "Firmware health status",
        "Firmware fatal",
        "heartbeat stopped",
        "FW reset failed",
        "Abandoning msg",
    ];
    failure_class(text, &TROUBLE)
}

fn intel(text: &str) -> Option<KernelClass> {
    const TROUBLE: [&str; 6] = [
        "Rebuild failed",
        "Unable to recover",
        "Fatal FW error",
        "critical error detected",
        "PCIe link lost",
        "Adapter removed",
    ];
    failure_class(text, &TROUBLE)
}

fn amazon(text: &str) -> Option<KernelClass> {
    if text.contains("Device reset completed successfully") {
        return Some(NetworkCardBack);
    }
    const TROUBLE: [&str; 4] = [
        "Keep alive watchdog timeout",
        "Reset attempt failed",
        "Device reset failed",
        "Wait for completion (polling) timeout",
    ];
    failure_class(text, &TROUBLE)
}

fn google(text: &str) -> Option<KernelClass> {
    const TROUBLE: [&str; 2] = ["AQ commands timed out", "Reset failed"];
    failure_class(text, &TROUBLE)
}

fn failure_class(text: &str, words: &[&str]) -> Option<KernelClass> {
    let late = contains_any(text, &["TX timeout detected", "tx_timeout", "transmit queue"]);
    if contains_any(text, words) { Some(NetworkCard) } else { late.then_some(TransmitTimeout) }
}

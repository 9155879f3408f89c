//! Kernel messages about the host: PCIe, memory and CPU errors, kills, hangs, disks, cards, crashes.
//!
//! Lines are recognized by how they start, so that a program cannot forge a kernel message through its name. Messages of normal
//! operation (a link that comes up, a volume that is mounted) are no reports.

mod amd;
mod hardware;
mod network;
mod storage;
mod system;

pub(super) use hardware::pcie_of_firmware;
pub(super) use system::group_of_kill;

pub use storage::is_virtual_disk;

use mainstay_model::id::Pid;
use mainstay_model::kernel::{KernelClass, KernelReport, LogPlace};

/// Parses a line of any host class.
pub fn report(message: &str) -> Option<KernelReport> {
    // Storms are mostly about devices, which most parsers do not handle.
    if let Some(device) = of_device(message) {
        const OF_DEVICES: [fn(&str, OfDevice<'_>) -> Option<KernelReport>; 4] =
            [network::of_device, amd::of_device, hardware::of_device, storage::of_device];
        return OF_DEVICES.iter().find_map(|reader| reader(message, device));
    }
    const LINE_PARSERS: [fn(&str) -> Option<KernelReport>; 4] =
        [system::report, network::report, storage::report, hardware::report];
    LINE_PARSERS.iter().find_map(|reader| reader(message))
}

pub(super) fn about(class: KernelClass, subject: Option<&str>) -> KernelReport {
    let subject = subject.map(|subject| subject.trim().to_owned()).filter(|subject| !subject.is_empty());
    KernelReport { class, subject, pid: None, process: None, cgroup: None, place: LogPlace::default() }
}

/// The text between two marks.
fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split_once(after).map(|(found, _)| found)
}

fn word_after<'a>(text: &'a str, before: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split(|letter: char| letter.is_whitespace() || letter == ',' || letter == ':').next()
}

fn starts_with_any(text: &str, beginnings: &[&str]) -> bool {
    beginnings.iter().any(|beginning| text.starts_with(beginning))
}

fn contains_any(text: &str, parts: &[&str]) -> bool {
    parts.iter().any(|part| text.contains(part))
}

/// A device's line: the driver, the device and the text.
type OfDevice<'a> = (&'a str, &'a str, &'a str);

/// `driver 0000:3b:00.0: text` or `driver 0000:3b:00.0 ens1: text`: the driver, the device and the text.
fn of_device(message: &str) -> Option<OfDevice<'_>> {
    let (driver, rest) = message.split_once(' ')?;
    let end = rest.find(|letter: char| !(letter.is_ascii_hexdigit() || letter == ':' || letter == '.'))?;
    let device = rest.get(..end)?.trim_end_matches(':');
    let is_address = device.len() >= 7 && device.contains('.') && device.matches(':').count() >= 1;
    is_address.then(|| (driver, device, rest.get(end..).unwrap_or("").trim_start()))
}

fn pid(text: &str) -> Option<Pid> {
    text.trim().parse().ok().filter(|pid| *pid > 0).map(Pid)
}

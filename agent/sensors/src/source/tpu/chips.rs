//! Chips on the PCI bus, from sysfs.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use mainstay_health::hardware::tpu::{Chip, Holders, chip_kind};
use mainstay_model::pci::PciAddress;

/// Google's vendor id on the PCI bus; its network cards and disks have it too.
const GOOGLE: u16 = 0x1ae0;

/// The chip at one address: the generation, the first function, the device nodes.
type ChipNodes = (&'static str, u8, Vec<Node>);

/// The chips in the order of their device nodes. Empty if there is no PCI bus.
pub(super) fn on_the_bus(sys: &Path) -> Result<Vec<Chip>, String> {
    let directory = sys.join("bus/pci/devices");
    let devices = match std::fs::read_dir(&directory) {
        Ok(devices) => devices,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(format!("reading {}: {error}", directory.display())),
    };
    // If each core is a separate PCI function, the functions of one address are one chip.
    let mut chips: BTreeMap<PciAddress, ChipNodes> = BTreeMap::new();
    for device in devices.flatten().map(|entry| entry.path()) {
        let name = device.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let (Some(address), Some(kind)) = (PciAddress::parse(name), kind_of(&device)) {
            let function = function_of(name);
            let chip = chips.entry(address).or_insert((kind, function, Vec::new()));
            chip.1 = chip.1.min(function);
            chip.2.extend(node_of(&device));
        }
    }
    let mut chips: Vec<_> = chips.into_iter().collect();
    for (_, (_, _, nodes)) in &mut chips {
        nodes.sort();
    }
    // Chips without a loaded driver come last.
    chips.sort_by_key(|(address, (_, _, nodes))| {
        (nodes.is_empty(), nodes.first().map(|node| node.number), *address)
    });
    let chip = |(number, (address, (kind, function, nodes))): (usize, (PciAddress, ChipNodes))| Chip {
        number: u32::try_from(number).unwrap_or(u32::MAX),
        address,
        function,
        kind,
        nodes: nodes.into_iter().map(|node| node.path).collect(),
        holders: Holders::Known(Vec::new()),
    };
    Ok(chips.into_iter().enumerate().map(chip).collect())
}

/// The PCI function in a name such as `0000:00:05.1`; 0 if there is none.
fn function_of(name: &str) -> u8 {
    name.rsplit_once('.').and_then(|(_, function)| u8::from_str_radix(function, 16).ok()).unwrap_or(0)
}

fn kind_of(device: &Path) -> Option<&'static str> {
    let number = |name: &str| {
        let text = std::fs::read_to_string(device.join(name)).ok()?;
        u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    };
    (number("vendor")? == GOOGLE).then_some(())?;
    chip_kind(number("device")?, number("subsystem_device").unwrap_or(0))
}

/// A device node, ordered by its number and not by its name.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Node {
    number: u32,
    path: String,
}

/// `/dev/accelN` for the generations with Google's own driver, `/dev/vfio/GROUP` for later ones.
fn node_of(device: &Path) -> Option<Node> {
    if let Some(name) = first_entry(&device.join("accel")) {
        let number = name.strip_prefix("accel")?.parse().ok()?;
        return Some(Node { number, path: format!("/dev/{name}") });
    }
    let group = std::fs::read_link(device.join("iommu_group")).ok()?;
    let group = group.file_name()?.to_str()?;
    Some(Node { number: group.parse().ok()?, path: format!("/dev/vfio/{group}") })
}

fn first_entry(directory: &PathBuf) -> Option<String> {
    let entry = std::fs::read_dir(directory).ok()?.flatten().next()?;
    entry.file_name().to_str().map(str::to_owned)
}

//! The network that training uses, read from sysfs: ports of RDMA devices, and the interfaces that matter. It judges nothing.
//!
//! Ports that a management function reserves are never read: each of their counters costs a failing firmware command and a
//! line in the kernel log. The device's product data show which ports these are.

mod device;
mod interface;
mod near;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use mainstay_health::host::fabric::{FabricSample, PortReading};
use mainstay_health::parse::sysfs::names;

use device::Device;

/// Reads the network.
#[derive(Debug)]
pub struct FabricSource {
    sys: PathBuf,
    exclude: Vec<String>,
    /// Interfaces that the operator expects, in addition to those of RDMA devices.
    interfaces: Vec<String>,
    host: Option<String>,
    devices: BTreeMap<String, Device>,
}

impl FabricSource {
    /// A source over the sysfs at `sys` that leaves out the names in `exclude` and always reads `interfaces`.
    pub fn new(sys: PathBuf, exclude: Vec<String>, interfaces: Vec<String>) -> FabricSource {
        let host = host_identity(&sys);
        FabricSource { sys, exclude, interfaces, host, devices: BTreeMap::new() }
    }

    /// Reads everything once, and the PCI slots at `places`. Some of the files query a card's firmware: call it where
    /// blocking is allowed.
    pub fn sample(&mut self, places: &[String]) -> FabricSample {
        let mut sample = FabricSample { host: self.host.clone(), ..FabricSample::default() };
        let listed = match list(&self.sys.join("class/infiniband")) {
            Ok(names) => names,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                let path = self.sys.join("class/infiniband");
                sample.unreadable = Some(format!("listing {}: {error}", path.display()));
                return sample;
            }
        };
        self.devices.retain(|name, _| listed.contains(name));
        let mut interfaces: BTreeSet<String> = self.interfaces.iter().cloned().collect();
        for name in listed {
            if self.exclude.iter().any(|pattern| names(pattern, &name)) {
                sample.passed_over.insert(name, "fabric.exclude names it".to_owned());
                continue;
            }
            let device = self.device(&name);
            if let Some(why) = &device.passed_over {
                sample.passed_over.insert(name, why.clone());
                continue;
            }
            for link in device.read() {
                interfaces.extend(link.members);
                sample.links.push(link.reading);
            }
        }
        for name in interfaces {
            if let Some(reading) = interface::read_link(&self.sys, &name) {
                sample.links.push(reading);
            }
        }
        self.leave_out(&mut sample);
        sample.slots = places.iter().filter_map(|place| slot(&self.sys, place)).collect();
        sample
    }

    /// The data of a device; it is read again when the name belongs to other hardware.
    fn device(&mut self, name: &str) -> &mut Device {
        let path = self.sys.join("class/infiniband").join(name);
        let serial = device::serial(&path);
        if self.devices.get(name).is_some_and(|device| device.serial != serial) {
            self.devices.remove(name);
        }
        let sys = &self.sys;
        self.devices.entry(name.to_owned()).or_insert_with(|| Device::open(sys, name, serial))
    }

    /// Removes excluded ports and interfaces.
    fn leave_out(&self, sample: &mut FabricSample) {
        let named = |link: &PortReading| self.exclude.iter().any(|pattern| names(pattern, &link.name));
        let left_out = sample.links.extract_if(.., |link| named(link));
        for link in left_out {
            sample.passed_over.insert(link.name, "fabric.exclude names it".to_owned());
        }
    }
}

/// Whether there are NVSwitches that are not on the PCI bus themselves (HGX B200 and later): the fabric manager reaches
/// them through a separate network card.
pub(super) fn has_switches_behind_a_card(sys: &Path) -> bool {
    let class = sys.join("class/infiniband");
    let devices = list(&class).unwrap_or_default();
    devices.iter().any(|name| device::belongs_to_fabric_manager(&class.join(name)))
}

/// The identity of this machine: it differs if a disk image is moved to another machine.
fn host_identity(sys: &Path) -> Option<String> {
    let text = read(&sys.join("class/dmi/id/product_uuid")).ok()?;
    let blank = text.chars().all(|letter| matches!(letter, '0' | 'f' | 'F' | '-'));
    (!blank).then_some(text)
}

/// The driver of the function at a PCI address; none if the slot is empty.
fn slot(sys: &Path, place: &str) -> Option<(String, Option<String>)> {
    let path = sys.join("bus/pci/devices").join(place);
    path.exists().then(|| {
        let driver = std::fs::read_link(path.join("driver")).ok();
        let name = driver.and_then(|driver| Some(driver.file_name()?.to_str()?.to_owned()));
        (place.to_owned(), name)
    })
}

/// The entries of a directory, sorted.
fn list(path: &Path) -> std::io::Result<Vec<String>> {
    let mut entries: Vec<String> =
        std::fs::read_dir(path)?.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    entries.sort();
    Ok(entries)
}

/// The content of a small file, trimmed.
fn read(path: &Path) -> std::io::Result<String> {
    Ok(std::fs::read_to_string(path)?.trim().to_owned())
}

fn describe_error(path: &Path, error: &std::io::Error) -> String {
    format!("reading {}: {error}", path.display())
}

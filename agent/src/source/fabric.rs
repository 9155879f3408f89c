//! The network that training runs over, read from sysfs: ports of RDMA devices, and the interfaces that matter. Judges
//! nothing.
//!
//! Ports that a management function keeps for itself are never read: each of their counters costs a failing command
//! of the firmware and a line in the kernel log. The device's own product data tell which these are.

mod device;
mod interface;
mod near;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use mainstay_core::formats::parse::sysfs::names;
use mainstay_core::host::fabric::{FabricSample, LinkReading};

use device::Device;

/// Reads the network.
#[derive(Debug)]
pub struct FabricSource {
    sys: PathBuf,
    exclude: Vec<String>,
    /// Interfaces that the operator expects, beside those of RDMA devices.
    interfaces: Vec<String>,
    host: Option<String>,
    devices: BTreeMap<String, Device>,
}

impl FabricSource {
    /// A source over the sysfs at `sys`, which leaves out what `exclude` names and reads `interfaces` in any case.
    pub fn new(sys: PathBuf, exclude: Vec<String>, interfaces: Vec<String>) -> FabricSource {
        let host = host_identity(&sys);
        FabricSource { sys, exclude, interfaces, host, devices: BTreeMap::new() }
    }

    /// Reads everything once, and what is in the PCI slots at `places`. It reads files, some of which ask a card's
    /// firmware: call it where blocking is allowed.
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

    /// What is known of a device; it is looked at anew when other hardware is behind the name.
    fn device(&mut self, name: &str) -> &mut Device {
        let path = self.sys.join("class/infiniband").join(name);
        let serial = device::serial(&path);
        if self.devices.get(name).is_some_and(|device| device.serial != serial) {
            self.devices.remove(name);
        }
        let sys = &self.sys;
        self.devices.entry(name.to_owned()).or_insert_with(|| Device::open(sys, name, serial))
    }

    /// Ports and interfaces that are named one by one.
    fn leave_out(&self, sample: &mut FabricSample) {
        let named = |link: &LinkReading| self.exclude.iter().any(|pattern| names(pattern, &link.name));
        let left_out = sample.links.extract_if(.., |link| named(link));
        for link in left_out {
            sample.passed_over.insert(link.name, "fabric.exclude names it".to_owned());
        }
    }
}

/// Whether there are NVSwitches that are not on the PCI bus themselves (HGX B200 and later): the fabric manager reaches
/// them by a network card of its own.
pub(super) fn has_switches_behind_a_card(sys: &Path) -> bool {
    let class = sys.join("class/infiniband");
    let devices = list(&class).unwrap_or_default();
    devices.iter().any(|name| device::belongs_to_fabric_manager(&class.join(name)))
}

/// Which machine this is: what an image of its disk on another machine does not bring along.
fn host_identity(sys: &Path) -> Option<String> {
    let text = read(&sys.join("class/dmi/id/product_uuid")).ok()?;
    let blank = text.chars().all(|letter| matches!(letter, '0' | 'f' | 'F' | '-'));
    (!blank).then_some(text)
}

/// The driver of what sits at a PCI address; none if nothing does.
fn slot(sys: &Path, place: &str) -> Option<(String, Option<String>)> {
    let path = sys.join("bus/pci/devices").join(place);
    path.exists().then(|| {
        let driver = std::fs::read_link(path.join("driver")).ok();
        let name = driver.and_then(|driver| Some(driver.file_name()?.to_str()?.to_owned()));
        (place.to_owned(), name)
    })
}

/// The entries of a directory, in their order.
fn list(path: &Path) -> std::io::Result<Vec<String>> {
    let mut entries: Vec<String> =
        std::fs::read_dir(path)?.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    entries.sort();
    Ok(entries)
}

/// A small file without the blanks around it.
fn read(path: &Path) -> std::io::Result<String> {
    Ok(std::fs::read_to_string(path)?.trim().to_owned())
}

fn reported(path: &Path, error: &std::io::Error) -> String {
    format!("reading {}: {error}", path.display())
}

//! One RDMA device and its ports.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use mainstay_health::host::fabric::{Identity, LinkKind, LinkState, PortReading, counters};
use mainstay_health::host::os::Reading;
use mainstay_health::parse::sysfs::{is_pci_function, port_rate, state_name};
use nix::errno::Errno;

use super::{describe_error, interface, list, near, read};

/// The PCI vendor of ConnectX cards.
const MELLANOX: &str = "0x15b3";

/// Marks functions that belong to the fabric manager in their product data (the bridge of HGX B200 and later).
const MANAGEMENT: &[u8] = b"SW_MNG";

/// Product data are shorter than this.
const PRODUCT_DATA: u64 = 32 << 10;

/// The constant data of a device.
#[derive(Debug)]
pub(super) struct Device {
    sys: PathBuf,
    name: String,
    pub(super) serial: Option<String>,
    /// Why it is not read.
    pub(super) passed_over: Option<String>,
    place: Option<String>,
    near: Vec<String>,
    virtual_function: bool,
    ports: Vec<Port>,
}

#[derive(Debug)]
struct Port {
    number: String,
    path: PathBuf,
    /// The counters that can be read.
    counters: Vec<(&'static str, PathBuf)>,
}

/// A port as read.
#[derive(Debug)]
pub(super) struct PortLink {
    pub(super) reading: PortReading,
    /// Interfaces that its interface joins.
    pub(super) members: Vec<String>,
}

/// The node GUID; none if the driver provides none.
pub(super) fn serial(path: &Path) -> Option<String> {
    let guid = read(&path.join("node_guid")).ok()?;
    guid.chars().any(|letter| !matches!(letter, '0' | ':')).then_some(guid)
}

impl Device {
    pub(super) fn open(sys: &Path, name: &str, serial: Option<String>) -> Device {
        let path = sys.join("class/infiniband").join(name);
        let function = std::fs::canonicalize(path.join("device")).ok();
        let place = function.as_ref().and_then(|function| {
            let name = function.file_name()?.to_str()?;
            is_pci_function(name).then(|| name.to_owned())
        });
        let passed_over = why_skipped(&path, name);
        let mut device = Device {
            near: function.as_ref().map(|function| near::gpus(sys, function)).unwrap_or_default(),
            virtual_function: path.join("device/physfn").exists(),
            sys: sys.to_owned(),
            name: name.to_owned(),
            ports: Vec::new(),
            serial,
            passed_over,
            place,
        };
        if device.passed_over.is_none() {
            let ports = list(&path.join("ports")).unwrap_or_default();
            device.ports = ports.into_iter().map(|number| Port::open(&path, number)).collect();
        }
        device
    }

    /// Reads all its ports.
    pub(super) fn read(&mut self) -> Vec<PortLink> {
        let (sys, name) = (&self.sys, &self.name);
        let mut links = Vec::new();
        for port in &mut self.ports {
            let interface = port.interface(sys, name);
            if interface.as_deref().is_some_and(|interface| interface::is_representor(sys, interface)) {
                continue;
            }
            let mut reading = PortReading {
                name: format!("{name}/{}", port.number),
                identity: Identity { serial: self.serial.clone(), place: self.place.clone() },
                kind: port.kind(),
                state: port.state(),
                rate: port.rate(),
                counters: port.read_counters(),
                near: self.near.clone(),
                virtual_function: self.virtual_function,
                interface: None,
            };
            let mut members = Vec::new();
            if reading.kind == LinkKind::Roce
                && let Some(interface) = interface
            {
                interface::add_counters(sys, &interface, &mut reading.counters);
                members = interface::members(sys, &interface);
                reading.interface = Some(interface);
            }
            links.push(PortLink { reading, members });
        }
        links
    }
}

impl Port {
    fn open(device: &Path, number: String) -> Port {
        let path = device.join("ports").join(&number);
        let there = |name: &'static str| {
            let places = ["counters", "hw_counters"].map(|directory| path.join(directory).join(name));
            places.into_iter().find(|place| place.exists()).map(|place| (name, place))
        };
        let counters = counters().into_iter().filter_map(there).collect();
        Port { number, path, counters }
    }

    fn kind(&self) -> LinkKind {
        match read(&self.path.join("link_layer")).as_deref() {
            Ok("Ethernet") => LinkKind::Roce,
            Ok("Unspecified") => LinkKind::OtherRdma,
            // Kernels before 2.6.37 had no other type.
            Ok(_) | Err(_) => LinkKind::InfiniBand,
        }
    }

    fn state(&self) -> Reading<LinkState> {
        let path = self.path.join("state");
        let logical = match read(&path) {
            Ok(text) => match state_name(&text) {
                Some(name) => name.to_owned(),
                None => {
                    return Reading::Failed(format!(
                        "{} says {text:?}, which is not a state",
                        path.display()
                    ));
                }
            },
            Err(error) => return Reading::Failed(describe_error(&path, &error)),
        };
        let physical = read(&self.path.join("phys_state")).ok();
        Reading::Value(LinkState {
            active: logical.starts_with("ACTIVE"),
            logical,
            physical: physical.and_then(|text| Some(state_name(&text)?.to_owned())),
        })
    }

    fn rate(&self) -> Reading<f64> {
        let path = self.path.join("rate");
        match read(&path) {
            Ok(text) => port_rate(&text).map_or_else(
                || Reading::NotAvailable(format!("{} says {text:?}", path.display())),
                Reading::Value,
            ),
            Err(error) => Reading::NotAvailable(describe_error(&path, &error)),
        }
    }

    /// Reads the counters. One that the driver refuses is not read again: some cards write a line to the kernel log each time.
    fn read_counters(&mut self) -> BTreeMap<String, u64> {
        let mut values = BTreeMap::new();
        self.counters.retain(|(name, path)| match read(path) {
            Ok(text) => match text.parse() {
                Ok(value) => values.insert((*name).to_owned(), value).is_none(),
                Err(_) => false,
            },
            Err(error) => {
                let refused = [Errno::EINVAL, Errno::EOPNOTSUPP, Errno::ENOENT, Errno::EPERM, Errno::EACCES];
                !refused.iter().any(|errno| error.raw_os_error() == Some(*errno as i32))
            }
        });
        values
    }

    /// The interface of a RoCE port.
    fn interface(&self, sys: &Path, device: &str) -> Option<String> {
        if let Ok(name) = read(&self.path.join("gid_attrs/ndevs/0"))
            && !name.is_empty()
        {
            return Some(name);
        }
        let all = list(&sys.join("class/infiniband").join(device).join("device/net")).ok()?;
        let number: u64 = self.number.parse().ok()?;
        let at_port = |name: &&String| {
            let port = read(&sys.join("class/net").join(name).join("dev_port")).ok();
            port.and_then(|port| port.parse::<u64>().ok()).is_some_and(|port| port + 1 == number)
        };
        match all.as_slice() {
            [only] => Some(only.clone()),
            several => several.iter().find(at_port).cloned(),
        }
    }
}

fn why_skipped(path: &Path, name: &str) -> Option<String> {
    let real = std::fs::canonicalize(path).unwrap_or_default();
    let software = name.starts_with("rxe") || name.starts_with("siw");
    if software || real.to_string_lossy().contains("/devices/virtual/") {
        return Some("it is made of software".to_owned());
    }
    if belongs_to_fabric_manager(path) {
        return Some("its product data say SW_MNG: it belongs to the fabric manager".to_owned());
    }
    None
}

/// Whether a device is a function through which the fabric manager reaches NVSwitches. Unreadable product data count as no;
/// a counter that is refused later is then not read again.
pub(super) fn belongs_to_fabric_manager(path: &Path) -> bool {
    if !read(&path.join("device/vendor")).is_ok_and(|vendor| vendor == MELLANOX) {
        return false;
    }
    let mut data = Vec::new();
    let file = File::open(path.join("device/vpd"));
    let read = file.and_then(|file| file.take(PRODUCT_DATA).read_to_end(&mut data));
    read.is_ok() && data.windows(MANAGEMENT.len()).any(|words| words == MANAGEMENT)
}

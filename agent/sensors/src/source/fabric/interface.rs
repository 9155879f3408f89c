//! Network interfaces.

use std::collections::BTreeMap;
use std::path::Path;

use mainstay_health::host::fabric::{Identity, LinkKind, LinkState, PortReading};
use mainstay_health::host::os::Reading;
use mainstay_health::parse::sysfs::{interface_rate, is_pci_function};
use nix::errno::Errno;

use super::{describe_error, near, read};

/// Reads an interface; none if it does not exist.
pub(super) fn read_link(sys: &Path, name: &str) -> Option<PortReading> {
    let path = sys.join("class/net").join(name);
    if !path.exists() {
        return None;
    }
    let function = std::fs::canonicalize(path.join("device")).ok();
    let place = function.as_ref().and_then(|function| {
        let name = function.file_name()?.to_str()?;
        is_pci_function(name).then(|| name.to_owned())
    });
    // A member of a bond has the bond's address as its address.
    let address = read(&path.join("bonding_slave/perm_hwaddr")).or_else(|_| read(&path.join("address")));
    let mut counters = BTreeMap::new();
    add_counters(sys, name, &mut counters);
    let speed = path.join("speed");
    let rate = match read(&speed) {
        Ok(text) => interface_rate(&text).map_or_else(
            || Reading::NotAvailable(format!("{} says {text:?}", speed.display())),
            Reading::Value,
        ),
        Err(error) => Reading::NotAvailable(describe_error(&speed, &error)),
    };
    Some(PortReading {
        name: name.to_owned(),
        identity: Identity { serial: address.ok().filter(|address| !address.is_empty()), place },
        kind: LinkKind::Ethernet,
        state: state(&path),
        rate,
        counters,
        interface: None,
        near: function.map(|function| near::gpus(sys, &function)).unwrap_or_default(),
        virtual_function: path.join("device/physfn").exists(),
    })
}

fn state(path: &Path) -> Reading<LinkState> {
    let carrier = path.join("carrier");
    let reported_as = |active, logical: &str| {
        Reading::Value(LinkState { active, logical: logical.to_owned(), physical: None })
    };
    match read(&carrier).as_deref() {
        Ok("1") => reported_as(true, "up"),
        Ok("0") => reported_as(false, "no carrier"),
        Ok(other) => Reading::Failed(format!("{} says {other:?}", carrier.display())),
        Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => {
            reported_as(false, "administratively down")
        }
        Err(error) => Reading::Failed(describe_error(&carrier, error)),
    }
}

/// Adds the counters of an interface to those of its port.
pub(super) fn add_counters(sys: &Path, name: &str, counters: &mut BTreeMap<String, u64>) {
    let path = sys.join("class/net").join(name);
    let number = |file: &str| read(&path.join(file)).ok()?.parse::<u64>().ok();
    // carrier_changes also counts ups; carrier_down_count exists since Linux 4.16.
    let downs = number("carrier_down_count").or_else(|| Some(number("carrier_changes")? / 2));
    let errors = number("statistics/rx_crc_errors");
    for (counter, value) in [("carrier_down_count", downs), ("rx_crc_errors", errors)] {
        if let Some(value) = value {
            counters.insert(counter.to_owned(), value);
        }
    }
}

/// The interfaces that a bond joins, given the bond's name or that of a member.
pub(super) fn members(sys: &Path, name: &str) -> Vec<String> {
    let path = sys.join("class/net").join(name);
    let joined = read(&path.join("bonding/slaves")).or_else(|_| read(&path.join("master/bonding/slaves")));
    joined.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// Whether it represents a virtual function on the host: `pf0vf3`, `c1pf0sf2`.
pub(super) fn is_representor(sys: &Path, name: &str) -> bool {
    let port = read(&sys.join("class/net").join(name).join("phys_port_name")).unwrap_or_default();
    port.contains("pf") && (port.contains("vf") || port.contains("sf"))
}

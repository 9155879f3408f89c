//! Which links are expected, and at which rate: configured by the operator, or learned from working links.

use mainstay_model::component_id::ComponentId;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::sample::PortReading;

/// The learned links of a machine. They are kept across restarts and reboots.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LearnedLinks {
    /// The machine's identity, from its firmware.
    #[serde(default)]
    pub host: Option<String>,
    /// The links that were active, by name.
    #[serde(default)]
    pub links: BTreeMap<String, KnownLink>,
}

/// A link that was active.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KnownLink {
    /// Its component: `fabric.mlx5_0/1`.
    pub component: String,
    /// A serial number or address unique to the hardware.
    #[serde(default)]
    pub serial: Option<String>,
    /// Its PCI address.
    #[serde(default)]
    pub place: Option<String>,
    /// Its data rate in Gb/s.
    #[serde(default)]
    pub rate: Option<f64>,
    /// The boot in which it was last seen.
    #[serde(default)]
    pub boot: String,
}

/// An expectation as configured: `mlx5_0/1` or `eth0`, with `=400` for the rate in Gb/s.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// The link's name.
    pub name: String,
    /// Its rate in Gb/s.
    pub rate: Option<f64>,
}

impl Expected {
    /// Parses the configured form.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Expected, String> {
        let (name, rate) = match text.split_once('=') {
            None => (text, None),
            Some((name, rate)) => match rate.trim().parse::<f64>() {
                Ok(rate) if rate.is_finite() && rate > 0.0 => (name, Some(rate)),
                Ok(_) | Err(_) => return Err(format!("{rate:?} is not a rate in Gb/s: write mlx5_0/1=400")),
            },
        };
        let name = name.trim();
        let port = name.split_once('/');
        let right = match port {
            Some((device, port)) => !device.is_empty() && port.parse::<u32>().is_ok(),
            None => !name.is_empty(),
        };
        if right {
            Ok(Expected { name: name.to_owned(), rate })
        } else {
            Err(format!("{text:?} is not a link: write a port as mlx5_0/1 or an interface as eth0"))
        }
    }

    /// Its component.
    pub fn component(&self) -> String {
        let is_port = self.name.contains('/');
        let component = if is_port { ComponentId::Port } else { ComponentId::Interface };
        component(&self.name).to_string()
    }
}

/// The changes between the learned links and those that exist.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Mended {
    /// Links with other hardware now.
    pub(super) replaced: Vec<String>,
    /// Links with another name now: from, to.
    pub(super) renamed: Vec<(String, String)>,
}

impl LearnedLinks {
    /// Updates the learned links with those that exist: the same hardware under another name keeps its values, other
    /// hardware in the same slot starts again, and on another machine everything is forgotten.
    pub(super) fn repair(&mut self, host: Option<&str>, links_there: &[PortReading]) -> Mended {
        let mut mended = Mended::default();
        if let (Some(known), Some(host)) = (&self.host, host)
            && known != host
        {
            mended.replaced = std::mem::take(&mut self.links).into_keys().collect();
        }
        if let Some(host) = host {
            self.host = Some(host.to_owned());
        }
        let mut links = BTreeMap::new();
        let mut missing = Vec::new();
        let serials: BTreeSet<String> =
            self.links.values().filter_map(|known| known.serial.clone()).collect();
        for (name, known) in std::mem::take(&mut self.links) {
            match where_is(&name, &known, &serials, links_there) {
                LinkPresence::Here(now) => {
                    if now.name != name {
                        mended.renamed.push((name, now.name.clone()));
                    }
                    let place = now.identity.place.clone().or(known.place);
                    let serial = known.serial.or_else(|| now.identity.serial.clone());
                    let component = now.kind.component(&now.name);
                    links.insert(now.name.clone(), KnownLink { place, serial, component, ..known });
                }
                LinkPresence::Replaced => mended.replaced.push(name),
                LinkPresence::Missing => missing.push((name, known)),
            }
        }
        for (name, known) in missing {
            let taken = links_there.iter().any(|link| link.name == name);
            let (name, known) = if taken { known.called_by_serial(name) } else { (name, known) };
            links.insert(name, known);
        }
        self.links = links;
        mended
    }
}

impl KnownLink {
    /// Renames a missing link by its serial if another link has its name now.
    fn called_by_serial(self, name: String) -> (String, KnownLink) {
        let Some(serial) = &self.serial else { return (name, self) };
        let (name, class) = match port_of(&name) {
            Some(port) => (format!("{serial}/{port}"), "fabric"),
            None => (serial.clone(), "net"),
        };
        let component = format!("{class}.{name}");
        (name, KnownLink { component, ..self })
    }
}

enum LinkPresence<'a> {
    Here(&'a PortReading),
    /// Other hardware is in its place.
    Replaced,
    Missing,
}

fn where_is<'a>(
    name: &str,
    known: &KnownLink,
    serials: &BTreeSet<String>,
    links: &'a [PortReading],
) -> LinkPresence<'a> {
    let same_port = |link: &&PortReading| port_of(&link.name) == port_of(name);
    if known.serial.is_some() {
        let same = || links.iter().filter(same_port).filter(|link| link.identity.serial == known.serial);
        if let Some(link) = same().find(|link| link.name == name).or_else(|| same().next()) {
            return LinkPresence::Here(link);
        }
    }
    let there = links.iter().filter(same_port).find(|link| match &known.place {
        Some(place) => link.identity.place.as_ref() == Some(place),
        None => link.name == name,
    });
    match (there, &known.serial) {
        (Some(link), Some(_)) => match &link.identity.serial {
            // If a card is removed, the cards behind it may get its address: they are learned already.
            Some(other) if serials.contains(other) => LinkPresence::Missing,
            Some(_) => LinkPresence::Replaced,
            None => LinkPresence::Here(link),
        },
        (Some(link), None) => LinkPresence::Here(link),
        (None, _) => LinkPresence::Missing,
    }
}

/// `1` of `mlx5_0/1`; `None` for `eth0`.
fn port_of(name: &str) -> Option<&str> {
    name.split_once('/').map(|(_, port)| port)
}

//! A sample of the network: RDMA ports and network interfaces, as links.

use std::collections::BTreeMap;

use crate::host::os::Reading;
use mainstay_model::component_id::ComponentId;

/// The network at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FabricSample {
    /// The machine's identity, from its firmware; `None` if it cannot be read.
    pub host: Option<String>,
    /// Why devices could not be listed. A missing device class is not an error.
    pub unreadable: Option<String>,
    /// The existing links.
    pub links: Vec<PortReading>,
    /// Devices that are not read, by name, with the reason.
    pub passed_over: BTreeMap<String, String>,
    /// The driver of each requested PCI slot, by address; empty slots are absent.
    pub slots: BTreeMap<String, Option<String>>,
}

/// A port of an RDMA device, or a network interface.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PortReading {
    /// Its name: `mlx5_0/1` of a port, `eth0` of an interface.
    pub name: String,
    /// The identity of its hardware.
    pub identity: Identity,
    /// Its link layer.
    pub kind: LinkKind,
    /// Whether it carries data.
    pub state: Reading<LinkState>,
    /// Its data rate in Gb/s.
    pub rate: Reading<f64>,
    /// Counters by the kernel's name; those that the driver does not have or cannot read are absent.
    pub counters: BTreeMap<String, u64>,
    /// The network interface of a RoCE port.
    pub interface: Option<String>,
    /// GPUs behind the same PCIe switch or root port, by component: `gpu.0000:3b:00`.
    pub near: Vec<String>,
    /// A virtual function of this host: it appears and disappears with containers and virtual machines.
    pub virtual_function: bool,
}

/// The identity of a link's hardware.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Unique to the hardware: the node GUID or the permanent address.
    pub serial: Option<String>,
    /// Its PCI address.
    pub place: Option<String>,
}

/// The link layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkKind {
    /// InfiniBand, and Omni-Path, which reports itself as InfiniBand.
    InfiniBand,
    /// RDMA over Ethernet.
    Roce,
    /// Other RDMA (EFA).
    OtherRdma,
    /// A network interface.
    #[default]
    Ethernet,
}

impl LinkKind {
    /// The component of a link of this kind: `fabric.mlx5_0/1`, `net.eth0`.
    pub fn component(self, name: &str) -> String {
        match self {
            LinkKind::Ethernet => ComponentId::Interface(name),
            LinkKind::InfiniBand | LinkKind::Roce | LinkKind::OtherRdma => ComponentId::Port(name),
        }
        .to_string()
    }

    /// The name for display.
    pub fn name(self) -> &'static str {
        match self {
            LinkKind::InfiniBand => "InfiniBand",
            LinkKind::Roce => "RoCE",
            LinkKind::OtherRdma => "RDMA",
            LinkKind::Ethernet => "Ethernet",
        }
    }
}

/// Whether a link carries data, with the kernel's states.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkState {
    /// It carries data.
    pub active: bool,
    /// Ports: `ACTIVE`, `INIT`, `DOWN`; interfaces: `up`, `down`.
    pub logical: String,
    /// `LinkUp`, `Polling`, `Disabled`; interfaces have none.
    pub physical: Option<String>,
}

impl LinkState {
    /// The meaning of an inactive state.
    pub(super) fn meaning(&self) -> &'static str {
        match (self.physical.as_deref(), self.logical.as_str()) {
            (Some("LinkUp"), "INIT" | "ARMED") => {
                "the cable is fine, but no subnet manager has taken the port up"
            }
            (Some("LinkUp"), _) => "the cable is fine, but the port is not in use by its driver",
            (Some("Polling"), _) => "no signal from the other end: cable, transceiver or the switch's port",
            (Some("Disabled"), _) => "it is switched off, here or at the switch",
            (Some("PortConfigurationTraining" | "LinkErrorRecovery" | "Phy Test"), _) => {
                "the link cannot be trained: cable or transceiver"
            }
            (Some("Sleep"), _) => "it sleeps",
            (_, "administratively down") => "it is switched off here",
            _ => "no signal from the other end",
        }
    }
}

impl std::fmt::Display for LinkState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.physical {
            Some(physical) => write!(f, "{}, {physical}", self.logical),
            None => f.write_str(&self.logical),
        }
    }
}

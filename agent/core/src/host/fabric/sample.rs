//! What was read of the network at one moment: ports of RDMA devices and network interfaces, as links.

use std::collections::BTreeMap;

use crate::host::os::Reading;
use crate::model::component_id::ComponentId;

/// The network at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FabricSample {
    /// Which machine it is, as its firmware says; none where that cannot be read.
    pub host: Option<String>,
    /// Why devices could not be listed, if they could not. That there is no such class of devices is no reason.
    pub unreadable: Option<String>,
    /// The links that are there.
    pub links: Vec<LinkReading>,
    /// Devices that are not read, by name, with the reason.
    pub passed_over: BTreeMap<String, String>,
    /// What is in the PCI slots that were asked for: the driver by address; slots that are empty are not here.
    pub slots: BTreeMap<String, Option<String>>,
}

/// A port of an RDMA device, or a network interface.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinkReading {
    /// Its name: `mlx5_0/1` of a port, `eth0` of an interface.
    pub name: String,
    /// Which piece of hardware it is.
    pub identity: Identity,
    /// What it speaks.
    pub kind: LinkKind,
    /// Whether it carries data.
    pub state: Reading<LinkState>,
    /// Its data rate in Gb/s.
    pub rate: Reading<f64>,
    /// Counters by the kernel's name; those that the driver lacks or cannot tell are not here.
    pub counters: BTreeMap<String, u64>,
    /// The network interface of a RoCE port.
    pub interface: Option<String>,
    /// GPUs behind the same PCIe switch or root port, by their components: `gpu.0000:3b:00`.
    pub near: Vec<String>,
    /// A virtual function of this very host: it comes and goes as containers and virtual machines do.
    pub virtual_function: bool,
}

/// Which piece of hardware a link belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// What no other piece has: the node GUID, or the permanent address.
    pub serial: Option<String>,
    /// Where it sits: the PCI address.
    pub place: Option<String>,
}

/// What a link speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkKind {
    /// InfiniBand (and Omni-Path, which says the same of itself).
    InfiniBand,
    /// RDMA over Ethernet.
    Roce,
    /// RDMA of another kind (EFA).
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

    /// The name for a person.
    pub fn name(self) -> &'static str {
        match self {
            LinkKind::InfiniBand => "InfiniBand",
            LinkKind::Roce => "RoCE",
            LinkKind::OtherRdma => "RDMA",
            LinkKind::Ethernet => "Ethernet",
        }
    }
}

/// Whether a link carries data, in the kernel's words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkState {
    /// It does.
    pub active: bool,
    /// `ACTIVE`, `INIT`, `DOWN`; of an interface `up`, `down`.
    pub logical: String,
    /// `LinkUp`, `Polling`, `Disabled`; interfaces have none.
    pub physical: Option<String>,
}

impl LinkState {
    /// What a person makes of a link that is not active.
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

//! The names of components in the journal and the API. This is the only place that writes and parses them.

use std::fmt;

use crate::pci::PciAddress;

/// A parsed component name. Its `Display` is the name: `gpu.0000:3b:00`, `fabric.mlx5_0/1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ComponentId<'a> {
    /// One GPU.
    Gpu(PciAddress),
    /// A part that all GPUs of the host share: `gpu.driver`, `gpu.power`.
    Gpus(&'a str),
    /// A link of a GPU: `nvlink.0000:3b:00/4`.
    NvLink(&'a str),
    /// One NVSwitch.
    NvSwitch(PciAddress),
    /// A TPU chip, by its number.
    Tpu(u32),
    /// A port of the fabric, as device and port number: `mlx5_0/1`.
    Port(&'a str),
    /// A network interface: `eth0`.
    Interface(&'a str),
    /// A part of the host: `host.memory`.
    Host(&'a str),
    /// Any other name: `dcgm`, `cloud`.
    Other(&'a str),
}

impl<'a> ComponentId<'a> {
    /// Parses a name; any name is valid, at least as [`ComponentId::Other`].
    pub fn parse(name: &'a str) -> ComponentId<'a> {
        let Some((kind, part)) = name.split_once('.') else { return ComponentId::Other(name) };
        let of_address = |id: fn(PciAddress) -> ComponentId<'a>| PciAddress::parse(part).map(id);
        match kind {
            "gpu" => of_address(ComponentId::Gpu).unwrap_or(ComponentId::Gpus(part)),
            "nvlink" => ComponentId::NvLink(part),
            "nvswitch" => of_address(ComponentId::NvSwitch).unwrap_or(ComponentId::Other(name)),
            "tpu" => part.parse().map_or(ComponentId::Other(name), ComponentId::Tpu),
            "fabric" => ComponentId::Port(part),
            "net" => ComponentId::Interface(part),
            "host" => ComponentId::Host(part),
            _ => ComponentId::Other(name),
        }
    }

    /// The GPU, or the GPU of the link.
    pub fn gpu(self) -> Option<PciAddress> {
        match self {
            ComponentId::Gpu(address) => Some(address),
            ComponentId::NvLink(link) => PciAddress::parse(link.split('/').next().unwrap_or(link)),
            _ => None,
        }
    }
}

impl fmt::Display for ComponentId<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ComponentId::Gpu(address) => write!(to, "gpu.{address}"),
            ComponentId::Gpus(part) => write!(to, "gpu.{part}"),
            ComponentId::NvLink(link) => write!(to, "nvlink.{link}"),
            ComponentId::NvSwitch(address) => write!(to, "nvswitch.{address}"),
            ComponentId::Tpu(number) => write!(to, "tpu.{number}"),
            ComponentId::Port(port) => write!(to, "fabric.{port}"),
            ComponentId::Interface(interface) => write!(to, "net.{interface}"),
            ComponentId::Host(part) => write!(to, "host.{part}"),
            ComponentId::Other(name) => to.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parsed_name_is_written_unchanged() {
        let names = [
            "gpu.0000:3b:00",
            "gpu.driver",
            "nvlink.0000:3b:00/4",
            "nvswitch.0000:c1:00",
            "nvswitch.any",
            "tpu.3",
            "tpu.driver",
            "fabric.mlx5_0/1",
            "net.eth0.100",
            "host.memory",
            "dcgm",
            "dcgm.gpu3",
            "",
        ];
        for name in names {
            assert_eq!(ComponentId::parse(name).to_string(), name);
        }
    }

    #[test]
    fn a_link_belongs_to_the_gpu_in_its_name() {
        let gpu = PciAddress::parse("0000:3b:00");
        assert!(gpu.is_some());
        for name in ["gpu.0000:3b:00", "nvlink.0000:3b:00/4"] {
            assert_eq!(ComponentId::parse(name).gpu(), gpu, "{name}");
        }
        for name in ["gpu.driver", "nvswitch.0000:3b:00", "nvlink.x/4", "0000:3b:00"] {
            assert_eq!(ComponentId::parse(name).gpu(), None, "{name}");
        }
    }
}

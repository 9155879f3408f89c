//! The address of a device on the PCI bus, by which the kernel log and NVML name the same GPU.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// Domain, bus and device, without the function, which the driver's log lines omit. Written as in the kernel log, `0000:3b:00`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// The domain. NVML writes it with eight digits, the kernel with four.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device.
    pub device: u8,
}

impl PciAddress {
    /// Parses `0000:3b:00`, `00000000:3B:00.0` and `3b:00`, in either case, with or without `PCI:`.
    pub fn parse(text: &str) -> Option<PciAddress> {
        let text = text.strip_prefix("PCI:").unwrap_or(text);
        let mut parts = text.rsplit(':');
        let device = parts.next()?;
        let device = device.split_once('.').map_or(device, |(device, _function)| device);
        let bus = parts.next()?;
        let domain = parts.next().unwrap_or("0");
        if parts.next().is_some() {
            return None;
        }
        Some(PciAddress { domain: hex(domain, 8)?, bus: narrow(bus)?, device: narrow(device)? })
    }
}

fn narrow(text: &str) -> Option<u8> {
    u8::try_from(hex(text, 2)?).ok()
}

fn hex(text: &str, digits: usize) -> Option<u32> {
    // `from_str_radix` alone would accept a sign.
    let right = (1..=digits).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if right { u32::from_str_radix(text, 16).ok() } else { None }
}

impl std::fmt::Display for PciAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}", self.domain, self.bus, self.device)
    }
}

impl Serialize for PciAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PciAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<PciAddress, D::Error> {
        let text = String::deserialize(deserializer)?;
        PciAddress::parse(&text)
            .ok_or_else(|| D::Error::custom(format!("{text:?} is not a PCI address like \"0000:3b:00\"")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_and_nvml_name_the_same_gpu() {
        let gpu = PciAddress { domain: 0, bus: 0x3b, device: 0 };
        for text in ["0000:3b:00", "PCI:0000:3B:00", "00000000:3B:00.0", "3b:00", "0000:3b:00.1"] {
            assert_eq!(PciAddress::parse(text), Some(gpu), "{text}");
        }
        assert_eq!(gpu.to_string(), "0000:3b:00");
        assert_eq!(PciAddress::parse("0009:01:00").map(|gpu| gpu.to_string()), Some("0009:01:00".to_owned()));
    }

    #[test]
    fn other_text_is_no_address() {
        for text in
            ["", ":", "PCI:", "00", "+1:00", "0:0:0:0", "0000:3b:0g", "0000:3b1:00", "é:00", "-1:00:00"]
        {
            assert_eq!(PciAddress::parse(text), None, "{text}");
        }
    }
}

//! Parses a PCI device's configuration space from sysfs: how a port routes traffic between the devices below it.

/// A PCI Express port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// It is a downstream port of a switch.
    pub of_switch: bool,
    /// It redirects traffic between devices below the same switch to the root complex, by access control services (ACS).
    pub redirects: bool,
}

const EXPRESS: u8 = 0x10;
const ACCESS_CONTROL: u32 = 0x000d;
const DOWNSTREAM_PORT: u16 = 6;

/// P2P Request Redirect and P2P Completion Redirect of the ACS Control Register.
const REDIRECTS: u16 = 1 << 2 | 1 << 3;

/// Parses the configuration space of a port. `None` if the device is no port, or if the space is incomplete, as for unprivileged
/// readers.
pub fn port(config: &[u8]) -> Option<Port> {
    let kind = read_u16(config, capability(config, EXPRESS)? + 2)? >> 4 & 0xf;
    let of_switch = kind == DOWNSTREAM_PORT;
    // Only root can read the extended part.
    config.get(0x100)?;
    let control = extended(config, ACCESS_CONTROL).and_then(|at| read_u16(config, at + 6));
    Some(Port { of_switch, redirects: control.is_some_and(|control| control & REDIRECTS != 0) })
}

/// The offset of a capability. The device determines the length of the list, which may be circular.
fn capability(config: &[u8], id: u8) -> Option<usize> {
    let mut at = usize::from(*config.get(0x34)? & !3);
    for _ in 0..48 {
        if at < 0x40 {
            return None;
        }
        if *config.get(at)? == id {
            return Some(at);
        }
        at = usize::from(*config.get(at + 1)? & !3);
    }
    None
}

fn extended(config: &[u8], id: u32) -> Option<usize> {
    let mut at = 0x100;
    for _ in 0..480 {
        let head = u32::from(read_u16(config, at)?) | u32::from(read_u16(config, at + 2)?) << 16;
        if head & 0xffff == id {
            return Some(at);
        }
        at = (head >> 20) as usize & !3;
        if at < 0x100 {
            return None;
        }
    }
    None
}

fn read_u16(config: &[u8], at: usize) -> Option<u16> {
    let bytes = config.get(at..at + 2)?;
    Some(u16::from_le_bytes([bytes[0], bytes[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A configuration space with these bytes at these offsets.
    fn space(length: usize, bytes: &[(usize, u8)]) -> Vec<u8> {
        let mut space = vec![0; length];
        for (at, byte) in bytes {
            space[*at] = *byte;
        }
        space
    }

    /// A port of this type whose ACS control register holds `control`.
    fn with_acs(kind: u8, control: u8) -> Vec<u8> {
        let express = [(0x34, 0x40), (0x40, 0x01), (0x41, 0x68), (0x68, 0x10), (0x6a, kind << 4 | 2)];
        let extended =
            [(0x100, 0x01), (0x102, 0x02), (0x103, 0x20), (0x200, 0x0d), (0x202, 0x01), (0x206, control)];
        space(4096, &[&express[..], &extended[..]].concat())
    }

    #[test]
    fn a_port_that_redirects_is_recognised() {
        assert_eq!(port(&with_acs(6, 0x1d)), Some(Port { of_switch: true, redirects: true }));
        assert_eq!(port(&with_acs(6, 0x01)), Some(Port { of_switch: true, redirects: false }));
        assert_eq!(port(&with_acs(4, 0x1d)), Some(Port { of_switch: false, redirects: true }));
    }

    #[test]
    fn other_devices_and_truncated_spaces_are_rejected() {
        assert_eq!(port(&with_acs(6, 0x1d)[..64]), None);
        assert_eq!(port(&with_acs(6, 0x1d)[..256]), None);
        assert_eq!(port(&space(4096, &[])), None);
        assert_eq!(port(&space(4096, &[(0x34, 0x40), (0x41, 0x40)])), None, "a circle");
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = port(&bytes);
        }
    }
}

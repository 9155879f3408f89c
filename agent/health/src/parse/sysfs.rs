//! Parses sysfs files about links.

/// The name after the number of a port's state: `ACTIVE` of `4: ACTIVE`, `LinkUp` of `5: LinkUp`.
pub fn state_name(text: &str) -> Option<&str> {
    let (number, name) = text.trim().split_once(':')?;
    number.trim().parse::<u32>().ok()?;
    Some(name.trim()).filter(|name| !name.is_empty())
}

/// Gb/s of `400 Gb/sec (4X NDR)`. `None` if it is no rate, or zero.
pub fn port_rate(text: &str) -> Option<f64> {
    let (number, rest) = text.trim().split_once(' ')?;
    let rate: f64 = number.parse().ok()?;
    (rest.starts_with("Gb/sec") && rate.is_finite() && rate > 0.0).then_some(rate)
}

/// Gb/s from an interface's speed in Mb/s. `None` if the driver does not know it (`-1`, or 4294967295).
pub fn interface_rate(text: &str) -> Option<f64> {
    let megabits: i64 = text.trim().parse().ok()?;
    (1..i64::from(i32::MAX)).contains(&megabits).then_some(megabits as f64 / 1000.0)
}

/// Whether text names a PCI device with its function: `0000:3b:00.0`.
pub fn is_pci_function(text: &str) -> bool {
    let Some((device, function)) = text.rsplit_once('.') else { return false };
    let digits =
        |part: &str, length: usize| part.len() >= length && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut parts = device.split(':');
    let right = [4, 2, 2].iter().all(|length| parts.next().is_some_and(|part| digits(part, *length)));
    right && parts.next().is_none() && digits(function, 1)
}

/// Whether a port or interface matches the operator's pattern: the device, the port, or a prefix of either followed by `*`.
pub fn names(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == pattern || name.split_once('/').is_some_and(|(device, _)| device == pattern),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_parsed_after_their_numbers() {
        assert_eq!(state_name("4: ACTIVE\n"), Some("ACTIVE"));
        assert_eq!(state_name("2: Polling"), Some("Polling"));
        for wrong in ["", "ACTIVE", "4:", "x: ACTIVE", ":"] {
            assert_eq!(state_name(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn rates_are_converted_to_gbits() {
        assert_eq!(port_rate("400 Gb/sec (4X NDR)\n"), Some(400.0));
        assert_eq!(port_rate("2.5 Gb/sec (1X SDR)"), Some(2.5));
        assert_eq!(interface_rate("100000\n"), Some(100.0));
        for wrong in ["", "fast", "0 Gb/sec (?)", "nan Gb/sec", "400 Mb/sec"] {
            assert_eq!(port_rate(wrong), None, "{wrong}");
        }
        for wrong in ["-1", "0", "4294967295", "", "x"] {
            assert_eq!(interface_rate(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn addresses_and_names_are_distinguished() {
        assert!(is_pci_function("0000:3b:00.0") && is_pci_function("10000:01:00.1"));
        for wrong in ["", "pci0000:3a", "0000:3b:00", "device", "0000:3b.0", "virtual"] {
            assert!(!is_pci_function(wrong), "{wrong}");
        }
        assert!(names("mlx5_1", "mlx5_1/1") && names("mlx5_1/1", "mlx5_1/1") && names("ens*", "ens1f0"));
        assert!(!names("mlx5_1", "mlx5_10/1") && !names("mlx5_1/1", "mlx5_1/2") && !names("eth0", "eth01"));
    }
}

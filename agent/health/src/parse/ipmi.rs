//! Sensors of a host's management controller (power supplies, fans, temperatures) from `ipmitool sdr elist`: one sensor per line, `PSU1
//! Status | C8h | ok | 10.1 | Presence detected`.

/// A sensor of the management controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sensor {
    /// Its name, chosen by the vendor.
    pub name: String,
    /// The severity of its reading.
    pub level: Level,
    /// Its reading: a number with a unit, or states in words.
    pub reading: String,
}

/// The severity of a sensor's reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Normal.
    Ok,
    /// Beyond the controller's first limit.
    Warning,
    /// Beyond a limit at which hardware breaks, or in a state that reports a defect.
    Critical,
}

/// States that report a defect, as named in the IPMI standard.
const BROKEN: [&str; 14] = [
    "Failure detected",
    "Power Supply AC lost",
    "AC lost or out-of-range",
    "AC out-of-range",
    "Config Error",
    "Redundancy Lost",
    "Non-Redundant: Insufficient Resources",
    "Uncorrectable ECC",
    "Uncorrectable machine check exception",
    "IERR",
    "Thermal Trip",
    "Drive Fault",
    "Transition to Critical",
    "Transition to Non-recoverable",
];

/// States that predict a failure.
const FAILING: [&str; 5] = [
    "Predictive failure",
    "Predictive Failure",
    "Redundancy Degraded",
    "Correctable ECC logging limit reached",
    "Transition to Non-critical",
];

/// Parses the sensors of a listing. Skips sensors that are absent or have no reading.
pub fn sensors(listing: &str) -> Vec<Sensor> {
    listing.lines().filter_map(sensor).collect()
}

fn sensor(line: &str) -> Option<Sensor> {
    let mut fields = line.splitn(5, '|').map(str::trim);
    let (name, _number, status) = (fields.next()?, fields.next()?, fields.next()?);
    let (_entity, reading) = (fields.next()?, fields.next()?);
    if name.is_empty() || matches!(reading, "" | "No Reading" | "Disabled" | "Not Readable") {
        return None;
    }
    let by_status = match status {
        "ok" => Level::Ok,
        "nc" | "unc" | "lnc" => Level::Warning,
        "cr" | "ucr" | "lcr" | "nr" | "unr" | "lnr" => Level::Critical,
        // The controller has no such sensor: "ns".
        _ => return None,
    };
    let says = |words: &[&str]| words.iter().any(|word| reading.contains(word));
    let by_words = match () {
        () if says(&BROKEN) => Level::Critical,
        () if says(&FAILING) => Level::Warning,
        () => Level::Ok,
    };
    Some(Sensor { name: name.to_owned(), level: by_status.max(by_words), reading: reading.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_listing_is_parsed_without_absent_sensors() {
        let listing = "\
            CPU1 Temp        | 01h | ok  |  3.1 | 52 degrees C\n\
            FAN1             | 41h | ok  | 29.1 | 9100 RPM\n\
            FAN2             | 42h | cr  | 29.2 | 300 RPM\n\
            FAN3             | 43h | ns  | 29.3 | No Reading\n\
            Inlet Temp       | 05h | nc  |  7.1 | 41 degrees C\n\
            PSU1 Status      | C8h | ok  | 10.1 | Presence detected\n\
            PSU2 Status      | C9h | ok  | 10.2 | Presence detected, Power Supply AC lost\n\
            PS Redundancy    | 77h | ok  |  7.1 | Fully Redundant\n\
            DIMM A1          | 90h | ok  | 32.1 | Presence Detected, Correctable ECC logging limit reached\n\
            SEL              | 72h | ns  |  7.1 | Disabled\n\
            12V              | 30h | ok  |  7.1 | 12.18 Volts\n";
        let sensors = sensors(listing);
        let ill: Vec<(&str, Level)> = sensors
            .iter()
            .filter(|sensor| sensor.level > Level::Ok)
            .map(|sensor| (sensor.name.as_str(), sensor.level))
            .collect();
        assert_eq!(sensors.len(), 9);
        let expected = [
            ("FAN2", Level::Critical),
            ("Inlet Temp", Level::Warning),
            ("PSU2 Status", Level::Critical),
            ("DIMM A1", Level::Warning),
        ];
        assert_eq!(ill, expected);
    }

    #[test]
    fn other_text_has_no_sensors() {
        for text in ["", "Could not open device at /dev/ipmi0\n", "a | b\n| | | |\n", "a|b|ok|c|\n"] {
            assert_eq!(sensors(text), [], "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_a_panic(text in "(?s).{0,200}", line in "[A-Za-z0-9 |]{0,60}") {
            let _ = (sensors(&text), sensors(&line));
        }
    }
}

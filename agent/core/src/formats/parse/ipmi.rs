//! What a host's management controller tells of power supplies, fans and heat, as `ipmitool sdr elist` prints it: one
//! sensor on each line, `PSU1 Status | C8h | ok | 10.1 | Presence detected`.

/// A sensor of the management controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sensor {
    /// Its name, which its maker chose.
    pub name: String,
    /// Whether its reading is in order.
    pub level: Level,
    /// What it reads: a number with a unit, or states in words.
    pub reading: String,
}

/// Whether a sensor's reading is in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// It is.
    Ok,
    /// It is beyond the first limit of the controller.
    Warning,
    /// It is beyond a limit behind which things break, or the state itself says that something is broken.
    Critical,
}

/// States that say that something is broken, in the words of IPMI's standard.
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

/// States that say that something is about to break.
const FAILING: [&str; 5] = [
    "Predictive failure",
    "Predictive Failure",
    "Redundancy Degraded",
    "Correctable ECC logging limit reached",
    "Transition to Non-critical",
];

/// The sensors of a listing; those that are not there or read nothing are left out.
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
        // The controller has none of it: "ns".
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
    fn a_listing_is_read_and_what_is_not_there_left_out() {
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
    fn what_is_no_listing_has_no_sensors() {
        for text in ["", "Could not open device at /dev/ipmi0\n", "a | b\n| | | |\n", "a|b|ok|c|\n"] {
            assert_eq!(sensors(text), [], "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_fail(text in "(?s).{0,200}", line in "[A-Za-z0-9 |]{0,60}") {
            let _ = (sensors(&text), sensors(&line));
        }
    }
}

//! Parses the properties that `systemctl show` prints: one block per unit, `Name=value` per line.

/// A systemd unit. Values are systemd's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// `nvidia-fabricmanager.service`.
    pub name: String,
    /// `active`, `failed`, `inactive`, `activating`.
    pub active: String,
    /// `running`, `auto-restart`, `dead`.
    pub sub: String,
    /// Why it failed: `exit-code`, `signal`, `timeout`.
    pub result: String,
    /// It is started at boot.
    pub enabled: bool,
    /// How often systemd restarted it.
    pub restarts: u64,
}

/// The existing units among those that were queried.
pub fn units(text: &str) -> Vec<Service> {
    let unit = |block: &str| {
        let value = |name: &str| {
            block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap_or("").to_owned()
        };
        (value("LoadState") == "loaded").then(|| Service {
            name: value("Id"),
            active: value("ActiveState"),
            sub: value("SubState"),
            result: value("Result"),
            enabled: value("UnitFileState").starts_with("enabled"),
            restarts: value("NRestarts").parse().unwrap_or(0),
        })
    };
    text.split("\n\n").filter_map(unit).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn only_existing_units_count() {
        let text = "Id=a.service\nLoadState=loaded\nActiveState=failed\nSubState=failed\nResult=exit-code\n\
            UnitFileState=enabled\nNRestarts=3\n\nId=b.service\nLoadState=not-found\nActiveState=inactive\n\n\n";
        let units = super::units(text);
        assert_eq!(units.len(), 1);
        let unit = &units[0];
        assert_eq!(
            (unit.name.as_str(), unit.active.as_str(), unit.result.as_str()),
            ("a.service", "failed", "exit-code")
        );
        assert_eq!((unit.enabled, unit.restarts), (true, 3));
        assert!(super::units("").is_empty() && super::units("nonsense\n\n=\n").is_empty());
    }
}

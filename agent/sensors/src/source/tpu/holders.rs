//! Which processes have a chip's device node open, from procfs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use mainstay_health::hardware::tpu::{Chip, ChipHolder, Holders};
use mainstay_model::id::Pid;

use super::FORBIDDEN_PORT;

/// The variable with the ports on which processes serve their metrics.
pub(super) const PORTS: &str = "TPU_RUNTIME_METRICS_PORTS=";

/// Fills in the processes that hold the chips. Returns the ports on which those processes were configured to serve.
pub(super) fn find(proc: &Path, chips: &mut [Chip]) -> BTreeSet<u16> {
    let mut found: BTreeMap<usize, Vec<ChipHolder>> = BTreeMap::new();
    let mut ports = BTreeSet::new();
    let mut hidden = 0_u32;
    let unreadable = match std::fs::read_dir(proc) {
        Err(error) => Some(format!("reading {}: {error}", proc.display())),
        Ok(processes) => {
            let names = processes.flatten().map(|entry| entry.file_name());
            for pid in names.filter_map(|name| name.to_str()?.parse().ok()) {
                match open_files(&proc.join(format!("{pid}/fd"))) {
                    Err(_) => hidden += 1,
                    Ok(files) => {
                        let held =
                            |(_, chip): &(usize, &Chip)| chip.nodes.iter().any(|node| files.contains(node));
                        let held: Vec<usize> =
                            chips.iter().enumerate().filter(held).map(|(at, _)| at).collect();
                        if !held.is_empty() {
                            ports.extend(ports_of_environment(&proc.join(format!("{pid}/environ"))));
                        }
                        let name =
                            std::fs::read_to_string(proc.join(format!("{pid}/comm"))).unwrap_or_default();
                        let holder = ChipHolder { pid: Pid(pid), name: name.trim().to_owned() };
                        for chip in held {
                            found.entry(chip).or_default().push(holder.clone());
                        }
                    }
                }
            }
            (hidden > 0).then(|| format!("{hidden} processes may not be looked into; run the agent as root"))
        }
    };
    for (at, chip) in chips.iter_mut().enumerate() {
        let mut holders = found.remove(&at).unwrap_or_default();
        holders.sort_by_key(|holder| holder.pid);
        chip.holders = match &unreadable {
            Some(why) => Holders::Partly(holders, why.clone()),
            None => Holders::Known(holders),
        };
    }
    ports
}

/// The files below /dev that a process has open. A process that is gone has none; one that may not be read is an error.
fn open_files(directory: &Path) -> io::Result<BTreeSet<String>> {
    let gone = |error: &io::Error| {
        error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ESRCH)
    };
    let entries = match std::fs::read_dir(directory) {
        Err(error) if gone(&error) => return Ok(BTreeSet::new()),
        entries => entries?,
    };
    let mut files = BTreeSet::new();
    for entry in entries {
        let target = match entry.and_then(|entry| std::fs::read_link(entry.path())) {
            Err(error) if gone(&error) => continue,
            target => target?,
        };
        if let Some(target) = target.to_str().filter(|target| target.starts_with("/dev/")) {
            files.insert(target.to_owned());
        }
    }
    Ok(files)
}

/// The ports on which a process was configured to serve, from its environment.
pub(super) fn ports_of_environment(environment: &Path) -> Vec<u16> {
    let environment = std::fs::read(environment).unwrap_or_default();
    let text =
        environment.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(PORTS.as_bytes()));
    let text = String::from_utf8_lossy(text.unwrap_or_default()).into_owned();
    text.split(',')
        .filter_map(|port| port.trim().parse().ok())
        .filter(|port| ![0, FORBIDDEN_PORT].contains(port))
        .collect()
}

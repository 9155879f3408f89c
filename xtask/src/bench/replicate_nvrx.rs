//! NVRx's clique replication, with which replicas to a peer are compared: two ranks that send each other their
//! states over gloo.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde_json::Value;

use super::launchers::script_path;
use super::process::Running;
use crate::paths;

const SCRIPT: &str = "replicate_nvrx.py";

/// The size of a rank's state: it has its own copy and one of the other's, twice on this machine. The rate does not
/// depend on it.
const STATE_MIB: usize = 256;

const LIMIT: Duration = Duration::from_secs(180);

/// Bytes of one rank's state per second, in each round; `peers` is the environment with NVRx.
pub fn rates(peers: &Path, rounds: usize) -> Result<Vec<f64>> {
    let mut command = Command::new(peers.join("bin/python"));
    command.arg(script_path(SCRIPT)).args([STATE_MIB, rounds].map(|number| number.to_string()));
    let folder = paths::target().join("bench");
    fs::create_dir_all(&folder)?;
    let log = folder.join("replicate_nvrx.log");
    let mut running = Running::start(command, &log)?;
    running.wait_for("NVRx's figures", LIMIT, || reported(&fs::read_to_string(&log).ok()?))
}

/// The rates in the script's output, among gloo's own lines.
fn reported(printed: &str) -> Option<Vec<f64>> {
    let found = printed.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok())?;
    let rates: Vec<f64> = found.get("bytes_per_s")?.as_array()?.iter().filter_map(Value::as_f64).collect();
    (!rates.is_empty()).then_some(rates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_found_among_the_lines_of_gloo_and_nowhere_else() {
        let printed = "[Gloo] Rank 0 is connected to 1 peer ranks.\n{\"bytes_per_s\": [3e8, 2e8]}\n";
        assert_eq!(reported(printed), Some(vec![3e8, 2e8]));
        assert_eq!(reported("[Gloo] Rank 0\n{\"bytes_per_s\": []}\n"), None);
        assert_eq!(reported("a rank failed\n"), None);
    }
}

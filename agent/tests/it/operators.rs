//! Operators' actions with the whole agent: an acknowledged or silenced fault does not count, across restarts,
//! until it recurs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use support::Agent;

const GPU: &str = "gpu.0000:01:00";

struct Host {
    directory: testing::TempDir,
    log: PathBuf,
}

impl Host {
    fn new() -> Host {
        let directory = testing::tempdir().unwrap();
        let log = directory.path().join("kmsg");
        fs::write(&log, "").unwrap();
        Host { directory, log }
    }

    fn agent(&self) -> Agent {
        Agent::start(
            self.directory.path(),
            &[("KERNEL_LOG_PATH", &self.log), ("GPU_ENABLED", Path::new("false"))],
        )
    }

    fn log(&self, line: &str) {
        let mut log = OpenOptions::new().append(true).open(&self.log).unwrap();
        writeln!(log, "{line}").unwrap();
    }

    fn mainstay(&self, arguments: &[&str]) -> Output {
        let socket = self.directory.path().join("agent.sock");
        Command::new(env!("CARGO_BIN_EXE_mainstay"))
            .args(arguments)
            .arg("--socket")
            .arg(socket)
            .output()
            .unwrap()
    }

    /// The component as `mainstay status` shows it.
    fn component(&self, name: &str) -> serde_json::Value {
        let status = self.mainstay(&["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        let components = status["servers"][0]["node"]["components"].as_array().unwrap().clone();
        components.into_iter().find(|component| component["name"] == name).unwrap_or_default()
    }
}

#[test]
fn an_acknowledged_fault_is_reported_again_when_it_recurs() {
    let host = Host::new();
    let agent = host.agent();
    host.log("NVRM: Xid (PCI:0000:01:00): 48, pid=1, name=python, DBE");
    agent.wait_for_state("gpu.0000:01:00", "UNHEALTHY");

    let acked = host.mainstay(&["ack", GPU, "--reason", "ticket 7"]);
    assert!(acked.status.success(), "{acked:?}");
    assert_eq!(agent.wait_for_observation(GPU, "operator_acknowledged")["values.reason"], "ticket 7");
    agent.wait_for_change("gpu.0000:01:00", "UNHEALTHY", "HEALTHY");
    drop(agent);

    let agent = host.agent();
    host.log("NVRM: Xid (PCI:0000:01:00): 13, pid=1, name=python, Graphics Exception");
    agent.wait_for("XID 13");
    assert_eq!(host.component(GPU)["state"], "HEALTHY");
    host.log("NVRM: Xid (PCI:0000:01:00): 48, pid=1, name=python, DBE");
    agent.wait_for_change(GPU, "HEALTHY", "UNHEALTHY");
}

#[test]
fn a_silenced_component_is_shown_and_does_not_count() {
    let host = Host::new();
    let agent = host.agent();
    host.log("EXT4-fs (sdb1): Remounting filesystem read-only");
    agent.wait_for_state("host.storage", "UNHEALTHY");
    let silenced = host.mainstay(&["silence", "host.storage", "--reason", "on the bench", "--for", "2h"]);
    assert!(silenced.status.success(), "{silenced:?}");
    let check = || {
        let component = host.component("host.storage");
        assert_eq!(
            (&component["state"], &component["silence"]["reason"]),
            (&"UNHEALTHY".into(), &"on the bench".into())
        );
        assert_ne!(host.mainstay(&["status"]).status.code(), Some(2));
        let screen = host.mainstay(&["status"]).stdout;
        let screen = String::from_utf8(screen).unwrap();
        let line = screen.lines().find(|line| line.contains("on the bench")).unwrap_or(&screen);
        let line = line.trim().replace(|letter: char| letter.is_ascii_digit(), "");
        testing::snapshot!("operators", "status: a silenced component", line);
    };
    check();
    drop(agent);

    let agent = host.agent();
    agent.wait_for_state("host.storage", "UNHEALTHY");
    check();
    assert!(host.mainstay(&["unsilence", "host.storage"]).status.success());
    agent.wait_for_observation("host.storage", "operator_unsilenced");
    assert_eq!(host.mainstay(&["status"]).status.code(), Some(2));
}

#[test]
fn invalid_requests_are_refused() {
    let host = Host::new();
    let _agent = host.agent();
    let refused = |case: &str, arguments: &[&str]| {
        let output = host.mainstay(arguments);
        let reported = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{arguments:?}: {reported}");
        // Each machine has other components.
        let reported = reported.split("; known").next().unwrap();
        let directory = host.directory.path().display().to_string();
        testing::snapshot!("operators", case, reported.replace(&directory, "DIRECTORY"));
    };
    refused("no such component", &["ack", "gpu.9", "--reason", "x"]);
    refused("no reason", &["ack", "host.kernel_log", "--reason", " "]);
    refused("too long", &["silence", "host.kernel_log", "--reason", "x", "--for", "90d"]);
    refused("no duration", &["silence", "host.kernel_log", "--reason", "x", "--for", "soon"]);
}

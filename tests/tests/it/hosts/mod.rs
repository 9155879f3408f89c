//! Hosts with separate loopback addresses, each with an agent that knows the others.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "in a test, a panic is the report; each test takes what it needs"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use mainstay_tests::{Agent, Stage, mainstay};
use serde_json::Value;

/// Hosts that know each other.
pub struct Hosts {
    pub stages: Vec<Stage>,
    pub names: Vec<String>,
    options: Vec<String>,
}

impl Hosts {
    /// This many hosts, each with further keys of `checkpoint`.
    pub fn new(test: u8, count: u8, options: &[&str]) -> Hosts {
        let process = std::process::id() % 60_000;
        let name = |host: u8| {
            format!("127.{}.{}.{}:7140", 20 + process / 250 % 200, 1 + process % 250, 10 * test + host)
        };
        Hosts {
            stages: (0..count).map(|_| Stage::new()).collect(),
            names: (1..=count).map(name).collect(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
        }
    }

    pub fn agent(&self, host: usize) -> Agent {
        self.agent_with(host, &[])
    }

    /// With further keys of `checkpoint`, instead of those that all have.
    pub fn agent_with(&self, host: usize, options: &[&str]) -> Agent {
        let stage = &self.stages[host];
        let token = stage.work().join("token");
        fs::write(&token, "the same on all hosts of this test").unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
        let key = |name: &str, value: String| format!("MAINSTAY_AGENT_CHECKPOINT_{name}={value}");
        let log = self.kernel_log(host);
        fs::File::options().create(true).append(true).open(&log).unwrap();
        let mut line = vec!["env".to_owned(), format!("MAINSTAY_AGENT_KERNEL_LOG_PATH={}", log.display())];
        line.push(key("LISTEN", self.names[host].clone()));
        line.push(key("PEERS", self.names.join(",")));
        line.push(key("TOKEN_FILE", token.display().to_string()));
        line.push(key("STORE", self.store(host).display().to_string()));
        line.push(key("INTERVAL", "100ms".to_owned()));
        let options = self.options.iter().map(String::as_str).chain(options.iter().copied());
        line.extend(options.map(|option| format!("MAINSTAY_AGENT_CHECKPOINT_{option}")));
        line.push(mainstay().display().to_string());
        Agent::start_under(&line, stage)
    }

    pub fn store(&self, host: usize) -> PathBuf {
        self.stages[host].tmpfs().join("replicas")
    }

    /// The file that its agent reads as the kernel log.
    pub fn kernel_log(&self, host: usize) -> PathBuf {
        self.stages[host].work().join("kmsg")
    }

    /// Where the ranks of this host keep checkpoints.
    pub fn directory(&self, host: usize) -> PathBuf {
        self.stages[host].work().join("checkpoints")
    }

    /// Whether a host's store already has any part of a shard.
    pub fn has_started(&self, host: usize) -> bool {
        fs::read_dir(self.store(host).join("incoming")).is_ok_and(|mut entries| entries.next().is_some())
    }
}

pub fn ckpt(agent: &Agent, arguments: &[&str]) -> Output {
    let mut command = Command::new(mainstay());
    command.arg("ckpt").args(arguments).arg("--socket").arg(agent.socket());
    command.output().expect("mainstay can be started")
}

pub fn json(output: &Output) -> Value {
    let reported = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&reported)
        .unwrap_or_else(|error| panic!("{error}: {reported}{}", String::from_utf8_lossy(&output.stderr)))
}

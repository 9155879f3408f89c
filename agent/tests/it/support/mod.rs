//! The whole agent, for tests.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

pub mod libtpu;
pub mod metadata;
pub mod ras;

use std::cell::Cell;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Output that is missing after this time counts as never written: a test that waits for it fails with the output
/// so far.
#[allow(dead_code, reason = "not every test waits")]
const NEVER_SAID: Duration = Duration::from_secs(180);

/// What the log of an agent that answers contains.
const READY: &str = "the agent is ready";

/// The agent as shipped, with a captured log.
pub struct Agent {
    child: Child,
    directory: PathBuf,
    /// Held open: an agent whose log has no reader gets an error.
    _log: BufReader<ChildStderr>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Agent {
    /// Starts it with settings as environment variables, and waits until it is ready.
    #[allow(dead_code, reason = "not every test starts it so")]
    pub fn start(directory: &Path, settings: &[(&str, &Path)]) -> Agent {
        Agent::start_in(directory, settings, &[])
    }

    /// The same, with additional environment variables.
    #[allow(dead_code, reason = "not every test starts it so")]
    pub fn start_in(directory: &Path, settings: &[(&str, &Path)], variables: &[(&str, &Path)]) -> Agent {
        let mut child = Command::new(env!("CARGO_BIN_EXE_mainstay"))
            .arg("agent")
            .args(["--socket".as_ref(), directory.join("agent.sock").as_os_str()])
            .args(["--state-dir".as_ref(), directory.join("state").as_os_str()])
            // The kernel of this machine reports what other tests do to it.
            .env("MAINSTAY_AGENT_KERNEL_LOG_PATH", "")
            .envs(settings.iter().map(|(name, value)| (format!("MAINSTAY_AGENT_{name}"), value)))
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains(READY) {
            line.clear();
            assert_ne!(log.read_line(&mut line).unwrap(), 0, "the agent ended");
        }
        Agent { child, directory: directory.to_owned(), _log: log }
    }

    /// The first event in the journal, from its start, that contains this identifier or value.
    pub fn wait_for(&self, identifier: &str) -> String {
        self.wait_until(identifier, |line| line.contains(identifier))
    }

    /// The attributes of the first observation of this event on a component, in the journal from its start.
    pub fn wait_for_observation(&self, component: &str, event: &str) -> Value {
        let line = self.wait_until(&format!("{event} of {component}"), |line| {
            let entry: Value = serde_json::from_str(line).unwrap();
            let attributes = &entry["attributes"];
            entry["type"] == "observed"
                && attributes["component"] == component
                && attributes["event"] == event
        });
        let mut entry: Value = serde_json::from_str(&line).unwrap();
        entry["attributes"].take()
    }

    /// The attributes of the first decision for this action and rule whose reason names this identifier, in the journal
    /// from its start.
    pub fn wait_for_decision(&self, action: &str, rule: &str, named: &str) -> Value {
        let line = self.wait_until(&format!("{action} by {rule}: {named}"), |line| {
            let entry: Value = serde_json::from_str(line).unwrap();
            let attributes = &entry["attributes"];
            entry["type"] == action
                && attributes["rule"] == rule
                && attributes["why"].as_str().is_some_and(|why| why.contains(named))
        });
        let mut entry: Value = serde_json::from_str(&line).unwrap();
        entry["attributes"].take()
    }

    /// The first XID of a GPU with this code that NVML reported, in the journal from its start.
    pub fn wait_for_xid_by_nvml(&self, gpu: &str, code: u32) {
        let code = code.to_string();
        self.wait_until(&format!("XID {code} of {gpu} from NVML"), |line| {
            let entry: Value = serde_json::from_str(line).unwrap();
            let attributes = &entry["attributes"];
            entry["type"] == "xid"
                && attributes["gpu"] == gpu
                && attributes["code"] == code.as_str()
                && attributes["by_event"] == "true"
        });
    }

    /// The first reading of a component in this state, whatever came before it, in the journal from its start.
    pub fn wait_until_in_state(&self, component: &str, state: &str) -> Value {
        let line = self.wait_until(&format!("{component} {state}"), |line| {
            let event: Value = serde_json::from_str(line).unwrap();
            let attributes = &event["attributes"];
            event["type"] == "health_changed"
                && attributes["component.name"] == component
                && attributes["component.state"] == state
        });
        let mut event: Value = serde_json::from_str(&line).unwrap();
        event["attributes"].take()
    }

    /// The first reading of a component by this agent: the journal also has those of earlier agents.
    #[allow(dead_code, reason = "not every test starts an agent again")]
    pub fn wait_for_first_reading(&self, component: &str) -> String {
        let (own, started) = (self.child.id().to_string(), Cell::new(false));
        self.wait_until(&format!("a reading of {component} by agent {own}"), |line| {
            let event: Value = serde_json::from_str(line).unwrap();
            let attributes = &event["attributes"];
            started.set(
                started.get() || (event["type"] == "agent_started" && attributes["pid"] == own.as_str()),
            );
            started.get() && event["type"] == "health_changed" && attributes["component.name"] == component
        })
    }

    fn wait_until(&self, what: &str, is_it: impl Fn(&str) -> bool) -> String {
        let mut events = Command::new(env!("CARGO_BIN_EXE_mainstay"))
            .args(["events", "--follow", "--json", "--socket"])
            .arg(self.directory.join("agent.sock"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(events.stdout.take().unwrap()).lines();
        let (report, reported) = mpsc::channel();
        let reading = thread::spawn(move || {
            // Reading ends once the words are found.
            lines.map(Result::unwrap).take_while(|line| report.send(line.clone()).is_ok()).for_each(drop);
        });
        let until = Instant::now() + NEVER_SAID;
        let next = || reported.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
        let found = std::iter::from_fn(next).find(|line| is_it(line));
        drop(reported);
        events.kill().unwrap();
        reading.join().unwrap();
        events.wait().unwrap();
        found.unwrap_or_else(|| panic!("no event told of {what:?}; all: {}", self.events()))
    }

    /// The first change of a component from a state to another one, in the journal from its start.
    pub fn wait_for_change(&self, component: &str, from: &str, to: &str) -> String {
        self.wait_for_health(component, Some(from), to)
    }

    /// The first reading of a component in this state.
    pub fn wait_for_state(&self, component: &str, state: &str) -> String {
        self.wait_for_health(component, None, state)
    }

    fn wait_for_health(&self, component: &str, from: Option<&str>, to: &str) -> String {
        self.wait_until(&format!("{component}: {from:?} to {to}"), |line| {
            let event: Value = serde_json::from_str(line).unwrap();
            let attributes = &event["attributes"];
            event["type"] == "health_changed"
                && attributes["component.name"] == component
                && attributes["component.state"] == to
                && attributes.get("from").and_then(Value::as_str) == from
        })
    }

    /// The living processes that its threads have started.
    #[allow(dead_code, reason = "not every test looks")]
    pub fn children(&self) -> Vec<i32> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().flatten();
        let reported =
            threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
        reported
            .flat_map(|pids| pids.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>())
            .collect()
    }

    /// The output of a command that asks the agent.
    #[allow(dead_code, reason = "not every test asks")]
    pub fn ask(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        let reported =
            command.args(arguments).arg("--socket").arg(self.directory.join("agent.sock")).output().unwrap();
        String::from_utf8(reported.stdout).unwrap()
    }

    /// The most memory that it has needed so far, in bytes.
    #[allow(dead_code, reason = "not every test looks")]
    pub fn peak_memory(&self) -> u64 {
        self.bytes_of("VmHWM:")
    }

    /// The memory that it has now, in bytes.
    #[allow(dead_code, reason = "not every test looks")]
    pub fn memory(&self) -> u64 {
        self.bytes_of("VmRSS:")
    }

    fn bytes_of(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let value = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        value.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// All events so far.
    #[allow(dead_code, reason = "not every test asks")]
    pub fn events(&self) -> String {
        let mut events = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        let reported = events
            .args(["events", "--json", "--socket"])
            .arg(self.directory.join("agent.sock"))
            .output()
            .unwrap();
        String::from_utf8(reported.stdout).unwrap()
    }

    /// The metrics page.
    #[allow(dead_code, reason = "not every test asks")]
    pub fn metrics(&self) -> String {
        let mut stream = std::os::unix::net::UnixStream::connect(self.directory.join("agent.sock")).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        page
    }

    /// The output of `mainstay status`.
    #[allow(dead_code, reason = "not every test asks")]
    pub fn status(&self) -> String {
        let mut status = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        let reported = status
            .args(["status", "--all", "--socket"])
            .arg(self.directory.join("agent.sock"))
            .output()
            .unwrap();
        String::from_utf8(reported.stdout).unwrap()
    }
}

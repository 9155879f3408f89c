//! The host's agent, as the scenarios run it: with its own socket and state directory.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use mainstay_model::entry::{Body, Entry, Fact};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::plan::{self, bare};
use crate::stage::Stage;
use crate::waiting::{self, Waiting};
use crate::{journal, processes, program};

/// A running agent.
#[derive(Debug)]
pub struct Agent {
    process: Child,
    handle: OwnedFd,
    socket: PathBuf,
    journal: PathBuf,
}

impl Agent {
    pub(crate) fn start(program: &Path, stage: &Stage) -> Agent {
        Agent::start_under(&[program.display().to_string()], stage)
    }

    /// Starts it by another program: `setpriv … mainstay`.
    pub fn start_under(line: &[String], stage: &Stage) -> Agent {
        let directory = stage.tmpfs().join("agent");
        let (socket, state) = (directory.join("agent.sock"), stage.work().join("agent-state"));
        std::fs::create_dir_all(&directory).expect("a directory for the socket");
        let printed = File::options().create(true).append(true).open(stage.home().join("agent.err"));
        let mut command = Command::new(&line[0]);
        bare(&mut command, stage)
            // The kernel of this machine reports what other tests do to it.
            .env("MAINSTAY_AGENT_KERNEL_LOG_PATH", "")
            .args(&line[1..])
            .arg("agent")
            .arg("--socket")
            .arg(&socket)
            .arg("--state-dir")
            .arg(&state)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(printed.expect("a file for what the agent says"));
        let process = command.spawn().unwrap_or_else(|error| panic!("starting {line:?}: {error}"));
        let handle = waiting::handle(pid_of(&process)).expect("our own child can be watched");
        let agent = Agent { process, handle, socket, journal: state.join("journal") };
        let pid = agent.pid();
        agent.wait_for("its start", |entry| match &entry.body {
            Body::Fact(Fact::AgentStarted { pid: started, .. }) if started.0 == pid => Some(()),
            _ => None,
        });
        agent
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        pid_of(&self.process)
    }

    /// The current content of its journal.
    pub fn journal(&self) -> Vec<Entry> {
        journal::read(&self.journal)
    }

    /// Waits for an entry of its journal.
    pub fn wait_for<T>(&self, what: &str, mut find: impl FnMut(&Entry) -> Option<T>) -> T {
        let mut directories: Vec<PathBuf> = self.journal.ancestors().take(3).map(Path::to_owned).collect();
        directories.reverse();
        let waiting = Waiting { directories, process: Some(self.handle.as_fd()) };
        let found = waiting.until(|| self.journal().iter().find_map(&mut find));
        found.unwrap_or_else(|failed| {
            panic!("waiting for the agent and {what}: {failed:?}\n{}", journal::reported(&self.journal()))
        })
    }

    /// Waits for a fact of a job.
    pub fn wait_for_fact(&self, job: &str, what: &str, mut is: impl FnMut(&Fact) -> bool) {
        self.wait_for(what, |entry| {
            let of_job = entry.job.as_ref().is_some_and(|id| id.0 == job);
            matches!(&entry.body, Body::Fact(fact) if of_job && is(fact)).then_some(())
        });
    }

    /// The output of `mainstay status --json` at its socket, with the exit status.
    pub fn status(&self, stage: &Stage) -> (Option<i32>, Value) {
        plan::status(stage, &self.socket)
    }

    /// The output of `mainstay events --json` for a job.
    pub fn events(&self, stage: &Stage, job: &str) -> Vec<Value> {
        let mut events = Command::new(program::mainstay());
        bare(&mut events, stage).args(["events", "--json", "--job", job, "--socket"]).arg(&self.socket);
        let reported = events.output().expect("mainstay can be started");
        let reported = String::from_utf8(reported.stdout).expect("JSON is UTF-8");
        reported.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("the agent lives");
    }

    /// Kills it.
    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        self.process.wait().expect("our own child");
    }

    /// Stops it with SIGTERM; returns its exit status.
    pub fn stop(mut self) -> Option<i32> {
        self.signal(Signal::SIGTERM);
        assert!(waiting::ended(&self.handle), "the agent does not stop: {}", processes::reported(self.pid()));
        self.process.wait().expect("our own child").code()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn pid_of(process: &Child) -> i32 {
    i32::try_from(process.id()).expect("a process id")
}

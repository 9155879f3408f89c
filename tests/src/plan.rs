//! The options and environment of a job to start.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::agent::Agent;
use crate::job::Job;
use crate::program;
use crate::stage::Stage;
use crate::terminal::Terminal;

/// A job that is about to be started.
#[derive(Debug)]
pub struct Plan<'a> {
    pub(crate) stage: &'a Stage,
    pub(crate) id: String,
    before: Vec<String>,
    options: Vec<String>,
    command: Vec<String>,
    variables: Vec<(String, String)>,
    socket: Option<String>,
    stdout: Option<Stdio>,
    stderr: Option<Stdio>,
    own_paths: bool,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(stage: &'a Stage, command: Vec<String>) -> Plan<'a> {
        Plan {
            stage,
            id: stage.new_id(),
            before: Vec::new(),
            options: Vec::new(),
            command,
            variables: Vec::new(),
            socket: None,
            stdout: None,
            stderr: None,
            own_paths: false,
        }
    }

    /// Uses this id instead of a new one: that of a job which other launchers run as well.
    #[must_use]
    pub fn named(mut self, id: &str) -> Self {
        id.clone_into(&mut self.id);
        self
    }

    /// Options of `mainstay run`, separated by blanks.
    #[must_use]
    pub fn options(mut self, options: &str) -> Self {
        self.options.extend(options.split_whitespace().map(ToOwned::to_owned));
        self
    }

    /// A number of ranks.
    #[must_use]
    pub fn ranks(self, ranks: u32) -> Self {
        self.options(&format!("--nproc-per-node {ranks}"))
    }

    /// Makes the command that of each of these roles, `NAME=N[,KEY=VALUE…]`.
    #[must_use]
    pub fn roles(mut self, roles: &[&str]) -> Self {
        let words = self.command.iter().map(String::as_str);
        let command = shlex::try_join(words).expect("words without NUL");
        self.command = roles.iter().map(|role| format!("--role={role}:{command}")).collect();
        self
    }

    /// Arguments of the script.
    #[must_use]
    pub fn arguments(mut self, arguments: &[&str]) -> Self {
        self.command.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// A variable of the launcher's environment.
    #[must_use]
    pub fn variable(mut self, name: &str, value: impl AsRef<Path>) -> Self {
        self.variables.push((name.to_owned(), value.as_ref().display().to_string()));
        self
    }

    /// A program that starts the launcher: `setpriv …`, `unshare …`.
    #[must_use]
    pub fn under(mut self, program: &[&str]) -> Self {
        self.before = program.iter().map(|part| (*part).to_owned()).collect();
        self
    }

    /// Lets the launcher find this agent; without this it finds none.
    #[must_use]
    pub fn with(mut self, agent: &Agent) -> Self {
        self.socket = Some(agent.socket().display().to_string());
        self
    }

    /// The same for an agent that the scenario starts itself.
    #[must_use]
    pub fn at_socket(mut self, socket: &Path) -> Self {
        self.socket = Some(socket.display().to_string());
        self
    }

    /// Uses another standard output than a file.
    #[must_use]
    pub fn stdout(mut self, stdout: Stdio) -> Self {
        self.stdout = Some(stdout);
        self
    }

    /// Uses another standard error than a file.
    #[must_use]
    pub fn stderr(mut self, stderr: Stdio) -> Self {
        self.stderr = Some(stderr);
        self
    }

    /// The scenario's options name all directories and the run id themselves.
    #[must_use]
    pub fn own_paths(mut self) -> Self {
        self.own_paths = true;
        self
    }

    /// Starts it.
    pub fn start(self) -> Job {
        let stage = self.stage;
        let printed = |name: &str| stage.home().join(format!("{}.{name}", self.id));
        let file = |name: &str| File::create(printed(name)).expect("a file for what the launcher says");
        let line = self.line();
        let mut launcher = Command::new(&line[0]);
        bare(&mut launcher, stage)
            .args(&line[1..])
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(self.stdout.unwrap_or_else(|| file("out").into()))
            .stderr(self.stderr.unwrap_or_else(|| file("err").into()));
        let child = launcher.spawn().unwrap_or_else(|error| panic!("starting {line:?}: {error}"));
        Job::new(stage, self.id, child)
    }

    /// Starts it on a terminal of its own; none if that cannot be, which is reported as skipped.
    pub fn on_terminal(self) -> Option<Terminal> {
        Terminal::start(self.stage, &self.line())
    }

    /// The command line.
    fn line(&self) -> Vec<String> {
        let stage = self.stage;
        let mut line = self.before.clone();
        line.push(program::mainstay().display().to_string());
        line.push("run".to_owned());
        if !self.own_paths {
            line.extend(["--rdzv-id".to_owned(), self.id.clone()]);
            line.extend(["--log-dir".to_owned(), stage.logs().display().to_string()]);
            line.extend(["--runtime-dir".to_owned(), stage.tmpfs().display().to_string()]);
        }
        match &self.socket {
            Some(socket) => line.extend(["--socket".to_owned(), socket.clone()]),
            None => line.push("--no-agent".to_owned()),
        }
        line.extend(self.options.iter().chain(&self.command).cloned());
        line
    }
}

/// Nothing of the tests' own environment reaches the program, except what it needs to run at all.
pub(crate) fn bare<'c>(command: &'c mut Command, stage: &Stage) -> &'c mut Command {
    let kept = ["PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "RUST_BACKTRACE"];
    command.env_clear();
    for name in kept {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command
        .env("HOME", stage.home())
        .env("MARKS", stage.marks())
        .env("PYTHON_EXEC", program::python())
        // Scripts of the scenarios need no compiled copies, and several ranks would write them at once.
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(stage.work())
}

/// The output of `mainstay status --json` at a socket, with the exit status.
pub(crate) fn status(stage: &Stage, socket: &Path) -> (Option<i32>, Value) {
    let mut status = Command::new(program::mainstay());
    let reported = bare(&mut status, stage).args(["status", "--json", "--socket"]).arg(socket).output();
    let reported = reported.expect("mainstay can be started");
    let text = String::from_utf8_lossy(&reported.stdout);
    let value = serde_json::from_str(&text);
    (reported.status.code(), value.unwrap_or_else(|error| panic!("{error}: {text}")))
}

/// The output of a command that asks at a socket.
pub(crate) fn asked(stage: &Stage, socket: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(program::mainstay());
    let reported = bare(&mut command, stage).args(arguments).arg("--socket").arg(socket).output();
    let reported = reported.expect("mainstay can be started");
    let printed = String::from_utf8_lossy(&reported.stderr).into_owned();
    assert!(reported.status.success(), "{arguments:?}: {printed}");
    String::from_utf8_lossy(&reported.stdout).into_owned()
}

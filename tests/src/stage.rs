//! The directories of a scenario: home, logs, tmpfs directory, scripts, marks.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use testing::TempDir;

use crate::agent::Agent;
use crate::plan::{self, Plan};
use crate::program;

/// Functions and names at the start of every sh script. A mark is a file that appears whole.
const SH: &str = r#"#!/bin/sh
ATTEMPT=$TORCHELASTIC_RESTART_COUNT
mark() { printf %s "$2" > "$MARKS/.$1.$$" && mv "$MARKS/.$1.$$" "$MARKS/$1"; }
# In place of work of any length; ends with a signal to the process.
work() { while :; do sleep 0.02; done; }
wait_for() { while [ ! -e "$MARKS/$1" ]; do sleep 0.01; done; }
"#;

/// The same for Python.
const PYTHON: &str = r#"import os, signal, subprocess, sys, time
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
MARKS = os.environ["MARKS"]
def mark(name, text=""):
    aside = f"{MARKS}/.{name}.{os.getpid()}"
    with open(aside, "w") as file:
        file.write(str(text))
    os.rename(aside, f"{MARKS}/{name}")
def wait_for(name):
    while not os.path.exists(f"{MARKS}/{name}"):
        time.sleep(0.01)
"#;

/// The directories.
#[derive(Debug)]
pub struct Stage {
    disk: TempDir,
    tmpfs: TempDir,
    number: AtomicU32,
}

impl Stage {
    /// A new one; it is removed when it is dropped.
    #[expect(clippy::new_without_default, reason = "it makes directories, which no default value should")]
    pub fn new() -> Stage {
        let disk = TempDir::named("mst-", std::env::temp_dir()).expect("a temporary directory");
        // On a tmpfs and with a short name, for the sockets in it.
        let shm = testing::memory();
        let tmpfs = TempDir::named("mst-", shm).expect("a directory on tmpfs");
        for name in ["home", "logs", "marks", "work"] {
            fs::create_dir(disk.path().join(name)).expect("a directory");
        }
        Stage { disk, tmpfs, number: AtomicU32::new(0) }
    }

    /// A job whose ranks run this sh script, which may `mark NAME [TEXT]`, `work` and `wait_for NAME`, and has
    /// `$ATTEMPT`.
    pub fn sh(&self, script: &str) -> Plan<'_> {
        Plan::new(self, vec![self.script("ranks.sh", &format!("{SH}{script}"))])
    }

    /// A job whose ranks run this Python script, which has `mark`, `wait_for`, `RANK`, `ATTEMPT` and common modules.
    pub fn python(&self, script: &str) -> Plan<'_> {
        Plan::new(self, vec![self.script("ranks.py", &format!("{PYTHON}{script}"))])
    }

    /// A job of any command.
    pub fn command(&self, command: &[&str]) -> Plan<'_> {
        Plan::new(self, command.iter().map(|part| (*part).to_owned()).collect())
    }

    /// An executable file in the stage's working directory.
    pub fn script(&self, name: &str, text: &str) -> String {
        let path = self.work().join(name);
        testing::executable(&path, text);
        path.display().to_string()
    }

    /// A copy of a program in the stage's working directory.
    pub fn program(&self, name: &str, of: &Path) -> String {
        let path = self.work().join(name);
        testing::executable(&path, fs::read(of).expect("a program"));
        path.display().to_string()
    }

    /// A shell that runs this script in the stage's working directory, with `mainstay` on its path.
    pub fn shell(&self, script: &str) -> Command {
        let program = program::mainstay();
        let mut path = std::ffi::OsString::from(program.parent().unwrap_or(Path::new("/")));
        path.extend(std::env::var_os("PATH").map(|rest| std::ffi::OsString::from_iter([":".into(), rest])));
        let mut shell = Command::new("sh");
        plan::bare(&mut shell, self).env("PATH", path).args(["-c", script]);
        shell
    }

    /// Starts an agent; it continues the journal of an earlier agent on this stage.
    pub fn agent(&self) -> Agent {
        Agent::start(&program::mainstay(), self)
    }

    /// Opens the directories to all users, for jobs and agents of other users.
    pub fn open_to_all(&self) -> &Stage {
        let agent = self.tmpfs().join("agent");
        fs::create_dir_all(&agent).expect("a directory for the agent's socket");
        let (disk, tmpfs) = (self.disk.path().to_owned(), self.tmpfs());
        for path in [disk, tmpfs, agent, self.logs(), self.marks(), self.work(), self.home()] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("our own directory");
        }
        self
    }

    /// Leaves a mark that ranks wait for.
    pub fn mark(&self, name: &str) {
        fs::write(self.marks().join(name), "").expect("a mark");
    }

    /// `HOME`.
    pub fn home(&self) -> PathBuf {
        self.disk.path().join("home")
    }

    /// `--log-dir`.
    pub fn logs(&self) -> PathBuf {
        self.disk.path().join("logs")
    }

    /// Where ranks leave marks.
    pub fn marks(&self) -> PathBuf {
        self.disk.path().join("marks")
    }

    /// A text without the names of the stage's directories, which differ from run to run.
    pub fn masked(&self, text: &str) -> String {
        let masked = text.replace(&self.tmpfs().display().to_string(), "TMPFS");
        let masked = masked.replace(&self.disk.path().display().to_string(), "DISK");
        // Jobs are named after it.
        let name = self.disk.path().file_name().expect("a directory with a name");
        masked.replace(&*name.to_string_lossy(), "JOB")
    }

    /// Working directory of the launcher.
    pub fn work(&self) -> PathBuf {
        self.disk.path().join("work")
    }

    /// `--runtime-dir`, and other directories that must be on a tmpfs.
    pub fn tmpfs(&self) -> PathBuf {
        self.tmpfs.path().to_owned()
    }

    /// A job id that no other scenario of this host uses at the same time.
    pub(crate) fn new_id(&self) -> String {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let stage = self.disk.path().file_name().map(|name| name.to_string_lossy().into_owned());
        format!("{}-{number}", stage.unwrap_or_default())
    }
}

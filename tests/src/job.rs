//! A job that runs.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Child;

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::observation::Observation;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::end::End;
use crate::plan;
use crate::stage::Stage;
use crate::waiting::{self, Waiting};
use crate::{journal, processes};

/// A launcher with its ranks.
#[derive(Debug)]
pub struct Job {
    id: String,
    launcher: Child,
    handle: OwnedFd,
    logs: PathBuf,
    marks: PathBuf,
    socket: PathBuf,
    printed: PathBuf,
}

/// The start of an attempt.
#[derive(Clone, Debug)]
pub struct Started {
    /// `MASTER_PORT`.
    pub port: u16,
    /// Process by rank.
    pub pids: BTreeMap<u32, i32>,
}

impl Job {
    pub(crate) fn new(stage: &Stage, id: String, launcher: Child) -> Job {
        let pid = i32::try_from(launcher.id()).expect("a process id");
        let handle = waiting::handle(pid).expect("our own child can be watched");
        let socket = stage.tmpfs().join(&id).join("api.sock");
        Job { printed: stage.home(), logs: stage.logs(), marks: stage.marks(), id, launcher, handle, socket }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The launcher's process.
    pub fn launcher(&self) -> i32 {
        i32::try_from(self.launcher.id()).expect("a process id")
    }

    /// The launcher's socket.
    pub fn socket(&self) -> &PathBuf {
        &self.socket
    }

    /// Logs, journal, summary.
    pub fn run_dir(&self) -> PathBuf {
        self.logs.join(&self.id)
    }

    /// A stream of a rank in an attempt, as the file holds it: `stdout` or `stderr`.
    pub fn output(&self, attempt: u32, local_rank: u32, stream: &str) -> String {
        let path = self.run_dir().join(format!("attempt_{attempt}/{local_rank}/{stream}.log"));
        String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
    }

    /// The current content of the journal.
    pub fn journal(&self) -> Vec<Entry> {
        journal::read(&self.run_dir().join("journal"))
    }

    /// Waits for an entry of the journal.
    pub fn wait_for<T>(&self, what: &str, mut find: impl FnMut(&Entry) -> Option<T>) -> T {
        let journal = self.run_dir().join("journal");
        let directories = vec![self.logs.clone(), self.run_dir(), journal];
        self.wait(what, directories, || self.journal().iter().find_map(&mut find))
    }

    /// Waits for a fact.
    pub fn wait_for_fact(&self, what: &str, mut is: impl FnMut(&Fact) -> bool) {
        self.wait_for(what, |entry| matches!(&entry.body, Body::Fact(fact) if is(fact)).then_some(()));
    }

    /// Waits for an event that a part of the launcher has observed, by its identifier.
    pub fn wait_for_event(&self, event: &str) -> Observation {
        self.wait_for(event, |entry| match &entry.body {
            Body::Fact(Fact::Observed(seen)) if seen.event == event => Some(seen.clone()),
            _ => None,
        })
    }

    /// Waits for an attempt's ranks.
    pub fn attempt(&self, number: u32) -> Started {
        self.wait_for(&format!("attempt {number}"), |entry| match &entry.body {
            Body::Fact(Fact::AttemptStarted { attempt, master_port, ranks, .. }) if attempt.0 == number => {
                let pids = ranks.iter().map(|rank| (rank.rank.0, rank.pid.0)).collect();
                Some(Started { port: *master_port, pids })
            }
            _ => None,
        })
    }

    /// Waits for a mark of a rank and returns its text.
    pub fn mark(&self, name: &str) -> String {
        let path = self.marks.join(name);
        self.wait(&format!("the mark {name}"), vec![self.marks.clone()], || fs::read_to_string(&path).ok())
    }

    /// Waits for a mark that holds a process id.
    pub fn marked_pid(&self, name: &str) -> i32 {
        let text = self.mark(name);
        text.trim().parse().unwrap_or_else(|_| panic!("the mark {name} holds no process id: {text:?}"))
    }

    /// Waits until the launcher has printed this text.
    pub fn wait_until_printed(&self, what: &str) {
        let path = self.printed.join(format!("{}.err", self.id));
        let look = || fs::read_to_string(&path).ok().filter(|printed| printed.contains(what));
        self.wait(&format!("the words {what:?}"), vec![self.printed.clone()], look);
    }

    /// Sends a signal to the launcher.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.launcher()), signal).expect("the launcher lives");
    }

    /// Sends SIGKILL to a rank of an attempt.
    pub fn kill_rank(&self, attempt: u32, rank: u32) {
        kill(Pid::from_raw(self.attempt(attempt).pids[&rank]), Signal::SIGKILL).expect("the rank lives");
    }

    /// The output of `mainstay status --json` at the launcher's socket, with the exit status.
    pub fn status(&self, stage: &Stage) -> (Option<i32>, Value) {
        plan::status(stage, &self.socket)
    }

    /// The output of another command that asks the launcher.
    pub fn asked(&self, stage: &Stage, arguments: &[&str]) -> String {
        plan::asked(stage, &self.socket, arguments)
    }

    /// Kills the launcher and waits until no process of the job is left.
    pub fn kill_launcher(mut self) -> String {
        self.signal(Signal::SIGKILL);
        self.launcher.wait().expect("our own child");
        processes::wait_until_none_of(&self.id);
        self.id.clone()
    }

    /// Kills the launcher of one of several hosts and waits until no process that it started is left; the job
    /// continues.
    pub fn lose_launcher(mut self) {
        let started = processes::descendants(self.launcher());
        self.signal(Signal::SIGKILL);
        self.launcher.wait().expect("our own child");
        started.into_iter().for_each(processes::wait_until_gone);
    }

    /// Waits until the launcher has ended; whether it has.
    pub fn has_ended(&self) -> bool {
        waiting::ended(&self.handle)
    }

    /// Waits for the end of the job. No process of it may be left then.
    pub fn end(mut self) -> End {
        assert!(waiting::ended(&self.handle), "the job does not end\n{}", self.reported());
        let status = self.launcher.wait().expect("our own child");
        // The launcher has killed its standbys, which are children of the template: only the kernel waits for them.
        let standbys = processes::of_job(&self.id)
            .into_iter()
            .filter(|pid| processes::reported(*pid).contains("template.py"));
        standbys.for_each(processes::wait_until_gone);
        let left: Vec<String> = processes::of_job(&self.id).into_iter().map(processes::reported).collect();
        assert!(left.is_empty(), "processes are left after the end: {left:#?}\n{}", self.reported());
        assert_eq!(processes::cgroups_of(&self.id), Vec::<PathBuf>::new(), "{}", self.reported());
        let printed = |name: &str| {
            let path = self.printed.join(format!("{}.{name}", self.id));
            String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
        };
        let summary = fs::read(self.run_dir().join("summary.json")).ok();
        End {
            status: status.code().unwrap_or_else(|| -status.signal().unwrap_or(0)),
            stdout: printed("out"),
            stderr: printed("err"),
            journal: self.journal(),
            summary: summary.map(|text| serde_json::from_slice(&text).expect("a summary")),
            run_dir: self.run_dir(),
        }
    }

    fn wait<T>(&self, what: &str, directories: Vec<PathBuf>, look: impl FnMut() -> Option<T>) -> T {
        let waiting = Waiting { directories, process: Some(self.handle.as_fd()) };
        waiting
            .until(look)
            .unwrap_or_else(|failed| panic!("waiting for {what}: {failed:?}\n{}", self.reported()))
    }

    /// The launcher's output so far.
    pub fn printed(&self) -> String {
        fs::read_to_string(self.printed.join(format!("{}.err", self.id))).unwrap_or_default()
    }

    fn reported(&self) -> String {
        let printed = self.printed();
        format!("launcher said:\n{printed}\njournal:\n{}", journal::reported(&self.journal()))
    }
}

impl Drop for Job {
    /// Ends a job that a test left running, and waits for its processes: one that is still ending may write a file
    /// while the stage is being removed, and its control group cannot be removed yet.
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The cause may be on another host than the one that the test waited for.
            eprintln!("the launcher of {} printed:\n{}", self.run_dir().display(), self.printed());
        }
        if let Ok(None) = self.launcher.try_wait() {
            let _ = self.launcher.kill();
            let _ = self.launcher.wait();
            let ranks = processes::of_job(&self.id);
            let handles: Vec<OwnedFd> = ranks.iter().filter_map(|pid| waiting::handle(*pid)).collect();
            for handle in &handles {
                let _ = rustix::process::pidfd_send_signal(handle, rustix::process::Signal::KILL);
            }
            for handle in &handles {
                waiting::ended(handle);
            }
            for cgroup in processes::cgroups_of(&self.id) {
                let _ = fs::remove_dir(cgroup);
            }
        }
    }
}

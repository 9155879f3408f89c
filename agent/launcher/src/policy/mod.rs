//! The user's own policy: a Python script in a process of its own. It is started before the first failure and kept, so that
//! a restart only pays for the decision. Nothing that it does costs a restart more than [`DECISION_TIMEOUT`].

mod process;

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_model::id::{Incident, Pid};
use mainstay_recovery::policy::Advice;
use mainstay_sys::pidfd;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until, timeout};

use crate::Settings;
use crate::ranks::RankSpec;
use crate::ranks::warm::interpreter_of;
use crate::run::next_of;
use process::{Process, Turn};

/// The classes that the script imports.
const CLASSES: &str = include_str!("../../../../client/python/mainstay/policy.py");

/// How long a decision may take.
pub const DECISION_TIMEOUT: Duration = Duration::from_millis(250);

/// How long threads of the script may take to finish when the job has ended.
const END_TIMEOUT: Duration = Duration::from_secs(5);

const MAX_FILE_BYTES: u64 = 1 << 20;

/// The address space of the process.
const MAX_MEMORY_BYTES: u64 = 2 << 30;

/// A user's own policy.
#[derive(Debug)]
pub struct Policy {
    name: String,
    file: PathBuf,
    /// Its text, or why it cannot be used.
    source: Result<String, String>,
    interpreter: String,
    /// `NAME=VALUE`, by which processes of the job are found.
    mark: Option<String>,
    within: Duration,
    process: Option<Process>,
    /// The process must be started again.
    renew: bool,
    /// The failure that it was asked about, and its deadline.
    pending: Option<(Incident, Instant)>,
    /// The number of the last question.
    number: u64,
    news: VecDeque<News>,
}

/// What a policy reports.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// It is loaded.
    Ready,
    /// It cannot be used. Each question gets the same text as an error.
    Broken(String),
    /// It printed a line.
    Printed(String),
    /// It answered, or did not in time.
    Answered(Incident, Reply),
}

/// The answer of a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// Its advice, as in [`PolicyAnswer`](mainstay_recovery::policy::PolicyAnswer).
    pub advice: Result<Option<Advice>, String>,
    /// The lines of the script that were executed, if that was asked for.
    pub lines: Vec<usize>,
}

impl Policy {
    /// Starts the policy that the job has, if it has one.
    pub(crate) fn for_job(settings: &Settings, spec: &RankSpec) -> Option<Policy> {
        let interpreter = interpreter_of(&settings.ranks.command, std::env::var_os("PATH").as_deref());
        let file = settings.policy_file.as_deref()?;
        Some(Policy::start(file, interpreter, Some(spec.mark()), DECISION_TIMEOUT))
    }

    /// Reads a policy and starts its process, within a tokio runtime. An error is reported as [`News::Broken`].
    pub fn start(file: &Path, interpreter: String, mark: Option<String>, within: Duration) -> Policy {
        let mut policy = Policy {
            name: file.file_name().unwrap_or(file.as_os_str()).to_string_lossy().into_owned(),
            file: std::path::absolute(file).unwrap_or_else(|_| file.to_owned()),
            source: read(file),
            interpreter,
            mark,
            within,
            process: None,
            renew: false,
            pending: None,
            number: 0,
            news: VecDeque::new(),
        };
        match &policy.source {
            Ok(_) => policy.renew = true,
            Err(message) => policy.news.push_back(News::Broken(message.clone())),
        }
        policy
    }

    /// Its name for messages: that of its file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process, while that lives.
    pub fn pid(&self) -> Option<Pid> {
        let pid = self.process.as_ref()?.pid();
        matches!(pidfd::exit_status(pid), Ok(None)).then_some(pid)
    }

    /// Asks for the decision on a case; [`Policy::next`] has the answer in time. `trace`: with the lines that are executed.
    pub fn ask(&mut self, incident: Incident, case: &Value, trace: bool) {
        if self.source.is_ok() && self.process.is_none() {
            self.run();
        }
        match (&self.source, &mut self.process) {
            (Ok(_), Some(process)) => {
                self.number += 1;
                process.send(&json!({ "ask": self.number, "case": case, "trace": trace }));
                process.may_print();
                self.pending = Some((incident, Instant::now() + self.within));
            }
            (Err(message), _) => self.news.push_back(failed(incident, message.clone())),
            // `run` has reported why.
            (Ok(_), None) => {
                let message = format!("{}: its process cannot be started", self.name);
                self.news.push_back(failed(incident, message));
            }
        }
    }

    /// The next news. The future may be dropped and created again at any time.
    pub async fn next(&mut self) -> News {
        loop {
            if let Some(news) = self.news.pop_front() {
                return news;
            }
            // After the answer that it did not give, which a restart waits for.
            if self.renew {
                self.run();
                continue;
            }
            let Some(process) = &mut self.process else { return std::future::pending().await };
            let deadline = self.pending.map(|(_, deadline)| deadline);
            let turn = tokio::select! {
                biased;
                () = next_of(deadline.map(sleep_until)) => Turn::Late,
                turn = process.turn() => turn,
            };
            match turn {
                Turn::Said(line) => self.said(&line),
                Turn::Printed(lines) => self.news.extend(lines.into_iter().map(News::Printed)),
                Turn::Ended => self.ended(),
                Turn::Late => {
                    let loaded = self.process.as_ref().is_some_and(|process| process.ready);
                    let message = if loaded { "it took longer than" } else { "it was not loaded within" };
                    self.give_up(&format!("{message} {} ms", self.within.as_millis()));
                }
                Turn::Moved => {}
            }
        }
    }

    /// Ends its process, once what the script does in threads is finished, and returns what it has printed last.
    pub async fn end(mut self) -> Vec<String> {
        if let Some(process) = self.process.as_ref().filter(|process| process.ready) {
            process.close();
            if let Ok(handle) = pidfd::PidFd::open(process.pid()) {
                let _ = timeout(END_TIMEOUT, handle.ended()).await;
            }
        }
        self.kill();
        let printed = |news| if let News::Printed(line) = news { Some(line) } else { None };
        self.news.drain(..).filter_map(printed).collect()
    }

    fn run(&mut self) {
        self.renew = false;
        let Ok(source) = &self.source else { return };
        match Process::start(&self.interpreter, self.mark.as_deref()) {
            Ok(mut process) => {
                process.send(&json!({
                    "file": self.file,
                    "source": source,
                    "classes": CLASSES,
                    "memory": MAX_MEMORY_BYTES,
                }));
                self.process = Some(process);
            }
            Err(error) => {
                let message = format!("{}: starting {}: {error}", self.name, self.interpreter);
                self.news.push_back(News::Broken(message));
            }
        }
    }

    fn said(&mut self, line: &[u8]) {
        let Ok(said) = serde_json::from_slice::<Said>(line) else {
            return self.give_up("its answer is not understood");
        };
        if let Some(message) = said.broken {
            self.source = Err(message.clone());
            self.kill();
            self.news.push_back(News::Broken(message.clone()));
            self.news.extend(self.pending.take().map(|(incident, _)| failed(incident, message)));
        } else if said.ready {
            self.news.push_back(News::Ready);
            self.process.iter_mut().for_each(|process| process.ready = true);
        } else if said.answer == Some(self.number)
            && let Some((incident, _)) = self.pending.take()
        {
            let named = |message| format!("{}: {message}", self.name);
            let advice = said.failed.map_or_else(|| Advice::read(&said.decision).map_err(named), Err);
            self.news.push_back(News::Answered(incident, Reply { advice, lines: said.lines }));
        }
    }

    /// The process ended by itself. It is started again when it is needed.
    fn ended(&mut self) {
        let Some(process) = &self.process else { return };
        let ready = process.ready;
        let how = match pidfd::exit_status(process.pid()) {
            Ok(Some(status)) => format!("its process ended ({status})"),
            _ => "its process ended".to_owned(),
        };
        if self.pending.is_some() {
            return self.give_up(&how);
        }
        self.kill();
        if !ready {
            self.news.push_back(News::Broken(format!("{}: {how}", self.name)));
        }
    }

    /// Answers a question in its place, and has it started anew.
    fn give_up(&mut self, why: &str) {
        let message = format!("{}: {why}", self.name);
        self.news.extend(self.pending.take().map(|(incident, _)| failed(incident, message)));
        self.kill();
        self.renew = true;
    }

    /// Kills its process, and reports what that has printed last.
    fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            self.news.extend(process.kill().into_iter().map(News::Printed));
        }
    }
}

fn read(file: &Path) -> Result<String, String> {
    let unread = |error: io::Error| format!("{}: it cannot be read: {error}", file.display());
    if is_starlark(file) {
        return Err(format!("{}: {STARLARK}", file.display()));
    }
    let metadata = std::fs::metadata(file).map_err(unread)?;
    // A FIFO would be waited for, and a device may have no end.
    if !metadata.is_file() {
        return Err(format!("{}: it is not a regular file", file.display()));
    }
    if metadata.len() > MAX_FILE_BYTES {
        let size = metadata.len();
        return Err(format!("{}: it is {size} bytes long; that is not a policy", file.display()));
    }
    std::fs::read_to_string(file).map_err(unread)
}

/// Whether it is a policy of an earlier version.
pub fn is_starlark(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "star")
}

/// Why a policy of an earlier version is refused.
pub const STARLARK: &str = "policies are Python scripts now, not Starlark; \
    docs/reference/policy-file.md has how to convert it";

fn failed(incident: Incident, message: String) -> News {
    News::Answered(incident, Reply { advice: Err(message), lines: Vec::new() })
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Said {
    ready: bool,
    broken: Option<String>,
    answer: Option<u64>,
    decision: Value,
    failed: Option<String>,
    lines: Vec<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::id::Attempt;
    use mainstay_model::policy::{CauseKind, Rung};
    use mainstay_model::verdict::Action;

    #[test]
    fn what_is_no_regular_file_is_not_read() {
        read(Path::new("/dev/zero")).expect_err("it has no end");
    }

    #[test]
    fn the_classes_name_all_actions_and_causes() {
        let actions = Rung::ALL.map(|rung| Action::from_rung(rung, Attempt(0), 0).as_str());
        let causes = CauseKind::ALL.map(CauseKind::as_str);
        for name in actions.into_iter().chain([Action::Wait.as_str()]).chain(causes) {
            assert!(CLASSES.contains(&format!("\"{name}\"")), "{name}");
        }
    }
}

//! A job of several roles: this process starts a launcher for each role and passes signals on to them. Nothing else is
//! common to the roles, so that what happens to one does not touch the others. The first role is the job's: it ends with it.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use mainstay_launcher::output::{LineStyle, Terminal};
use mainstay_launcher::paths::{self, RuntimeDir};
use mainstay_launcher::roles::{self, RoleFile, RoleState};
use mainstay_model::entry::ExitStatus;
use mainstay_model::id::Pid;
use mainstay_model::time::Span;
use mainstay_sys::pidfd::{self, PidFd};
use mainstay_sys::spawn;
use mainstay_view::node::JobPhase;
use nix::libc::{SIGTERM, SIGUSR1, SIGUSR2};
use nix::unistd::geteuid;
use tokio::sync::mpsc;
use tokio::task::LocalSet;

use crate::default_paths;
use crate::job::NOT_STARTED;
use crate::job::signals::caught;

/// The longest wait before a role is started again. A launcher that ran longer has helped: the waits start over.
const MAX_BACKOFF: Span = Span::seconds(300);

/// How long the last lines may take if no one reads them.
const FLUSH_WITHIN: Duration = Duration::from_millis(500);

/// A job of several roles.
#[derive(Debug)]
pub struct RolesPlan {
    /// The run id of the job; that of a role has the role's name behind it.
    pub run_id: String,
    /// The roles. The job ends with the first.
    pub roles: Vec<RolePlan>,
    /// Where pages and sockets are created; `/dev/shm/mainstay-<uid>` if not given.
    pub runtime_root: Option<PathBuf>,
    /// The signals that end the job.
    pub signals: Vec<i32>,
    /// Whether this process's lines start with their time.
    pub timestamps: bool,
    /// What people should know of the plan.
    pub notes: Vec<String>,
}

/// A role.
#[derive(Debug)]
pub struct RolePlan {
    /// Its name.
    pub name: String,
    /// The options of its `mainstay run`, without `--max-restarts`.
    pub options: Vec<OsString>,
    /// The command of its ranks.
    pub command: Vec<String>,
    /// Variables of the environment to set, or to remove.
    pub variables: Vec<(&'static str, Option<String>)>,
    /// When it is started again.
    pub restart: RestartRule,
}

/// When a role is started again. Its launcher restarts ranks after a failure; this process starts the launcher again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartRule {
    /// After what.
    pub when: When,
    /// At most how many times in the whole job, by its launcher and by this process together.
    pub max: u32,
    /// The wait before this process starts it again, doubled each time.
    pub backoff: Span,
}

/// After what a role is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Nothing.
    Never,
    /// A failure that its launcher restarts, or the death of its launcher.
    OnFailure,
    /// Any end.
    Always,
}

/// What the loop waits for.
enum Event {
    /// The launcher of this role has ended.
    Ended(usize),
    /// The wait of this role is over.
    Again(usize),
}

/// A role while the job runs.
struct Role {
    plan: RolePlan,
    file: Option<RoleFile>,
    launcher: Option<Rc<PidFd>>,
    started: Instant,
    /// How many launchers it has had.
    launches: u32,
    /// How many waits there were since a launcher that ran for long.
    waits: u32,
    /// Its last exit status, once it is over.
    exit: Option<i32>,
}

/// Runs a job of several roles to its end and returns the exit status of the first.
///
/// # Errors
/// Signals cannot be caught, or no thread can be started for the terminal.
pub async fn run_roles(plan: RolesPlan) -> anyhow::Result<i32> {
    LocalSet::new().run_until(run(plan)).await
}

async fn run(plan: RolesPlan) -> anyhow::Result<i32> {
    let RolesPlan { run_id, roles, runtime_root, signals: ending, timestamps, notes } = plan;
    let to_save = [SIGUSR1, SIGUSR2].into_iter().filter(|signal| !ending.contains(signal));
    let all: Vec<i32> = ending.iter().copied().chain(to_save).collect();
    let mut signals = caught(&all).context("catching signals")?;
    let style = LineStyle { timestamps, ..LineStyle::default() };
    let terminal = Terminal::start(style).context("starting the thread that writes to the terminal")?;
    notes.into_iter().for_each(|note| terminal.print(note));
    let root = runtime_root
        .unwrap_or_else(|| default_paths::runtime_root(geteuid().as_raw(), &default_paths::environment));
    let states = paths::roles_dir(&root, &run_id)
        .map_err(|error| terminal.print(format!("roles do not see each other's states: {error}")))
        .ok();
    let (events, mut happened) = mpsc::channel(16);
    let mut job = Job::new(roles, states.as_ref(), events, terminal);
    job.start();
    while job.roles.iter().any(|role| role.exit.is_none()) {
        tokio::select! {
            biased;
            Some(signal) = signals.recv() => job.signal(signal, ending.contains(&signal)),
            Some(event) = happened.recv() => match event {
                Event::Ended(at) => job.ended(at),
                Event::Again(at) => job.launch(at),
            },
        }
    }
    if let Some(states) = states {
        // No rank is left that reads them.
        let _ = std::fs::remove_dir_all(&states.path);
    }
    job.terminal.flush(FLUSH_WITHIN);
    Ok(job.roles.first().and_then(|first| first.exit).unwrap_or(NOT_STARTED))
}

struct Job {
    roles: Vec<Role>,
    states: Option<PathBuf>,
    /// Whether all roles are being ended.
    stopping: bool,
    events: mpsc::Sender<Event>,
    terminal: Terminal,
}

impl Job {
    fn new(
        plans: Vec<RolePlan>,
        states: Option<&RuntimeDir>,
        events: mpsc::Sender<Event>,
        terminal: Terminal,
    ) -> Job {
        let states = states.map(|states| states.path.clone());
        let role = |plan: RolePlan| Role {
            file: states.as_deref().map(|directory| RoleFile::of(directory, &plan.name)),
            plan,
            launcher: None,
            started: Instant::now(),
            launches: 0,
            waits: 0,
            exit: None,
        };
        Job { roles: plans.into_iter().map(role).collect(), states, stopping: false, events, terminal }
    }

    /// The first ranks of any role see all roles.
    fn start(&mut self) {
        self.roles.iter().for_each(|role| role.report(&self.terminal, JobPhase::Starting.name(), None));
        (0..self.roles.len()).for_each(|at| self.launch(at));
    }

    /// Starts the launcher of a role.
    fn launch(&mut self, at: usize) {
        let Some(role) = self.roles.get_mut(at).filter(|role| role.exit.is_none()) else { return };
        let max_restarts = role.max_restarts();
        role.launches = role.launches.saturating_add(1);
        role.started = Instant::now();
        match role.spawn(max_restarts, self.states.as_deref()) {
            Ok(launcher) => {
                let (launcher, events) = (Rc::new(launcher), self.events.clone());
                role.launcher = Some(launcher.clone());
                tokio::task::spawn_local(async move {
                    if launcher.ended().await.is_ok() {
                        let _ = events.send(Event::Ended(at)).await;
                    }
                });
            }
            Err(error) => {
                self.terminal.print(format!("role {}: starting its launcher: {error}", role.plan.name));
                self.over(at, NOT_STARTED, "");
            }
        }
    }

    fn ended(&mut self, at: usize) {
        let Some(role) = self.roles.get_mut(at) else { return };
        let Some(launcher) = role.launcher.take() else { return };
        let (exit, was_killed) = match pidfd::exit_status(launcher.pid()) {
            Ok(Some(ExitStatus::Code(code))) => (code, false),
            Ok(Some(ExitStatus::Signal(signal))) => (128 + signal, true),
            // Not our child any more: it was reaped elsewhere.
            Ok(None) | Err(_) => (NOT_STARTED, false),
        };
        pidfd::reap(launcher.pid());
        let RestartRule { when, max, backoff } = role.plan.restart;
        let wanted = match when {
            When::Never => false,
            When::OnFailure => was_killed,
            When::Always => true,
        };
        // By a person, or by a signal here or on another host of the job: no rule brings it back.
        let was_asked = role.state().is_some_and(|last| last.state == JobPhase::Stopping.name());
        if self.stopping || was_asked || !wanted {
            return self.over(at, exit, "");
        }
        let used = role.restarts();
        if used >= max {
            return self.over(at, exit, &format!("; its {max} restart(s) are used up"));
        }
        if role.started.elapsed() > Duration::from_nanos(MAX_BACKOFF.0) {
            role.waits = 0;
        }
        let wait = waits(backoff, role.waits);
        role.waits = role.waits.saturating_add(1);
        self.terminal.print(format!(
            "role {} ended with status {exit}; it starts again in {wait}: restart {} of {max}",
            role.plan.name,
            used + 1
        ));
        role.report(&self.terminal, roles::WAITING, Some(exit));
        let events = self.events.clone();
        tokio::task::spawn_local(async move {
            tokio::time::sleep(Duration::from_nanos(wait.0)).await;
            let _ = events.send(Event::Again(at)).await;
        });
    }

    /// A role is over for good. The job ends with the first one.
    fn over(&mut self, at: usize, exit: i32, why: &str) {
        let Some(role) = self.roles.get_mut(at) else { return };
        role.exit = Some(exit);
        role.report(&self.terminal, JobPhase::Ended(exit).name(), Some(exit));
        let name = role.plan.name.clone();
        let left: Vec<&str> = self
            .roles
            .iter()
            .filter(|role| role.exit.is_none())
            .map(|role| role.plan.name.as_str())
            .collect();
        let left = left.join(", ");
        let then = match (left.is_empty() || self.stopping, at) {
            (true, _) => String::new(),
            (false, 0) => format!("; it is the first role, so the job ends: stopping {left}"),
            (false, _) => format!("; the job goes on with {left}"),
        };
        self.terminal.print(format!("role {name} ended with status {exit}{why}{then}"));
        if at == 0 && !self.stopping {
            self.stop(SIGTERM);
        }
    }

    fn signal(&mut self, signal: i32, ends: bool) {
        if ends {
            self.stop(signal);
        } else {
            self.pass_on(signal);
        }
    }

    /// Ends all roles. Those that wait to be started again are over.
    fn stop(&mut self, signal: i32) {
        self.stopping = true;
        self.pass_on(signal);
        let waiting = self.roles.iter_mut().filter(|role| role.launcher.is_none() && role.exit.is_none());
        waiting.for_each(|role| role.exit = Some(128 + signal));
    }

    fn pass_on(&self, signal: i32) {
        for launcher in self.roles.iter().filter_map(|role| role.launcher.as_ref()) {
            if let Err(error) = launcher.signal(signal) {
                tracing::warn!(%error, pid = launcher.pid().0, signal, "a signal does not reach a launcher");
            }
        }
    }
}

impl Role {
    /// How many times its ranks were started after the first time.
    fn restarts(&self) -> u32 {
        let launchers = self.launches.saturating_sub(1);
        self.incarnation().saturating_sub(1).max(launchers)
    }

    /// The restarts that are left for its next launcher. A launcher after the first is itself a restart.
    fn max_restarts(&self) -> u32 {
        let RestartRule { when, max, .. } = self.plan.restart;
        match (when, self.launches) {
            (When::Never, _) => 0,
            (_, 0) => max,
            _ => max.saturating_sub(self.restarts()).saturating_sub(1),
        }
    }

    fn incarnation(&self) -> u32 {
        self.state().map_or(0, |state| state.incarnation)
    }

    /// What its launcher reported last, or this process.
    fn state(&self) -> Option<RoleState> {
        self.file.as_ref().and_then(RoleFile::read)
    }

    fn report(&self, terminal: &Terminal, state: &str, exit: Option<i32>) {
        let Some(file) = &self.file else { return };
        if let Err(error) = file.write(state, self.incarnation(), exit) {
            terminal.print(format!("other roles do not see the state of role {}: {error}", self.plan.name));
        }
    }

    /// Starts a launcher that ends with this process, and its ranks with it. The terminal's signals reach this process
    /// alone: the launcher has a process group of its own.
    fn spawn(&self, max_restarts: u32, states: Option<&Path>) -> io::Result<PidFd> {
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("mainstay")
            .arg("run")
            .args(&self.plan.options)
            .arg(format!("--max-restarts={max_restarts}"))
            .args(&self.plan.command)
            .stdin(Stdio::null());
        for (name, value) in &self.plan.variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        match states {
            Some(states) => command.env(roles::VARIABLE, states),
            None => command.env_remove(roles::VARIABLE),
        };
        let child = spawn::spawn_bound(&mut command, None)?;
        // Dropping the child does not end it. It is not reaped before this, so the number is its own.
        PidFd::open(Pid(i32::try_from(child.id()).unwrap_or(0)))
    }
}

/// The wait before a launcher is started again, after as many waits.
fn waits(backoff: Span, before: u32) -> Span {
    Span(
        backoff
            .0
            .saturating_mul(1_u64.checked_shl(before).unwrap_or(u64::MAX))
            .min(MAX_BACKOFF.0.max(backoff.0)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_limit_that_a_longer_one_exceeds() {
        let second = Span::seconds(1);
        assert_eq!([0, 1, 2].map(|before| waits(second, before)), [1, 2, 4].map(Span::seconds));
        assert_eq!([9, 63, 64, 1000].map(|before| waits(second, before)), [MAX_BACKOFF; 4]);
        assert_eq!(waits(Span::seconds(600), 3), Span::seconds(600));
    }
}

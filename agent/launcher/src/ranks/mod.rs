//! The ranks of this host: how they are started ([`start`]), and how they end ([`end`]).

pub mod devices;
mod end;
mod environment;
pub mod guardian;
mod port;
pub(crate) mod process;
mod round_server;
pub(crate) mod save;
mod spec;
mod start;
pub(crate) mod stop;
pub mod warm;

use mainstay_model::entry::{Fact, StepDone};
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::in_process::Round;
use mainstay_recovery::job::EXHAUSTED;
use mainstay_recovery::protocol::Event;
use mainstay_sensors::source::evidence::Subject;
use mainstay_sensors::source::host::Roots;
use mainstay_sensors::source::oom::OomKills;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sensors::source::process_limit::ProcessLimits;
use mainstay_sys::cgroup::Cgroup;
use mainstay_sys::{clock, lifeline, processes};
use tokio::sync::mpsc;

use crate::group::Group;
use crate::hang::Hang;
use crate::log_mirror::LogMirror;
use crate::output::Output;
use crate::output::rank_output::StreamTails;
use crate::pages::Pages;
use crate::policy::Policy;
pub(crate) use round_server::RoundServer;
pub(crate) use spec::RankFiles;
pub use spec::RankSpec;
pub(crate) use start::Start;
pub use stop::Grace;

use guardian::Guardian;
use port::HeldPort;
use process::RankProcess;
use stop::Stop;
use warm::{Warm, with_descendants};

/// How many of a rank's last steps go into the evidence.
const MAX_LAST_STEPS: usize = 16;

/// The ranks of this host, and what is theirs.
#[derive(Debug)]
pub(crate) struct Ranks {
    pub(crate) spec: RankSpec,
    pub(crate) attempt: Attempt,
    pub(crate) processes: Vec<RankProcess>,
    pub(crate) pages: Pages,
    pub(crate) stopping: Stopping,
    pub(crate) warm: Warm,
    /// Reports that a rank's process is gone.
    pub(crate) ended: (mpsc::UnboundedSender<Ended>, mpsc::UnboundedReceiver<Ended>),
    /// Reports that a rank's process is ending, from its lifeline.
    pub(crate) endings: (mpsc::UnboundedSender<Pid>, mpsc::UnboundedReceiver<Pid>),
    pub(crate) guardian: Option<Guardian>,
    pub(crate) mirror: Option<LogMirror>,
    cgroup: Option<Cgroup>,
    /// Where ranks that can stay in their processes agree on rounds; none without a directory for it.
    pub(crate) round_server: Option<RoundServer>,
    /// Where ranks receive faults, in a job that permits them.
    pub(crate) drill_server: Option<RoundServer>,
    /// The round of the current attempt.
    round: Round,
    /// Held until the next attempt takes another port.
    port: Option<HeldPort>,
    /// Processes of the previous attempt that did not die of SIGKILL.
    undying: Vec<Pid>,
    oom_kills: OomKills,
    pub(crate) limits: ProcessLimits,
}

#[derive(Debug)]
pub(crate) struct Ended {
    pid: Pid,
    at: Mono,
}

/// A stop in progress, and requests of others to stop or to save.
#[derive(Debug)]
pub(crate) struct Stopping {
    pub(crate) stop: Option<Stop>,
    /// The signal that asked the launcher to stop, if one has, and when; the ranks get the same.
    pub(crate) asked_by: Option<(i32, Mono)>,
    /// How long the ranks have to leave a machine that is taken away, once they were asked to.
    pub(crate) leave_within: Option<Span>,
    /// The step after which ranks that are stopped are asked to save, if a leader chose it for all hosts.
    pub(crate) save_after: Option<u64>,
    /// The signal that asked for a save, and the attempt for which this launcher has passed it on.
    save_by: Option<(i32, Option<Attempt>)>,
    /// The attempt whose ranks were asked to save, and the step after which they do.
    asked_to_save: Option<(Attempt, Option<u64>)>,
    grace: Grace,
    /// Sent with a request to save.
    save_signal: Option<i32>,
}

impl Stopping {
    pub(crate) fn new(grace: Grace, save_signal: Option<i32>) -> Stopping {
        let (stop, asked_by, leave_within, save_after, save_by, asked_to_save) =
            (None, None, None, None, None, None);
        Stopping { stop, asked_by, leave_within, save_after, save_by, asked_to_save, grace, save_signal }
    }

    /// Whether the job was asked to end.
    pub(crate) fn is_requested(&self) -> bool {
        self.asked_by.is_some() || self.leave_within.is_some()
    }

    /// How long stops may take now.
    pub(crate) fn grace(&self) -> Grace {
        Grace { requested: self.leave_within.unwrap_or(self.grace.requested), ..self.grace }
    }
}

/// What the ranks' events concern besides the ranks.
#[derive(Debug)]
pub(crate) struct Reports<'a> {
    pub(crate) group: &'a mut Group,
    pub(crate) output: &'a mut Output,
    pub(crate) hang: &'a mut Hang,
    pub(crate) policy: Option<&'a Policy>,
}

impl Ranks {
    pub(crate) fn new(
        spec: RankSpec,
        warm: Warm,
        stopping: Stopping,
        (guardian, cgroup, mirror): (Option<Guardian>, Option<Cgroup>, Option<LogMirror>),
        allow_inject: bool,
    ) -> Ranks {
        let directory = spec.page_dir.as_deref();
        let open = |drills, lost: &str| {
            directory.and_then(|directory| {
                RoundServer::open(directory, drills)
                    .inspect_err(|error| {
                        tracing::warn!("{lost}: creating a socket in {}: {error}", directory.display());
                    })
                    .ok()
            })
        };
        let roots = Roots::default();
        Ranks {
            attempt: Attempt(0),
            processes: Vec::new(),
            pages: Pages::open(directory, spec.settings.progress.as_ref()),
            stopping,
            warm,
            ended: mpsc::unbounded_channel(),
            endings: mpsc::unbounded_channel(),
            guardian,
            mirror,
            cgroup,
            round_server: open(false, "restart in process is not available"),
            drill_server: if allow_inject { open(true, "only signals can be injected") } else { None },
            round: Round::default(),
            port: None,
            undying: Vec::new(),
            oom_kills: OomKills::open(roots.proc.clone(), &roots.sys),
            limits: ProcessLimits::read(&roots.proc, &roots.sys),
            spec,
        }
    }

    /// The ranks that have not ended.
    pub(crate) fn living(&self) -> impl Iterator<Item = &RankProcess> {
        self.processes.iter().filter(|rank| rank.exit.is_none())
    }

    pub(crate) fn are_running(&self) -> bool {
        self.living().next().is_some()
    }

    /// Whether ranks run, and none is being stopped.
    pub(crate) fn are_at_work(&self) -> bool {
        self.stopping.stop.is_none() && self.are_running()
    }

    /// Whether a rank is missing: it failed, or its process is ending.
    pub(crate) fn has_failed(&self) -> bool {
        let failed = |rank: &RankProcess| {
            rank.raised || rank.ending.is_some() || rank.exit.is_some_and(|exit| !exit.is_success())
        };
        self.processes.iter().any(failed)
    }

    /// Processes below the launcher that do not belong to the ranks: the guardian, the mirror of the logs, a coordination
    /// store, and those of the user's policy.
    pub(crate) fn helpers(&self, group: &Group, policy: Option<&Policy>) -> Vec<Pid> {
        let policy = policy.and_then(Policy::pid);
        let mut helpers = with_descendants(policy.as_slice());
        helpers.extend(self.guardian.as_ref().map(Guardian::pid));
        helpers.extend(self.mirror.as_ref().map(LogMirror::pid));
        helpers.extend(group.store_process());
        helpers
    }

    /// Reads all pages and reports what is new.
    pub(crate) fn look(&mut self, to: &mut Reports<'_>) {
        let attempt = self.attempt;
        let mut stepped = Vec::new();
        for index in 0..self.processes.len() {
            let process = &mut self.processes[index];
            let (rank, pid) = (process.rank, process.pid);
            let Some(page) = self.pages.readers.get_mut(&rank) else { continue };
            let update = page.look();
            let now = clock::mono();
            to.hang.see(process.local_rank, page, now);
            if let Some((client, _)) = update.connected {
                watch_lifeline(process, page, &self.endings.0);
                to.group.fact(Fact::RankConnected { attempt, rank, client });
            }
            if let Some(reason) = update.refused {
                to.group.fact(Fact::RankRefused { attempt, rank, reason });
            }
            if let Some((role, stage)) = update.role {
                to.group.step(now, Event::Role { attempt, rank, role, stage });
            }
            if !update.steps.is_empty() {
                to.output.spoken.stepped(rank, &update.steps);
                if index == 0 {
                    self.pages.step_times.extend(&update.steps);
                }
                stepped.push((rank, update.steps));
            }
            if let Some(note) = update.raised {
                report_steps(attempt, std::mem::take(&mut stepped), to.group);
                process.raised = true;
                let data = page.data();
                to.output.spoken.note(rank, &note);
                to.output.note_end(attempt, Some(&note), None, &StreamTails::default());
                self.count_oom_kills(to.group);
                to.group.fact(Fact::RankRaised { attempt, rank, pid, note, data });
            }
        }
        report_steps(attempt, stepped, to.group);
    }

    /// What is recorded of the living ranks if they hang.
    pub(crate) fn subjects(&self) -> Vec<Subject> {
        let subject = |process: &RankProcess| {
            let page = self.pages.get(process.rank);
            let beat = page.and_then(PageReader::beat).unwrap_or_default();
            Subject {
                rank: process.rank,
                pid: process.pid,
                stacks: Some(process.files.stacks.clone()),
                step: beat.step,
                sections: beat.sections,
                last_steps: page.map_or_else(Vec::new, |page| page.last_steps(MAX_LAST_STEPS)),
            }
        };
        self.living().map(subject).collect()
    }

    /// Counts the kernel's OOM kills and refused processes now. The kernel may have killed a rank that fails, or a worker process that it waited
    /// for, and the regular look at the host comes too late for the verdict.
    pub(crate) fn count_oom_kills(&mut self, group: &mut Group) {
        self.limits.sample();
        let count = self.oom_kills.new_ones();
        if count > 0 {
            group.fact(Fact::OutOfMemoryKills { count });
        }
        if let Some(refused) = self.limits.refused() {
            group.fact(exhausted(refused));
        }
    }

    /// Resources that the next ranks need and other processes hold, as far as visible without an agent.
    pub(crate) fn held(&mut self, fixed_port: Option<u16>) -> Vec<String> {
        self.undying.retain(|pid| processes::is_alive(*pid));
        let mut held: Vec<String> = self.undying.iter().map(|pid| undying(*pid)).collect();
        held.extend(self.limits.too_few());
        if let Some(port) = fixed_port {
            // Release our port of the previous attempt first; the next attempt takes it again.
            self.port = None;
            if let Err(error) = HeldPort::take(port) {
                held.push(format!("port {port} for the ranks' store (MASTER_PORT) cannot be taken: {error}"));
            }
        }
        held
    }
}

fn report_steps(attempt: Attempt, ranks: Vec<(Rank, Vec<StepDone>)>, group: &mut Group) {
    if !ranks.is_empty() {
        group.step(clock::mono(), Event::Steps { attempt, ranks });
    }
}

/// Has the rank's lifeline report when its process starts to end. Without one its pidfd reports the end, later.
fn watch_lifeline(rank: &mut RankProcess, page: &PageReader, endings: &mpsc::UnboundedSender<Pid>) {
    let (Some(word_at), Some((_, file)), false) = (page.lifeline(), &rank.page, rank.watched) else { return };
    let (pid, endings) = (rank.pid, endings.clone());
    let watched = lifeline::watch(file, word_at, move || {
        // The receiver goes only when the launcher does.
        let _ = endings.send(pid);
    });
    rank.watched = watched.is_ok();
    if let Err(error) = watched {
        tracing::debug!(rank = rank.rank.0, %error, "cannot watch a rank's lifeline");
    }
}

/// A process, thread or file descriptor could not be had.
fn exhausted(detail: String) -> Fact {
    Fact::Observed(Observation {
        component: "job".to_owned(),
        event: EXHAUSTED.to_owned(),
        weight: Weight::Error,
        detail,
        ..Observation::default()
    })
}

/// A description of a process that did not die of SIGKILL: what it waits in, and whether it holds a device.
fn undying(pid: Pid) -> String {
    let devices = processes::open_files(pid, "/dev/nvidia");
    let holds = if devices.is_empty() { String::new() } else { format!(" and holds {}", devices.join(", ")) };
    format!(
        "process {} of the previous attempt does not exit; it is {}{holds}",
        pid.0,
        processes::waits_in(pid)
    )
}

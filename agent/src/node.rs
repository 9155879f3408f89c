//! Floor 3. The shell of the agent: the one task that owns what the agent knows. Launchers' entries, samples and
//! proposals and the host's reports come in; the board is what goes out.

mod gpus;
mod hardware;

use std::collections::BTreeMap;

use mainstay_core::attention::Word;
use mainstay_core::device::{DeviceReport, GpuEvent, Opinion};
use mainstay_core::entry::{Body, Entry, Fact};
use mainstay_core::health::{Component, HealthState, RecommendedAction};
use mainstay_core::host_log;
use mainstay_core::id::{Attempt, Incident, JobId, Pid, Rank};
use mainstay_core::judged::Judged;
use mainstay_core::observation::Observation;
use mainstay_core::pci::PciAddress;
use mainstay_core::repeats::Repeats;
use mainstay_core::surroundings::Surroundings;
use mainstay_core::testimony::Testimony;
use mainstay_core::time::{Mono, Stamp};
use mainstay_core::verdict::{Cause, Decision, Verdict};
use mainstay_core::view::{BeatView, JobPhase};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

pub use gpus::GpuLook;
pub use hardware::{Hardware, LogReport};

use gpus::Gpus;

use crate::act::hook::Hooks;
use crate::board::Board;
use crate::os::pidfd::PidFd;
use crate::os::{clock, processes};

/// How often what the journal holds is forced onto the disk.
const SYNC_EVERY: std::time::Duration = std::time::Duration::from_secs(1);

/// The GPUs' driver on the roster of rooms.
pub const DEVICES: &str = "GPUs";

/// The kernel log on the roster of rooms.
pub const KERNEL_LOG: &str = "kernel log";

/// What the cloud announces for this machine.
const CLOUD: &str = "host.cloud";

/// What the node is told.
#[derive(Debug)]
pub enum Input {
    /// A launcher wants to report.
    Attach {
        /// Who and what.
        hello: Hello,
        /// The way back to it.
        orders: mpsc::Sender<ToLauncher>,
        /// Taken up, or refused with the reason.
        answer: oneshot::Sender<Result<Attached, String>>,
    },
    /// An entry of a launcher's journal.
    Entry(Session, Box<Entry>),
    /// A sample of a job's pages.
    Beats(Session, Attempt, Vec<(Rank, BeatView)>),
    /// A verdict, and what the launcher would do about it.
    Proposal(Session, Box<(Verdict, Decision)>),
    /// A proposal has waited for the GPUs to be read as long as it may.
    RulingDue(Session, Incident),
    /// A launcher's connection ended.
    Detached(Session),
    /// A launcher's process ended.
    LauncherEnded(JobId, Pid),
    /// A room that watches a part of the host has looked at it.
    Sensed(Judged),
    /// A room does not watch these components any more.
    Unwatched(Vec<String>),
    /// A room has looked, and what it saw was told before.
    Looked {
        /// Its name on the roster.
        room: String,
        /// The components that it told of.
        components: Vec<String>,
    },
    /// The GPUs' driver was asked.
    Devices {
        /// When they began to be read.
        began: Mono,
        /// What came of it.
        report: DeviceReport,
    },
    /// What another one who watches GPUs says of them, all of it.
    SecondOpinions(BTreeMap<PciAddress, Vec<Opinion>>),
    /// The GPUs' driver told something unasked.
    GpuEvents(Vec<GpuEvent>),
    /// The kernel log was read.
    KernelLog(LogReport),
    /// An operator says something of a component.
    Operator {
        /// Who, on the kernel's word.
        uid: u32,
        /// The component.
        component: String,
        /// What.
        word: Word,
        /// Whether there is such a component.
        answer: oneshot::Sender<Result<(), NoSuchComponent>>,
    },
}

/// No component has that name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no component {name:?} here; known: {}", known.join(", "))]
pub struct NoSuchComponent {
    /// What was asked for.
    pub name: String,
    /// What there is.
    pub known: Vec<String>,
}

/// What a launcher says of itself; process and user are the kernel's word, not its own.
#[derive(Clone, Debug)]
pub struct Hello {
    /// Its job.
    pub job: JobId,
    /// Its process.
    pub pid: Pid,
    /// Its user.
    pub uid: u32,
}

/// One connection of one launcher.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Session {
    /// The job.
    pub job: JobId,
    /// Counts the connections.
    pub number: u64,
}

/// A launcher was taken up.
#[derive(Clone, Debug)]
pub struct Attached {
    /// Its session.
    pub session: Session,
    /// The newest of its entries that the journal holds; 0 for none.
    pub have_seq: u64,
}

/// What the node tells a launcher.
#[derive(Clone, Debug)]
pub enum ToLauncher {
    /// The word on a proposal, none if it is agreed to; and what the host has to say of the failure.
    Ruling(Incident, Option<Decision>, Testimony),
    /// What is known of the host that may explain why ranks are slow.
    Surroundings(Surroundings),
    /// The machine is to be taken away; what was announced.
    Leave(String),
}

/// A job's launcher, as far as it matters here.
#[derive(Debug)]
struct Launcher {
    pid: Pid,
    uid: u32,
    have_seq: u64,
    /// What the GPUs did when ranks of the job were last found to hang.
    gpus_in_hang: Vec<String>,
    /// The current connection.
    session: Option<(u64, mpsc::Sender<ToLauncher>)>,
    /// What surrounds its ranks, as it was last told over this connection.
    surroundings: Surroundings,
}

/// The agent's own state.
#[derive(Debug)]
pub struct Node {
    board: Board,
    launchers: BTreeMap<JobId, Launcher>,
    sessions: u64,
    hardware: Hardware,
    gpus: Gpus,
    hooks: Hooks,
    repeats: Repeats,
    /// Whether launchers were told that the machine is to be taken away.
    leaving: bool,
    /// Proposals that wait for the GPUs to be read.
    waiting: Vec<(Session, Verdict)>,
    /// For what is watched beside the loop.
    own_inputs: mpsc::Sender<Input>,
}

impl Node {
    /// The node over a board whose journal holds `origins`: the newest launcher's entry by job.
    pub fn new(
        board: Board,
        origins: BTreeMap<JobId, u64>,
        hardware: Hardware,
        look: GpuLook,
        hooks: Hooks,
        repeats: Repeats,
        own_inputs: mpsc::Sender<Input>,
    ) -> Node {
        let launchers = board.view().jobs.iter().map(|(job, view)| {
            let have_seq = origins.get(job).copied().unwrap_or(0);
            (
                job.clone(),
                Launcher {
                    pid: view.spec.launcher,
                    uid: view.spec.uid,
                    have_seq,
                    gpus_in_hang: Vec::new(),
                    session: None,
                    surroundings: Surroundings::default(),
                },
            )
        });
        Node {
            launchers: launchers.collect(),
            board,
            sessions: 0,
            hardware,
            gpus: Gpus::new(look),
            hooks,
            repeats,
            leaving: false,
            waiting: Vec::new(),
            own_inputs,
        }
    }

    /// Runs until told to stop and until nobody can tell anything any more.
    pub async fn run(mut self, mut inputs: mpsc::Receiver<Input>, alive: impl Fn(), stop: CancellationToken) {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let pid = Pid(i32::try_from(std::process::id()).unwrap_or(0));
        self.record(None, Fact::AgentStarted { version, pid });
        self.find_jobs_again();
        let mut sync = tokio::time::interval(SYNC_EVERY);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(input) = inputs.recv() => self.step(input),
                // The watchdog is fed from here: it guards the loop, not a timer.
                _ = sync.tick() => { self.tell_events(); self.look_at_the_clock(); self.tell_surroundings(); self.sync(); alive(); }
            }
        }
        self.record(None, Fact::AgentStopped);
        self.sync();
    }

    fn sync(&mut self) {
        self.board.sync();
        self.hardware.keep_cursor();
    }

    /// Jobs of the journal whose launchers live are waited for; of the others it is said that they are lost.
    fn find_jobs_again(&mut self) {
        let open: Vec<(JobId, Pid)> = self
            .board
            .view()
            .jobs
            .values()
            .filter(|job| !matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost))
            .map(|job| (job.id.clone(), job.spec.launcher))
            .collect();
        for (job, pid) in open {
            if processes::is_alive(pid) {
                self.watch(job, pid);
            } else {
                self.launcher_ended(&job, pid);
            }
        }
    }

    fn step(&mut self, input: Input) {
        match input {
            Input::Attach { hello, orders, answer } => {
                // The caller may have gone meanwhile; its session then ends by itself.
                let _ = answer.send(self.attach(hello, orders));
            }
            Input::Entry(session, entry) => self.entry(&session, *entry),
            Input::Beats(session, attempt, beats) => {
                if self.is_current(&session) {
                    for (rank, beat) in beats {
                        self.board.sample(&session.job, attempt, rank, beat);
                    }
                    self.board.publish();
                }
            }
            Input::Proposal(session, proposal) => self.proposed(session, proposal.0),
            Input::Detached(session) => {
                if self.is_current(&session)
                    && let Some(launcher) = self.launchers.get_mut(&session.job)
                {
                    launcher.session = None;
                }
            }
            Input::LauncherEnded(job, pid) => self.launcher_ended(&job, pid),
            Input::Sensed(judged) => self.sensed(judged),
            Input::Unwatched(names) => self.unwatched(&names),
            Input::Looked { room, components } => {
                if self.board.roster().has_looked(&room, clock::mono(), components) {
                    // Someone may wait for the first look of all.
                    self.board.publish();
                }
            }
            Input::Devices { began, report } => self.devices(began, report),
            Input::RulingDue(session, incident) => self.rule_in_any_case(&session, incident),
            Input::SecondOpinions(opinions) => {
                self.hardware.second_opinions(opinions);
                self.show(clock::now(), Vec::new());
                self.board.publish();
            }
            Input::GpuEvents(events) => self.gpu_events(&events),
            Input::KernelLog(report) => self.kernel_log(report),
            Input::Operator { uid, component, word, answer } => {
                let _ = answer.send(self.operator(uid, &component, &word));
            }
        }
    }

    fn operator(&mut self, uid: u32, component: &str, word: &Word) -> Result<(), NoSuchComponent> {
        let now = clock::now();
        if self.board.attend(now, uid, component, word).is_none() {
            let known = self.board.view().components.keys().cloned().collect();
            return Err(NoSuchComponent { name: component.to_owned(), known });
        }
        if let Word::Acknowledge { .. } = word {
            self.hardware.acknowledge(now.mono, component);
            self.show(now, Vec::new());
        }
        self.board.publish();
        Ok(())
    }

    /// Tells launchers what surrounds their ranks, where that has changed.
    fn tell_surroundings(&mut self) {
        let view = self.board.view();
        let mut components = None;
        for (job, launcher) in &mut self.launchers {
            let (Some((_, orders)), Some(of)) = (&launcher.session, view.jobs.get(job)) else { continue };
            let components: &Vec<Component> =
                components.get_or_insert_with(|| view.components.values().cloned().collect());
            let ranks: Vec<(Rank, Pid)> = of.ranks.values().map(|rank| (rank.rank, rank.pid)).collect();
            let known = Surroundings::of(&ranks, components, &view.gpus);
            if !known.is_as(&launcher.surroundings)
                && orders.try_send(ToLauncher::Surroundings(known.clone())).is_ok()
            {
                launcher.surroundings = known;
            }
        }
    }

    /// What time alone changes: silences run out, and what was read too long ago must not stand as healthy.
    fn look_at_the_clock(&mut self) {
        let now = clock::now();
        self.board.end_silences(now);
        let stale = self.board.roster().stale(now.mono, &self.board.view().components);
        if !stale.is_empty() {
            self.board.show_host(now, stale);
        }
    }

    fn attach(&mut self, hello: Hello, orders: mpsc::Sender<ToLauncher>) -> Result<Attached, String> {
        let known = self.launchers.get(&hello.job);
        let same = known.is_some_and(|launcher| launcher.pid == hello.pid && launcher.uid == hello.uid);
        if let Some(other) = known.filter(|_| !same)
            && self.is_open(&hello.job)
            && processes::is_alive(other.pid)
        {
            return Err(format!(
                "job {} is run by the launcher {} of user {}; choose another --rdzv-id",
                hello.job, other.pid.0, other.uid
            ));
        }
        self.sessions += 1;
        let number = self.sessions;
        let have_seq = known.filter(|_| same).map_or(0, |launcher| launcher.have_seq);
        let session = Some((number, orders));
        self.launchers.insert(
            hello.job.clone(),
            Launcher {
                pid: hello.pid,
                uid: hello.uid,
                have_seq,
                gpus_in_hang: Vec::new(),
                session,
                surroundings: Surroundings::default(),
            },
        );
        self.watch(hello.job.clone(), hello.pid);
        Ok(Attached { session: Session { job: hello.job, number }, have_seq })
    }

    fn entry(&mut self, session: &Session, entry: Entry) {
        if !self.is_current(session) || entry.job.as_ref() != Some(&session.job) {
            return;
        }
        let Some(launcher) = self.launchers.get_mut(&session.job) else { return };
        if entry.seq <= launcher.have_seq {
            return;
        }
        launcher.have_seq = entry.seq;
        if let Body::Fact(Fact::RanksHung { .. }) = &entry.body {
            // Now, while they hang: when the verdict is asked about, they have been stopped.
            let now = clock::mono();
            let gpus = self.board.view().gpus.iter();
            launcher.gpus_in_hang = gpus.filter_map(|gpu| gpu.doing(now)).collect();
        }
        let body = match entry.body {
            // Whose job it is, the kernel has said; a launcher cannot speak for another user or process.
            Body::Fact(Fact::JobStarted(mut spec)) => {
                (spec.launcher, spec.uid) = (launcher.pid, launcher.uid);
                Body::Fact(Fact::JobStarted(spec))
            }
            // The host's health is the agent's own to judge.
            Body::Health(_) => return,
            body => body,
        };
        match &body {
            Body::Fact(Fact::AttemptStarted { .. }) => self.gpus.begun(&session.job),
            Body::Fact(Fact::AttemptEnded { .. }) => self.gpus.emptied(&session.job, clock::mono()),
            Body::Fact(Fact::JobEnded { .. }) => self.gpus.over(&session.job),
            _ => {}
        }
        let recorded = self.board.record(entry.at, Some(&session.job), Some(entry.seq), body);
        self.repeats.take_in(&recorded);
        self.hooks.tell(&recorded);
    }

    /// Rules at once if the job's GPUs have been read since its ranks were gone, else when they are.
    fn proposed(&mut self, session: Session, verdict: Verdict) {
        if let Some(held) = self.gpus.held(&session.job) {
            return self.rule(&session, &verdict, held);
        }
        let (inputs, due) = (self.own_inputs.clone(), Input::RulingDue(session.clone(), verdict.incident));
        tokio::spawn(async move {
            tokio::time::sleep(gpus::ANSWER_WITHIN).await;
            let _ = inputs.send(due).await;
        });
        self.waiting.push((session, verdict));
    }

    fn rule_on_what_waits(&mut self) {
        for (session, verdict) in std::mem::take(&mut self.waiting) {
            match self.gpus.held(&session.job) {
                Some(held) => self.rule(&session, &verdict, held),
                None => self.waiting.push((session, verdict)),
            }
        }
    }

    fn rule_in_any_case(&mut self, session: &Session, incident: Incident) {
        let is_it = |(of, verdict): &(Session, Verdict)| of == session && verdict.incident == incident;
        if let Some(place) = self.waiting.iter().position(is_it) {
            let (session, verdict) = self.waiting.swap_remove(place);
            let unread = "the driver has not told yet whether the GPUs are free".to_owned();
            self.rule(&session, &verdict, vec![unread]);
        }
    }

    /// The agent agrees with what the launcher proposes, and testifies: kernel log, components and GPUs are its to read.
    fn rule(&self, session: &Session, verdict: &Verdict, held: Vec<String>) {
        let orders = self.launchers.get(&session.job).and_then(|launcher| launcher.session.as_ref());
        if let Some((_, orders)) = orders.filter(|(number, _)| *number == session.number) {
            let others = |pid: Pid| {
                let jobs = self.board.view().jobs.iter().filter(|(job, _)| **job != session.job);
                jobs.flat_map(|(_, view)| view.ranks.values()).any(|rank| rank.pid == pid)
            };
            let components: Vec<Component> = self.board.view().counting().cloned().collect();
            let testimony = self.hardware.testify(verdict.fault_at, others, &components);
            let seen_before = self.repeats.before(&session.job, &clock::boot_id(), verdict);
            let mut testimony = Testimony { held, seen_before, ..testimony };
            if let (Cause::Hang { .. }, Some(launcher)) = (&verdict.cause, self.launchers.get(&session.job)) {
                testimony.gpus.clone_from(&launcher.gpus_in_hang);
            }
            let _ = orders.try_send(ToLauncher::Ruling(verdict.incident, None, testimony));
        }
    }

    fn launcher_ended(&mut self, job: &JobId, pid: Pid) {
        let is_its = self.launchers.get(job).is_some_and(|launcher| launcher.pid == pid);
        if is_its && self.is_open(job) {
            self.gpus.over(job);
            self.record(Some(job), Fact::LauncherLost { pid });
        }
    }

    fn sensed(&mut self, judged: Judged) {
        for fact in judged.facts {
            self.record(None, fact);
        }
        self.tell_launchers_to_leave(&judged.components);
        // With each look, what time has done to the hardware is shown too.
        let now = clock::now();
        self.show(now, judged.components);
    }

    /// Tells every launcher, once, when the cloud takes the machine away.
    fn tell_launchers_to_leave(&mut self, components: &[Component]) {
        let Some(cloud) = components.iter().find(|component| component.name == CLOUD) else { return };
        let leaves = cloud.state == HealthState::Unhealthy && cloud.action >= RecommendedAction::ReplaceNode;
        if !leaves {
            self.leaving = false;
        } else if !std::mem::replace(&mut self.leaving, true) {
            let sessions = self.launchers.values().filter_map(|launcher| launcher.session.as_ref());
            for (_, orders) in sessions {
                let _ = orders.try_send(ToLauncher::Leave(cloud.reason.clone()));
            }
        }
    }

    /// Shows what was sensed, and the hardware as it stands.
    fn show(&mut self, now: Stamp, mut components: Vec<Component>) {
        let (hardware, gpus) = self.hardware.judge(now.mono);
        components.extend(hardware);
        self.board.set_gpus(gpus);
        self.board.show_host(now, components);
    }

    /// What was told of them last is not to stay as if it were so still.
    fn unwatched(&mut self, names: &[String]) {
        for name in names {
            self.record(
                None,
                Fact::Observed(Observation {
                    component: name.clone(),
                    event: "unwatched".to_owned(),
                    detail: "it is not watched any more".to_owned(),
                    ..Observation::default()
                }),
            );
        }
        self.board.hide(names);
    }

    fn devices(&mut self, began: Mono, report: DeviceReport) {
        let now = clock::now();
        self.gpus.read(began, &report, self.board.view().jobs.values());
        self.rule_on_what_waits();
        for fact in self.hardware.devices_are(now.mono, report) {
            self.record(None, fact);
        }
        self.show(now, Vec::new());
        let read =
            self.board.view().components.keys().filter(|name| name.starts_with("gpu.")).cloned().collect();
        self.board.roster().has_looked(DEVICES, now.mono, read);
    }

    fn gpu_events(&mut self, events: &[GpuEvent]) {
        let now = clock::now();
        events.iter().for_each(|event| self.hardware.event(now.mono, event));
        self.tell_events();
        self.show(now, Vec::new());
    }

    /// Tells what the driver told, once its line in the kernel log had its time to come.
    fn tell_events(&mut self) {
        for (at, fact) in self.hardware.due(clock::mono()) {
            self.board.record(clock::stamp_of(at), None, None, Body::Fact(fact));
        }
    }

    fn kernel_log(&mut self, report: LogReport) {
        for (at, fact) in report.facts {
            if self.hardware.hear(clock::mono(), at, &fact) {
                self.board.record(clock::stamp_of(at), None, None, Body::Fact(fact));
            }
        }
        let now = clock::now();
        self.hardware.log_is(now.mono, report.state, report.cursor);
        self.board.roster().has_looked(KERNEL_LOG, now.mono, vec![host_log::LOG.to_owned()]);
        self.show(now, Vec::new());
    }

    /// Tells when the launcher's process ends.
    fn watch(&self, job: JobId, pid: Pid) {
        let inputs = self.own_inputs.clone();
        match PidFd::open(pid) {
            Ok(launcher) => {
                tokio::spawn(async move {
                    if launcher.ended().await.is_ok() {
                        let _ = inputs.send(Input::LauncherEnded(job, pid)).await;
                    }
                });
            }
            // In another PID namespace, or gone: its connection is what tells of it.
            Err(error) => tracing::debug!(%job, pid = pid.0, %error, "cannot watch the launcher's process"),
        }
    }

    fn record(&mut self, job: Option<&JobId>, fact: Fact) {
        self.board.record(clock::now(), job, None, Body::Fact(fact));
    }

    fn is_current(&self, session: &Session) -> bool {
        let launcher = self.launchers.get(&session.job);
        launcher
            .and_then(|launcher| launcher.session.as_ref())
            .is_some_and(|(number, _)| *number == session.number)
    }

    /// Whether the job is known and not over.
    fn is_open(&self, job: &JobId) -> bool {
        let phase = self.board.view().jobs.get(job).map(|job| job.phase);
        phase.is_some_and(|phase| !matches!(phase, JobPhase::Ended(_) | JobPhase::Lost))
    }
}

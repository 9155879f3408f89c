//! The loop of the launcher.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::Duration;

use mainstay_core::attribute::catalog::Catalog;
use mainstay_core::entry::{Body, Entry, ExitStatus, Fact, JobSpec, StartedRank};
use mainstay_core::finding::Finding;
use mainstay_core::health::Component;
use mainstay_core::id::{Attempt, JobId, Pid, Rank};
use mainstay_core::job::{Input, Job, Order, Output, Ruling, StopWhy, Summary, policy_trouble};
use mainstay_core::judged::Judged;
use mainstay_core::learned::{self, Learned};
use mainstay_core::rounds::{Round, Word};
use mainstay_core::surroundings::Surroundings;
use mainstay_core::time::{Mono, Span};
use mainstay_core::verdict::{Decision, Verdict};
use mainstay_core::view::BeatView;
use mainstay_tier::pool::Keeper;
use nix::sys::signal::Signal;
use tokio::sync::mpsc;

use crate::act::doubt;
use crate::act::guardian::Guardian;
use crate::act::output::{self, Stream, Terminal};
use crate::act::page_files;
use crate::act::port::HeldPort;
use crate::act::ranks::{Crew, PageTrouble, RankProcess};
use crate::act::rounds::Desk;
use crate::act::stop::{Grace, Stop, reap_orphans, sweep};
use crate::board::Board;
use crate::launch::hang::{Evidence, Judge};
use crate::launch::order::{self, JobOrder, Ordered, Refused};
use crate::launch::{Settings, Warm, advised, notice, save};
use crate::link::agent::{LinkEvent, LinkOrder};
use crate::os::cgroup::Cgroup;
use crate::os::inotify::Watcher;
use crate::os::{clock, pidfd, processes};
use crate::source::error_file;
use crate::source::evidence::Subject;
use crate::source::nvrx::Monitor;
use crate::source::pages::PageReader;
use crate::store::learned::Memory;

/// Pages are looked at this often even if nothing rings.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Readers get a new sample of the pages every so many looks.
const LOOKS_PER_SAMPLE: u32 = 5;

/// How long a restart waits for the terminal, so that a rank's last words stand before what is made of them.
const LAST_WORDS_WITHIN: Duration = Duration::from_millis(20);

/// How long an agent may think about a proposal before the launcher decides alone.
const RULING_WITHIN: Duration = Duration::from_millis(250);

/// So many of a rank's last steps go into the evidence.
const LAST_STEPS: usize = 16;

/// The channels to what runs beside the loop.
#[derive(Debug)]
pub struct Outside {
    /// From the agent's link.
    pub link_events: mpsc::Receiver<LinkEvent>,
    /// Whether a socket of an agent was there at the start.
    pub agent_expected: bool,
    /// From the host's sensing.
    pub host: mpsc::Receiver<Judged>,
    /// Signals to the launcher.
    pub signals: mpsc::Receiver<i32>,
    /// Orders of people.
    pub orders: mpsc::Receiver<Ordered>,
}

/// A rank's process ended.
pub(super) struct Ended {
    pub(super) pid: Pid,
    pub(super) at: Mono,
}

/// The launcher of one job.
#[derive(Debug)]
pub struct Launcher {
    id: JobId,
    pub(super) settings: Settings,
    pub(super) crew: Crew,
    job: Job,
    pub(super) hangs: Judge,
    /// Where what is learned of the job is kept, and of how many runs it comes so far; none if it is not.
    memory: Option<(Memory, u32)>,
    orders: VecDeque<Order>,
    board: Board,
    pub(super) terminal: Terminal,
    guardian: Option<Guardian>,
    /// Keeps the checkpoints that ranks copy into memory.
    pub(super) keeper: Option<Keeper>,
    pub(super) cgroup: Option<Cgroup>,
    watcher: Option<Watcher>,
    pub(super) warm: Warm,
    pub(super) attempt: Attempt,
    pub(super) ranks: Vec<RankProcess>,
    /// The pages of those that have one.
    pub(super) pages: BTreeMap<Rank, PageReader>,
    /// The sockets of ranks that may speak to a rank monitor of NVRx.
    monitors: BTreeMap<Rank, Monitor>,
    pub(super) stop: Option<Stop>,
    /// Where ranks that can stay in their processes agree on rounds; none without a directory for it.
    pub(super) desk: Option<Desk>,
    /// The round of the current attempt.
    pub(super) round: Round,
    /// The signal that asked the launcher to stop, if one has; the ranks get the same.
    asked_by: Option<i32>,
    /// Held until the next attempt takes another.
    port: Option<HeldPort>,
    /// The way to the agent, while there is one.
    agent: Option<mpsc::Sender<LinkOrder>>,
    ruling_until: Option<tokio::time::Instant>,
    /// When the job wants to look again.
    look_at: Option<tokio::time::Instant>,
    /// Processes of the attempt before that did not die of SIGKILL.
    undying: Vec<Pid>,
    evidence: Option<Evidence>,
    looks: u32,
    /// What was last seen here without an agent that may explain slow ranks.
    surroundings: Surroundings,
    exit: Option<i32>,
}

/// What stands beside the ranks for as long as the job runs.
#[derive(Default)]
pub struct Beside {
    /// Sees to it that nothing outlives the launcher.
    pub guardian: Option<Guardian>,
    /// Keeps the ranks' checkpoints in memory.
    pub keeper: Option<Keeper>,
    /// The ranks' control group.
    pub cgroup: Option<Cgroup>,
}

impl Launcher {
    /// Begins the job: records it and takes the order for the first start.
    pub fn begin(
        settings: Settings,
        crew: Crew,
        board: Board,
        beside: Beside,
        terminal: Terminal,
        warm: Warm,
    ) -> Launcher {
        let Beside { guardian, keeper, cgroup } = beside;
        let mut out = Vec::new();
        let began = clock::mono();
        let seed = mainstay_core::policy::seed([crew.job.as_str()].into_iter());
        let policy = mainstay_core::policy::Settings { seed, ..settings.policy.clone() };
        let spec = job_spec(&settings, &crew);
        let memory = memory(&settings, &crew, &spec);
        let mut job = Job::begin(began, spec, policy, &mut out);
        if let Some(file) = &settings.policy_file {
            let (advisor, trouble) = advised::read(file);
            job.advised_by(advisor);
            out.extend(trouble.map(|trouble| Output::Record(Body::Fact(policy_trouble(&trouble)))));
        }
        let watcher = crew.page_dir.as_ref().and_then(|directory| {
            let watcher = Watcher::new().and_then(|watcher| watcher.watch(directory).map(|_| watcher));
            watcher
                .map_err(|error| {
                    tracing::warn!(%error, "cannot watch the heartbeat pages' directory; looking regularly instead");
                })
                .ok()
        });
        let desk = crew.page_dir.as_ref().and_then(|directory| {
            Desk::open(directory)
                .inspect_err(|error| tracing::warn!(%error, "no socket for rounds; no restart is in process"))
                .ok()
        });
        let mut hangs = Judge::new(&settings.hang, settings.local_world_size as usize, began);
        let learned = memory.as_ref().and_then(Memory::read).unwrap_or_default();
        job.recall(&learned);
        hangs.recall(&learned);
        let mut launcher = Launcher {
            id: JobId(crew.job.clone()),
            settings,
            crew,
            job,
            hangs,
            memory: memory.map(|memory| (memory, learned.runs)),
            orders: VecDeque::new(),
            board,
            terminal,
            guardian,
            keeper,
            cgroup,
            watcher,
            warm,
            attempt: Attempt(0),
            ranks: Vec::new(),
            pages: BTreeMap::new(),
            monitors: BTreeMap::new(),
            stop: None,
            desk,
            round: Round::default(),
            asked_by: None,
            port: None,
            agent: None,
            ruling_until: None,
            look_at: None,
            undying: Vec::new(),
            evidence: None,
            looks: 0,
            surroundings: Surroundings::default(),
            exit: None,
        };
        launcher.record(began, out);
        launcher
    }

    /// Runs the job to its end. Returns the status to exit with, how it went, and the terminal for last words.
    pub async fn run(mut self, mut outside: Outside) -> (i32, Summary, Terminal) {
        let (ended_sender, mut ended) = mpsc::unbounded_channel();
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.carry_out(&ended_sender).await;
            if let Some(exit) = self.exit {
                return self.end(exit, outside).await;
            }
            let force_at = self.stop.as_ref().map(|stop| from_now(stop.force_at));
            let tell_at = self.stop.as_ref().and_then(|stop| stop.tell_at).map(from_now);
            let (ruling_until, look_at) = (self.ruling_until, self.look_at);
            // In the order in which they matter when several are ready.
            tokio::select! {
                biased;
                Some(end) = ended.recv() => self.rank_ended(&end).await,
                Some(signal) = outside.signals.recv() => self.asked_to_stop(signal),
                (pid, word) = next_word(self.desk.as_mut()) => self.heard(pid, word).await,
                Ok(_) = next_ring(self.watcher.as_ref()) => self.look(),
                Some(event) = outside.link_events.recv() => self.link(event),
                () = until(ruling_until) => self.rule(None),
                () = until(look_at) => {
                    self.look_at = None;
                    self.step(clock::mono(), Input::LookAgain);
                }
                () = until(tell_at) => self.tell_to_end(),
                () = until(force_at) => self.force(),
                taken = next_evidence(&mut self.evidence) => self.evidence_taken(taken),
                Some(judged) = outside.host.recv() => self.host(judged),
                Some(ordered) = outside.orders.recv() => self.ordered(ordered),
                news = self.warm.news() => {
                    if let Some(fact) = self.warm.heard(news) {
                        self.fact(fact);
                    }
                }
                _ = looks.tick() => self.regular_look(),
            }
        }
    }

    async fn carry_out(&mut self, ended: &mpsc::UnboundedSender<Ended>) {
        while let Some(order) = self.orders.pop_front() {
            match order {
                Order::StartRanks(attempt) => self.start_ranks(attempt, ended),
                Order::StartRound { attempt, without } => self.start_round(attempt, without, ended).await,
                Order::StopRanks { attempt, why } if attempt == self.attempt => {
                    if why == StopWhy::Fault {
                        compile_signatures();
                        if self.gather().await {
                            continue;
                        }
                    }
                    self.round.dissolve();
                    let (now, grace) = (clock::mono(), self.settings.grace);
                    let signal = self.asked_by.unwrap_or(nix::libc::SIGTERM);
                    let saving = matches!(why, StopWhy::Requested | StopWhy::Ordered)
                        && save::ask(
                            &self.ranks,
                            &self.pages,
                            now,
                            now.after(Grace::to_save(grace.requested)),
                        );
                    if saving && let Some(signal) = self.settings.save_signal {
                        self.ranks.iter().for_each(|rank| save::signal(rank, signal));
                    }
                    self.stop = Some(Stop::begin(now, why, grace, signal, saving, &self.ranks));
                    self.end_attempt_if_over().await;
                }
                Order::StopRanks { .. } => {}
                Order::TakeEvidence(attempt) => self.take_evidence(attempt),
                Order::Consult { verdict, proposal } => self.consult(*verdict, proposal),
                Order::LookAgain { at } => self.look_at = Some(from_now(at)),
                Order::Finish { exit } => self.exit = Some(exit),
            }
        }
    }

    fn start_ranks(&mut self, attempt: Attempt, ended: &mpsc::UnboundedSender<Ended>) {
        self.attempt = attempt;
        self.stop = None;
        for rank in self.ranks.drain(..) {
            if let Some(desk) = &self.desk {
                desk.forget(rank.pid);
            }
        }
        if let (Some(directory), Some(old)) = (&self.crew.page_dir, attempt.0.checked_sub(2)) {
            page_files::remove(directory, old);
        }
        let number = match self.take_port() {
            Ok(number) => number,
            Err(error) => return self.fact(Fact::StartFailed { attempt, error }),
        };
        self.monitors.clear();
        self.pages.clear();
        if let Some(keeper) = &self.keeper {
            keeper.begin_attempt(attempt.0.into());
        }
        match self.make_ranks(attempt, number, &self.crew.all_ranks(), ended) {
            Err(error) => self.fact(Fact::StartFailed { attempt, error }),
            Ok((ranks, page_trouble)) => {
                self.ranks = ranks;
                self.attempt_started(number, page_trouble);
            }
        }
    }

    /// Takes the port of the next attempt. The old one goes first: a fixed one is taken again.
    pub(super) fn take_port(&mut self) -> Result<u16, String> {
        self.port = None;
        let port = HeldPort::take(self.settings.master_port.unwrap_or(0)).map_err(|error| {
            let wanted =
                self.settings.master_port.map_or("any free port".to_owned(), |port| port.to_string());
            format!(
                "taking port {wanted} for the ranks' store (MASTER_PORT): {error}; \
                 leave out --master-port to have a free one chosen"
            )
        })?;
        let number = port.number();
        self.port = Some(port);
        Ok(number)
    }

    /// Makes processes for these ranks, and watches them: from the template where there is one, else plainly.
    pub(super) fn make_ranks(
        &mut self,
        attempt: Attempt,
        port: u16,
        which: &[u32],
        ended: &mpsc::UnboundedSender<Ended>,
    ) -> Result<(Vec<RankProcess>, PageTrouble), String> {
        self.listen_to_nvrx(attempt, which);
        let spare = self.not_of_a_lost_rank();
        let warm =
            self.warm.start(&self.crew, attempt, port, which, &spare).and_then(|started| match started {
                Ok(started) => Some(started),
                Err(fact) => {
                    self.fact(fact);
                    None
                }
            });
        let (ranks, trouble) = warm
            .map_or_else(|| self.crew.start(attempt, port, which), Ok)
            .map_err(|error| error.to_string())?;
        for rank in &ranks {
            if let Some(page) = self.page_reader(rank) {
                self.pages.insert(rank.rank, page);
            }
            watch(rank, ended.clone());
            if let Some(guardian) = &mut self.guardian {
                guardian.guard(rank.pid);
            }
            self.show_output(rank);
        }
        Ok((ranks, trouble))
    }

    /// The guardian, and ranks that live.
    pub(super) fn not_of_a_lost_rank(&self) -> Vec<Pid> {
        let living = self.ranks.iter().filter(|rank| rank.exit.is_none()).map(|rank| rank.pid);
        living.chain(self.guardian.as_ref().map(Guardian::pid)).collect()
    }

    /// All ranks of an attempt are there.
    pub(super) fn attempt_started(&mut self, port: u16, page_trouble: PageTrouble) {
        let attempt = self.attempt;
        self.round = Round::begin(attempt, self.ranks.iter().map(|rank| rank.rank));
        self.hangs.begin_attempt(attempt, clock::mono());
        let ranks = self.ranks.iter().map(started_rank).collect();
        self.fact(Fact::AttemptStarted { attempt, master_port: port, ranks });
        if let Some(reason) = page_trouble {
            self.fact(Fact::PagesUnavailable { reason });
        }
    }

    /// Sockets for ranks that speak to a rank monitor of NVRx. Without them the ranks run all the same.
    fn listen_to_nvrx(&mut self, attempt: Attempt, which: &[u32]) {
        let Some(directory) = &self.crew.page_dir else { return };
        for &local_rank in which {
            // The old one takes its socket along, so it goes before the new one comes.
            self.monitors.remove(&Rank(local_rank));
            match Monitor::listen(directory, &self.crew.page_spec(attempt, local_rank)) {
                Ok(monitor) => {
                    self.monitors.insert(Rank(local_rank), monitor);
                }
                Err(error) => {
                    tracing::debug!(local_rank, %error, "no socket for NVRx's client");
                }
            }
        }
    }

    fn page_reader(&self, process: &RankProcess) -> Option<PageReader> {
        let (path, file) = process.page.as_ref()?;
        let stand_in = self.monitors.get(&process.rank).map(Monitor::page);
        PageReader::of(file)
            .inspect_err(
                |error| tracing::warn!(path = %path.display(), %error, "cannot read a heartbeat page"),
            )
            .ok()
            .map(|reader| reader.with_stand_in(stand_in))
    }

    fn show_output(&self, rank: &RankProcess) {
        let (stdout, stderr) = self.settings.shown.of(rank.local_rank);
        let prefix = format!("[rank {}] ", rank.rank.0);
        let streams =
            [(stdout, &rank.files.stdout, Stream::Stdout), (stderr, &rank.files.stderr, Stream::Stderr)];
        for (_, path, stream) in streams.into_iter().filter(|(shown, ..)| *shown) {
            self.terminal.follow(output::Shown { path: path.clone(), prefix: prefix.clone(), stream });
        }
    }

    pub(super) async fn rank_ended(&mut self, end: &Ended) {
        let known = self.ranks.iter().position(|rank| rank.pid == end.pid && rank.exit.is_none());
        let Some(index) = known else { return };
        // The page is the black box: what the rank last wrote comes before its end.
        self.look();
        let rank = &mut self.ranks[index];
        let status = match pidfd::exit_status(rank.pid) {
            Ok(Some(status)) => status,
            // Somebody else reaped our child; all that is sure is that it is gone.
            Ok(None) | Err(_) => ExitStatus::Code(255),
        };
        rank.exit = Some(status);
        if status.is_success() {
            self.hangs.finished(rank, end.at);
        }
        if !status.is_success() {
            // Before the number of the group can be given to another process.
            processes::signal_group(rank.pid, Signal::SIGKILL);
        }
        if let Some(guardian) = &mut self.guardian {
            guardian.release(rank.pid);
        }
        pidfd::reap(rank.pid);
        let (which, pid, files, raised) = (rank.rank, rank.pid, rank.files.clone(), rank.raised);
        let step = self.pages.get(&rank.rank).and_then(|page| page.beat()?.step);
        let after_stop = self.stop.as_ref().is_some_and(|stop| match status {
            ExitStatus::Signal(signal) => stop.sent(signal),
            ExitStatus::Code(_) => true,
        });
        let failed = !status.is_success() && !after_stop;
        let attempt = self.attempt;
        if failed
            && !raised
            && let Some(note) = error_file::read(&files.error, end.at)
        {
            self.fact(Fact::RankRaised { attempt, rank: which, pid, note });
        }
        let stderr_tail = if failed { output::tail(&files.stderr, 60) } else { Vec::new() };
        self.fact_at(
            end.at,
            Fact::RankExited { attempt, rank: which, pid, status, step, after_stop, stderr_tail },
        );
        self.rank_gone(which, pid);
        self.end_attempt_if_over().await;
    }

    /// When all ranks of an attempt that is being stopped are gone: what they left goes too.
    pub(super) async fn end_attempt_if_over(&mut self) {
        let Some(stop) = &self.stop else { return };
        if self.round.is_gathered() && self.ranks.iter().any(|rank| rank.exit.is_none()) {
            return self.end_round().await;
        }
        if self.ranks.iter().any(|rank| rank.exit.is_none()) {
            return;
        }
        let patience = match stop.why {
            StopWhy::Fault | StopWhy::Dismissed => Span::default(),
            StopWhy::Requested | StopWhy::Ordered => Span::seconds(1),
            StopWhy::Done => self.settings.grace.done,
        };
        self.stop = None;
        let guardian = self.guardian.as_ref().map(Guardian::pid);
        let warm = &self.warm;
        let spared = || warm.processes().into_iter().chain(guardian).collect();
        let swept = sweep(self.cgroup.as_ref(), spared, patience).await;
        self.undying = swept.undying;
        self.terminal.flush(LAST_WORDS_WITHIN);
        let attempt = self.attempt;
        self.fact(Fact::AttemptEnded { attempt, orphans_killed: swept.killed, waiting: Vec::new() });
    }

    fn asked_to_stop(&mut self, signal: i32) {
        if self.asked_by.is_some() {
            // Asked again: somebody is in a hurry.
            return self.force();
        }
        self.asked_by = Some(signal);
        if let Some(stop) = &mut self.stop {
            // Ranks that are being stopped for a fault get no more time than this request would give them.
            let latest = clock::mono().after(self.settings.grace.requested);
            stop.force_at = stop.force_at.min(latest);
        }
        let by = ExitStatus::Signal(signal).to_string();
        self.fact(Fact::StopRequested { by, exit: 128 + signal });
    }

    /// Ranks that were asked to save and did not end by themselves.
    fn tell_to_end(&mut self) {
        if let Some(stop) = &mut self.stop {
            stop.tell(&self.ranks);
        }
    }

    /// Carries out what a person orders. It goes into the journal before it is done.
    fn ordered(&mut self, ordered: Ordered) {
        let Ordered { uid, reason, order, answer } = ordered;
        let runs = |rank: &RankProcess| rank.exit.is_none();
        let refused = match order {
            JobOrder::Inject(..) if !self.settings.allow_inject => Some(Refused::NotAllowed),
            JobOrder::Inject(_, rank) if !self.ranks.iter().any(|of| of.rank == rank && runs(of)) => {
                Some(Refused::NoSuchRank(rank))
            }
            JobOrder::Restart if self.stop.is_some() || !self.ranks.iter().any(runs) => {
                Some(Refused::NotNow("no ranks run, or they are being stopped already"))
            }
            JobOrder::Stop if self.asked_by.is_some() => {
                Some(Refused::NotNow("the job is being stopped already"))
            }
            JobOrder::Inject(..) | JobOrder::Restart | JobOrder::Stop => None,
        };
        if let Some(refused) = refused {
            return drop(answer.send(Err(refused)));
        }
        self.fact(order::observed(uid, &reason, order));
        match order {
            JobOrder::Restart => self.step(clock::mono(), Input::Restart),
            JobOrder::Stop => {
                self.asked_by = Some(nix::libc::SIGTERM);
                let (by, exit) = (format!("user {uid} ({reason})"), 128 + nix::libc::SIGTERM);
                self.fact(Fact::StopRequested { by, exit });
            }
            JobOrder::Inject(fault, rank) => {
                let process = self.ranks.iter().find(|process| process.rank == rank);
                process.into_iter().for_each(|process| save::signal(process, fault.signal));
            }
        }
        // Whoever ordered may have gone; it is done all the same.
        let _ = answer.send(Ok(()));
    }

    /// The machine is to be taken away, or so: ranks save and end, and the scheduler starts the job elsewhere.
    fn asked_to_leave(&mut self, reason: String) {
        if self.asked_by.is_none() && self.settings.leave_on_notice {
            self.asked_by = Some(nix::libc::SIGTERM);
            let exit = self.settings.policy.hand_back_exit;
            self.fact(Fact::StopRequested { by: reason, exit });
        }
    }

    fn force(&mut self) {
        if let Some(stop) = &mut self.stop {
            if self.round.is_gathering() {
                let late = self.round.missing();
                self.ranks.iter().filter(|rank| late.contains(&rank.rank)).for_each(|rank| stop.kill(rank));
            } else {
                stop.force(&self.ranks);
            }
            stop.force_at = clock::mono().after(Span::seconds(30));
            let waits = self.round.waiting();
            let late = |rank: &&RankProcess| rank.exit.is_none() && !waits.contains(&rank.rank);
            for rank in self.ranks.iter().filter(late) {
                self.terminal
                    .say(format!("{} (pid {}) did not end in time and is killed", rank.rank, rank.pid.0));
            }
        }
    }

    fn consult(&mut self, verdict: Verdict, proposal: Decision) {
        let held = self.held();
        self.step(clock::mono(), Input::Held(held));
        if self.send(LinkOrder::Proposal(Box::new((verdict, proposal)))) {
            self.ruling_until = Some(tokio::time::Instant::now() + RULING_WITHIN);
        } else {
            self.rule(None);
        }
    }

    /// What the next ranks need and somebody else holds, as far as it can be seen without an agent.
    fn held(&mut self) -> Vec<String> {
        self.undying.retain(|pid| processes::is_alive(*pid));
        let mut held: Vec<String> = self.undying.iter().map(|pid| undying(*pid)).collect();
        if let Some(port) = self.settings.master_port {
            // Ours of the attempt before goes first; the next attempt takes it again.
            self.port = None;
            if let Err(error) = HeldPort::take(port) {
                held.push(format!("port {port} for the ranks' store (MASTER_PORT) cannot be taken: {error}"));
            }
        }
        held
    }

    fn rule(&mut self, ruling: Option<Ruling>) {
        self.ruling_until = None;
        self.step(clock::mono(), Input::Ruling(ruling));
    }

    fn link(&mut self, event: LinkEvent) {
        match event {
            LinkEvent::Found { version, have_seq, orders } => {
                self.agent = Some(orders);
                let missing = self.board.reader().entries_after(have_seq, usize::MAX);
                for entry in missing.map(|read| read.entries).unwrap_or_default() {
                    self.send(LinkOrder::Entry(Box::new(entry)));
                }
                self.fact(Fact::AgentFound { version });
            }
            LinkEvent::Lost { reason } => {
                self.agent = None;
                self.fact(Fact::AgentLost { reason });
                if self.ruling_until.is_some() {
                    self.rule(None);
                }
            }
            LinkEvent::Ruling(ruling) => self.rule(Some(ruling)),
            LinkEvent::Surroundings(known) => self.step(clock::mono(), Input::Surroundings(known)),
            LinkEvent::Leave { reason } => self.asked_to_leave(reason),
        }
    }

    fn host(&mut self, judged: Judged) {
        for fact in judged.facts {
            self.fact(fact);
        }
        self.board.show_host(clock::now(), judged.components);
        if self.agent.is_none() {
            // The agent knows more than this: what it tells is not to be replaced by it.
            let components: Vec<Component> = self.board.view().components.values().cloned().collect();
            let known = Surroundings::of(&[], &components, &[]);
            if !known.is_as(&self.surroundings) {
                self.surroundings = known.clone();
                self.step(clock::mono(), Input::Surroundings(known));
            }
        }
    }

    fn regular_look(&mut self) {
        self.look();
        self.judge_hangs();
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(LOOKS_PER_SAMPLE) {
            self.sample();
            let said = self.keeper.as_ref().map(Keeper::said).unwrap_or_default();
            said.into_iter().for_each(|line| self.terminal.say(line));
            let ranks = self.ranks.iter().map(|rank| rank.pid);
            let ranks: Vec<Pid> = ranks.chain(self.warm.template()).collect();
            // The guardian too, should somebody have killed it: it would stand before all the others in line.
            reap_orphans(|pid| !ranks.contains(&pid));
            if self.stop.is_none()
                && let Some(fact) = self.warm.look_after(&self.crew)
            {
                self.fact(fact);
            }
        }
    }

    /// Looks at all pages and tells the job what is new.
    pub(super) fn look(&mut self) {
        let attempt = self.attempt;
        for index in 0..self.ranks.len() {
            let (rank, pid) = (self.ranks[index].rank, self.ranks[index].pid);
            let Some(news) = self.pages.get_mut(&rank).map(PageReader::look) else { continue };
            let now = clock::mono();
            if let Some(page) = self.pages.get_mut(&rank) {
                self.hangs.see(self.ranks[index].local_rank, page, now);
            }
            if let Some((client, _)) = news.connected {
                self.fact(Fact::RankConnected { attempt, rank, client });
            }
            if let Some(reason) = news.refused {
                self.fact(Fact::RankRefused { attempt, rank, reason });
            }
            if let Some((role, stage)) = news.role {
                self.step(now, Input::Role { attempt, rank, role, stage });
            }
            if !news.steps.is_empty() {
                self.step(clock::mono(), Input::Steps { attempt, rank, done: news.steps });
            }
            if let Some(note) = news.raised {
                self.ranks[index].raised = true;
                self.fact(Fact::RankRaised { attempt, rank, pid, note });
            }
        }
    }

    /// Whether ranks hang: only where none is being stopped or missing.
    fn judge_hangs(&mut self) {
        let failed = |rank: &RankProcess| rank.raised || rank.exit.is_some_and(|exit| !exit.is_success());
        if self.stop.is_some() || self.ranks.iter().any(failed) {
            return;
        }
        if let Some(fact) = self.hangs.judge(&self.ranks, clock::mono()) {
            self.fact(fact);
        }
    }

    /// Begins to write down what the ranks are at, in a thread: `/proc` may hold up a reader.
    fn take_evidence(&mut self, attempt: Attempt) {
        let file = self.crew.run_dir.join(format!("attempt_{}/hang.json", attempt.0));
        self.evidence = Some(Evidence::begin(attempt, file, self.subjects()));
    }

    fn subjects(&self) -> Vec<Subject> {
        let living = self.ranks.iter().filter(|rank| rank.exit.is_none());
        living
            .map(|rank| {
                let beat = self.pages.get(&rank.rank).and_then(PageReader::beat).unwrap_or_default();
                Subject {
                    rank: rank.rank,
                    pid: rank.pid,
                    stacks: Some(rank.files.stacks.clone()),
                    step: beat.step,
                    sections: beat.sections,
                    last_steps: self
                        .pages
                        .get(&rank.rank)
                        .map_or_else(Vec::new, |page| page.last_steps(LAST_STEPS)),
                }
            })
            .collect()
    }

    fn evidence_taken(&mut self, taken: Fact) {
        self.evidence = None;
        // A last look: what moved meanwhile did not hang.
        self.look();
        if let Some(passed) = self.hangs.passed(clock::mono()) {
            return self.fact(passed);
        }
        self.fact(taken);
    }

    fn sample(&mut self) {
        let beats: Vec<(Rank, BeatView)> = self
            .pages
            .iter()
            .filter_map(|(rank, page)| Some((*rank, BeatView { pace: self.job.pace(*rank), ..page.beat()? })))
            .collect();
        for (rank, beat) in &beats {
            self.board.sample(&self.id, self.attempt, *rank, beat.clone());
        }
        self.board.publish();
        self.send(LinkOrder::Beats { attempt: self.attempt, beats });
    }

    pub(super) fn fact(&mut self, fact: Fact) {
        self.fact_at(clock::mono(), fact);
    }

    fn fact_at(&mut self, at: Mono, fact: Fact) {
        self.step(at, Input::Fact(fact));
    }

    fn step(&mut self, at: Mono, input: Input) {
        let mut out = Vec::new();
        self.job.step(at, input, &mut out);
        for entry in self.record(at, out) {
            self.send(LinkOrder::Entry(Box::new(entry)));
        }
    }

    /// Writes what is to be recorded, keeps the orders for later, and returns the entries.
    fn record(&mut self, at: Mono, out: Vec<Output>) -> Vec<Entry> {
        let stamp = clock::stamp_of(at);
        let mut entries = Vec::new();
        for output in out {
            match output {
                Output::Record(body) => {
                    if let Some(line) = notice::line(&body) {
                        self.terminal.say(line);
                    }
                    if let Body::Finding(finding) = &body {
                        self.mark_checkpoints(finding);
                    }
                    entries.push(self.board.record(stamp, Some(&self.id), None, body));
                }
                Output::Order(order) => self.orders.push_back(order),
            }
        }
        entries
    }

    /// Says beside the checkpoints which of them are doubtful.
    fn mark_checkpoints(&self, finding: &Finding) {
        if let Err(error) = doubt::mark(&self.crew.checkpoint_dir, &self.id, finding) {
            tracing::warn!(directory = %self.crew.checkpoint_dir.display(), %error, "cannot mark checkpoints as doubtful");
        }
    }

    /// Sends to the agent; whether there is one that takes it. A full queue ends the link; what was missed is
    /// sent when the agent is found anew.
    fn send(&mut self, order: LinkOrder) -> bool {
        let sent = self.agent.as_ref().is_some_and(|agent| agent.try_send(order).is_ok());
        if !sent {
            self.agent = None;
        }
        sent
    }

    /// Keeps what was learned of the job for its next run.
    fn remember(&mut self) {
        let Some((memory, runs)) = &self.memory else { return };
        let mut learned = Learned { runs: *runs, ..Learned::default() };
        self.job.remember(&mut learned);
        self.hangs.remember(&mut learned);
        if let Err(error) = memory.write(learned) {
            tracing::debug!(%error, "cannot keep what was learned of the job");
        }
    }

    async fn end(mut self, exit: i32, mut outside: Outside) -> (i32, Summary, Terminal) {
        if outside.agent_expected && self.agent.is_none() {
            // A job that was over at once: the agent is to hear of it all the same.
            let found = tokio::time::timeout(RULING_WITHIN, outside.link_events.recv()).await;
            if let Ok(Some(event)) = found {
                self.link(event);
            }
        }
        self.sample();
        self.board.sync();
        self.remember();
        let summary = self.job.summary(clock::mono());
        self.warm.end();
        if let Some(keeper) = self.keeper.take() {
            // The guardian stays until this is done: should we be killed meanwhile, it goes on with it.
            let said = tokio::task::spawn_blocking(move || keeper.finish()).await.unwrap_or_default();
            said.into_iter().for_each(|line| self.terminal.say(line));
        }
        if let Some(guardian) = self.guardian.take() {
            guardian.dismiss();
        }
        (exit, summary, self.terminal)
    }
}

/// Compiles the log signatures while the ranks end: the verdict that comes next needs them, and a job without
/// failures need not hold them in memory. Without a thread the verdict waits for them instead.
fn compile_signatures() {
    let compile = || Catalog::built_in().is_ok();
    let _ = std::thread::Builder::new().name("signatures".to_owned()).spawn(compile);
}

/// A process that did not die of SIGKILL, for a person: what it waits in, and whether it holds a device.
fn undying(pid: Pid) -> String {
    let devices = processes::open_files(pid, "/dev/nvidia");
    let holds = if devices.is_empty() { String::new() } else { format!(" and holds {}", devices.join(", ")) };
    format!("process {} of the attempt before does not die; it is {}{holds}", pid.0, processes::waits_in(pid))
}

/// Where what is learned of the job is kept: beside the run directories.
fn memory(settings: &Settings, crew: &Crew, spec: &JobSpec) -> Option<Memory> {
    let given = settings.checkpoint_dir.as_ref().map(|directory| directory.display().to_string());
    let log_dir = crew.run_dir.parent().filter(|_| settings.remember)?;
    Some(Memory::of(log_dir, &learned::key(spec, given.as_deref())))
}

fn job_spec(settings: &Settings, crew: &Crew) -> JobSpec {
    let text = |path: &PathBuf| path.display().to_string();
    JobSpec {
        command: settings.command.clone(),
        world_size: settings.local_world_size,
        local_world_size: settings.local_world_size,
        first_rank: Rank(0),
        max_restarts: settings.policy.budget.max_restarts,
        launcher: Pid(i32::try_from(std::process::id()).unwrap_or(0)),
        uid: nix::unistd::getuid().as_raw(),
        run_dir: text(&crew.run_dir),
        checkpoint_dir: text(&crew.checkpoint_dir),
        page_dir: crew.page_dir.as_ref().map(text),
    }
}

fn started_rank(process: &RankProcess) -> StartedRank {
    StartedRank {
        rank: process.rank,
        local_rank: process.local_rank,
        pid: process.pid,
        page: process.page.as_ref().map(|(path, _)| path.display().to_string()),
    }
}

/// Tells of a rank's end as soon as the kernel does.
fn watch(rank: &RankProcess, ended: mpsc::UnboundedSender<Ended>) {
    let pidfd = rank.pidfd.clone();
    tokio::task::spawn_local(async move {
        if pidfd.ended().await.is_ok() {
            // The receiver goes only when the launcher does.
            let _ = ended.send(Ended { pid: pidfd.pid(), at: clock::mono() });
        }
    });
}

async fn next_ring(watcher: Option<&Watcher>) -> std::io::Result<()> {
    match watcher {
        Some(watcher) => watcher.next().await.map(drop),
        None => std::future::pending().await,
    }
}

async fn next_word(desk: Option<&mut Desk>) -> (Pid, Word) {
    match desk {
        Some(desk) => desk.next().await,
        None => std::future::pending().await,
    }
}

async fn next_evidence(evidence: &mut Option<Evidence>) -> Fact {
    match evidence {
        Some(evidence) => evidence.taken().await,
        None => std::future::pending().await,
    }
}

async fn until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// The runtime's clock for a point of ours.
fn from_now(at: Mono) -> tokio::time::Instant {
    tokio::time::Instant::now() + Duration::from_nanos(at.since(clock::mono()).0)
}

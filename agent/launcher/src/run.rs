//! The loop of the launcher: it passes events to the parts and the parts' reports to the [`group`](crate::group) of the job,
//! which has the job's state machine, and carries out its commands. One task; all events arrive in one `select!`.

use std::collections::VecDeque;
use std::time::Duration;

use mainstay_group::lead::Here;
use mainstay_group::spare_ready::SpareReady;
use mainstay_health::host::cloud::leave::Leave;
use mainstay_health::host::contention::slowdown_hints;
use mainstay_health::host::preflight::Owners;
use mainstay_model::entry::{Body, Entry, ExitStatus, Fact};
use mainstay_model::health::Component;
use mainstay_model::id::{Pid, Rank};
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::Verdict;
use mainstay_progress::memory::JobMemory;
use mainstay_recovery::job::{Output as JobOutput, Summary, policy_trouble};
use mainstay_recovery::policy::PolicyProblem;
use mainstay_recovery::protocol::{AgentEvidence, Command, Event, Seat};
use mainstay_sys::clock;
use mainstay_sys::inotify::Watcher;
use mainstay_tier::pool::{PoolOwner, world};
use mainstay_view::node::BeatView;
use mainstay_view::progress;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::agent_link::stream::LinkEvent;
use crate::agent_link::{AgentLink, EVIDENCE_TIMEOUT};
use crate::checkpoints::replicas::Replicas;
use crate::checkpoints::sealing::{StartProgress, Starting};
use crate::checkpoints::{Checkpoints, Moved, Moving};
use crate::drill::Drill;
use crate::group::Group;
use crate::hang::{Evidence, Hang};
use crate::journal::Journal;
use crate::log_mirror::LogMirror;
use crate::order::{self, Ordered};
use crate::output::{Output, Terminal};
use crate::policy::{News, Policy};
use crate::ranks::stop::{Grace, Stop, reap_orphans, sweep};
use crate::ranks::{Ranks, Reports, RoundServer, Start, save};
use crate::roles::RoleReport;
use crate::settings::Settings;
use crate::signatures;

/// Pages are read this often even if nothing rings.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Readers get a new sample of the pages after this many looks.
const LOOKS_PER_SAMPLE: u32 = 5;

/// A program may repeat its request to stop within this time without being in a hurry. At a time limit Slurm sends
/// SIGTERM twice, 3 ms apart, and SIGKILL only after `KillWait`; systemd may send SIGHUP together with SIGTERM.
const IMPATIENT_AFTER: Span = Span::seconds(5);

/// The channels to what runs outside the loop.
#[derive(Debug)]
pub struct Outside {
    /// From the agent's link.
    pub link_events: mpsc::Receiver<LinkEvent>,
    /// Whether an agent's socket existed at the start.
    pub agent_expected: bool,
    /// From the host's sensing.
    pub host: mpsc::Receiver<SensorReport>,
    /// Signals that ask the launcher to stop.
    pub signals: mpsc::Receiver<i32>,
    /// Signals that ask for a save.
    pub save_signals: mpsc::Receiver<i32>,
    /// Orders of people.
    pub orders: mpsc::Receiver<Ordered>,
}

/// The launcher of one job.
#[derive(Debug)]
pub struct Launcher {
    pub(crate) settings: Settings,
    pub(crate) group: Group,
    /// Commands to carry out, in order.
    pub(crate) tasks: VecDeque<Command>,
    pub(crate) ranks: Ranks,
    pub(crate) hang: Hang,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) journal: Journal,
    pub(crate) output: Output,
    pub(crate) agent: AgentLink,
    pub(crate) drill: Drill,
    /// The user's own policy, where this launcher decides.
    pub(crate) policy: Option<Policy>,
    /// Where the other roles of the job see what this one does, if it has roles.
    pub(crate) role: Option<RoleReport>,
    pub(crate) looks: u32,
    /// When the job wants to look again.
    pub(crate) wake_at: Option<Instant>,
    pub(crate) exit: Option<i32>,
}

/// How a launcher's part in a job ended.
#[derive(Debug)]
pub struct JobEnd {
    /// The exit status.
    pub exit: i32,
    /// What happened.
    pub summary: Summary,
    /// For final messages.
    pub terminal: Terminal,
    /// Whether the job goes on without this launcher, and a new one on this host may take part.
    pub may_return: bool,
    /// Whether the exit status is that of the whole job.
    pub is_of_job: bool,
    /// Copies the logs, if they are written elsewhere than where people find them.
    pub mirror: Option<LogMirror>,
}

impl Launcher {
    /// Runs the job to its end, or to the end of this launcher's part in it.
    pub async fn run(mut self, mut outside: Outside) -> JobEnd {
        let mut looks = tokio::time::interval(POLL_INTERVAL);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Each publication copies the state of all ranks of the job, so entries that arrive together are published together.
        self.journal.snapshots.hold();
        loop {
            self.settle().await;
            if let Some(exit) = self.exit {
                return self.end(exit, outside).await;
            }
            let stop = self.ranks.stopping.stop.as_ref();
            let force_at = stop.map(|stop| from_now(stop.force_at));
            let report_at = stop.and_then(|stop| stop.report_at).map(from_now);
            let spared_at = stop.and_then(Stop::wake_at).map(from_now);
            let (ruling_until, wake_at) = (self.agent.ruling_until, self.wake_at);
            // In order of importance when several are ready.
            tokio::select! {
                biased;
                Some(end) = self.ranks.ended.1.recv() => {
                    let (ranks, mut to) = self.split();
                    ranks.ended(&end, &mut to);
                }
                Some(pid) = self.ranks.endings.1.recv() => {
                    let (ranks, mut to) = self.split();
                    ranks.ending(pid, &mut to);
                }
                Some(signal) = outside.signals.recv() => self.asked_to_stop(signal),
                Some(signal) = outside.save_signals.recv() => {
                    let (ranks, mut to) = self.split();
                    save::requested_by(ranks, signal, &mut to);
                }
                (pid, word) = next_of(self.ranks.round_server.as_mut().map(RoundServer::next)) => {
                    let (ranks, mut to) = self.split();
                    ranks.received(pid, word, &mut to);
                }
                Some(event) = outside.link_events.recv() => self.link(event),
                () = until(ruling_until) => self.rule(None),
                () = until(wake_at) => {
                    self.wake_at = None;
                    self.group.step(clock::mono(), Event::Wake);
                }
                progress = next_of(self.checkpoints.starting.as_mut().map(Starting::next)) => self.start_progress(progress),
                news = next_of(self.checkpoints.replicas.as_mut().map(Replicas::next)) => {
                    let world = self.ranks.spec.seat.world_size;
                    self.checkpoints.news(news, world, &mut self.group, &self.output.terminal);
                }
                moved = next_of(self.checkpoints.moving.as_mut().map(Moving::done)) => self.moved(moved),
                () = until(report_at) => self.ranks.ask_to_end(),
                () = until(spared_at) => self.ranks.look_at_spared(&self.output),
                () = until(force_at) => {
                    let (ranks, mut to) = self.split();
                    ranks.force(&mut to);
                }
                event = self.group.next() => self.others_sent(event),
                taken = next_of(self.hang.evidence.as_mut().map(Evidence::taken)) => self.evidence_taken(taken),
                Some(report) = outside.host.recv() => self.host(report),
                Some(ordered) = outside.orders.recv() => {
                    order::carry_out(ordered, &mut self.ranks, &mut self.drill, &mut self.group);
                }
                update = self.ranks.warm.update() => {
                    let fact = self.ranks.warm.received(update);
                    fact.into_iter().for_each(|fact| self.group.fact(fact));
                }
                _ = looks.tick() => self.regular_look(),
                news = next_of(self.policy.as_mut().map(Policy::next)) => self.policy_news(news),
                () = std::future::ready(()), if self.journal.snapshots.is_due() => self.journal.snapshots.show_due(),
                // Parts of the journal are sent one after the other; all other work runs between two parts.
                () = tokio::time::sleep(Duration::from_millis(1)), if self.agent.is_behind() => {
                    self.agent.catch_up(&mut self.journal.snapshots, self.ranks.spec.own_ranks());
                }
                // Last: ranks may ring without a pause.
                Ok(_) = next_of(self.ranks.pages.watcher.as_ref().map(Watcher::next)) => self.look(),
            }
        }
    }

    /// Carries out what follows from the last event, until nothing is left to do.
    async fn settle(&mut self) {
        loop {
            self.poll_group(clock::mono());
            self.report_role();
            if self.ranks.is_stopped() {
                self.end_attempt().await;
            } else if let Some(command) = self.tasks.pop_front() {
                self.obey(command).await;
            } else {
                return;
            }
        }
    }

    /// Tells the other roles of the job what this one does.
    fn report_role(&mut self) {
        let Some(role) = &mut self.role else { return };
        if let Some(job) = self.journal.snapshots.view().jobs.get(&self.journal.job) {
            role.update(job);
        }
    }

    /// The ranks, and what their events concern besides them.
    pub(crate) fn split(&mut self) -> (&mut Ranks, Reports<'_>) {
        let Launcher { ranks, group, output, hang, policy, .. } = self;
        (ranks, Reports { group, output, hang, policy: policy.as_ref() })
    }

    /// Removes what the ranks of an attempt left, and records its end.
    pub(crate) async fn end_attempt(&mut self) {
        let (ranks, mut to) = self.split();
        let ended = ranks.end_attempt(&mut to).await;
        // The next ranks start with what is sealed by now.
        self.checkpoints.compare(self.ranks.spec.seat.first_rank, &mut self.group);
        self.group.fact(ended);
    }

    /// Reads all pages.
    fn look(&mut self) {
        let (ranks, mut to) = self.split();
        ranks.look(&mut to);
        self.drill.inject_what_is_due(&self.ranks);
    }

    fn regular_look(&mut self) {
        self.look();
        let times = self.ranks.pages.take_step_times();
        self.checkpoints.stepped(&times);
        self.agent.stepped(times);
        let now = clock::mono();
        let hang = self.hang.judge(&self.ranks, now);
        hang.into_iter().for_each(|fact| self.group.fact(fact));
        if self.group.reports_ranks() {
            // The leader on another host judges hangs.
            self.group.ranks_seen(self.ranks.attempt, self.hang.due_to_report(now));
        }
        self.save_if_due();
        let (ranks, mut to) = self.split();
        save::pass_on(ranks, &mut to);
        let pool = self.ranks.spec.checkpoint_pool.as_deref();
        self.group.look(now, || pool.is_some_and(world::is_kept));
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(LOOKS_PER_SAMPLE) {
            self.look_around();
        }
    }

    /// What needs no look at each turn.
    fn look_around(&mut self) {
        self.poll_group(clock::mono());
        self.sample();
        self.show_progress();
        // At the latest here: events may arrive without a pause.
        self.journal.snapshots.show_due();
        let messages = self.checkpoints.pool_owner.as_ref().map(PoolOwner::messages).unwrap_or_default();
        messages.into_iter().for_each(|line| self.output.terminal.print(line));
        self.checkpoints.compare(self.ranks.spec.seat.first_rank, &mut self.group);
        self.checkpoints.report_a_silent_directory(&self.ranks, &mut self.group);
        let news = self.ranks.mirror.as_mut().and_then(LogMirror::news);
        news.into_iter().for_each(|line| self.output.terminal.print(line));
        self.look_what_is_ready();
        let ranks = self.ranks.processes.iter().map(|rank| rank.pid);
        let store = self.group.store_process();
        let ranks: Vec<Pid> = ranks.chain(self.ranks.warm.templates()).chain(store).collect();
        // Includes the guardian if another process killed it: it would be ahead of all others in the queue.
        reap_orphans(|pid| !ranks.contains(&pid));
        if self.ranks.are_at_work() {
            self.ranks.limits.sample();
            signatures::let_go();
        }
        let waits = self.group.waiting().is_some();
        if self.ranks.stopping.stop.is_none()
            && let Some(fact) = self.ranks.warm.look_after(&self.ranks.spec, waits)
        {
            self.group.fact(fact);
        }
    }

    /// Has the ranks of all hosts save, after the same step, when a save is due.
    fn save_if_due(&mut self) {
        let now = clock::mono();
        if self.ranks.stopping.stop.is_some()
            || !self.group.lead_mut().is_some_and(|lead| lead.job_mut().save_is_due(now))
        {
            return;
        }
        let attempt = self.ranks.attempt;
        let (group, here) = self.group_and_host();
        if let (Some(step), Some(lead)) = (here.save_after(), group.lead_mut()) {
            lead.save_is_due(attempt, step);
        }
    }

    fn evidence_taken(&mut self, taken: Fact) {
        self.hang.evidence = None;
        // Look once more: a rank that made progress meanwhile did not hang.
        self.look();
        let passed = self.hang.job.passed(clock::mono());
        self.group.fact(passed.unwrap_or(taken));
    }

    /// Shows readers and the agent what the ranks do.
    fn sample(&mut self) {
        let beat = |(rank, page): (&Rank, &mainstay_sensors::source::pages::PageReader)| {
            Some((*rank, BeatView { pace: self.group.pace(*rank), ..page.beat()? }))
        };
        let beats: Vec<(Rank, BeatView)> = self.ranks.pages.readers.iter().filter_map(beat).collect();
        let elsewhere = self.hang.take_elsewhere().into_iter();
        let elsewhere =
            elsewhere.map(|(rank, beat)| (rank, BeatView { pace: self.group.pace(rank), ..beat }));
        let mut shown: Vec<(Rank, BeatView)> = elsewhere.collect();
        shown.extend(beats.iter().cloned());
        let (journal, attempt) = (&mut self.journal, self.ranks.attempt);
        if !shown.is_empty() {
            journal.snapshots.samples(&journal.job, attempt, shown);
            journal.snapshots.publish();
        }
        self.agent.sample(attempt, beats);
    }

    /// Shows on the terminal how far the job is.
    fn show_progress(&mut self) {
        if !self.output.terminal.shows_progress() {
            return;
        }
        let Some(job) = self.journal.snapshots.view().jobs.get(&self.journal.job) else { return };
        if let Some(step) = job.step {
            self.output.rate.add(job.step_at, job.attempt, step);
        }
        let tiers = self.checkpoints.pool_owner.as_ref().map(PoolOwner::status).unwrap_or_default();
        let saved = tiers.memory.or(tiers.disk).map(|(_, age)| age);
        let now = clock::mono();
        self.output.terminal.progress(progress::parts(job, now, self.output.rate.rate(now), saved));
    }

    /// Asks the agent for its evidence about a failure.
    pub(crate) fn consult(&mut self, verdict: Box<Verdict>) {
        let now = clock::mono();
        let held = self.ranks.held(self.settings.master_port);
        self.group.step(now, Event::Held(held));
        // The agent gets the entries before the question.
        self.poll_group(now);
        if !self.agent.ask(verdict) {
            self.rule(None);
        }
    }

    fn rule(&mut self, ruling: Option<AgentEvidence>) {
        self.agent.ruling_until = None;
        if ruling.as_ref().is_some_and(|ruling| !ruling.host_evidence.held.is_empty()) {
            let (ranks, to) = self.split();
            ranks.end_what_escaped(&to);
        }
        self.group.step(clock::mono(), Event::AgentEvidence(ruling));
    }

    fn link(&mut self, event: LinkEvent) {
        let now = clock::mono();
        match event {
            LinkEvent::Absent { why } => self.output.terminal.print(format!("agent: none: {why}")),
            LinkEvent::Found { socket, version, have_seq, orders } => {
                self.output.terminal.print(format!("agent: attached ({})", socket.display()));
                self.agent.found(orders, have_seq);
                self.agent.catch_up(&mut self.journal.snapshots, self.ranks.spec.own_ranks());
                self.group.fact(Fact::AgentFound { version });
            }
            LinkEvent::Lost { reason } => {
                self.agent.lost();
                self.hang.job.gpus_at_work(&Default::default(), now);
                self.group.fact(Fact::AgentLost { reason });
                if self.agent.ruling_until.is_some() {
                    self.rule(None);
                }
            }
            LinkEvent::AgentEvidence(ruling) => self.rule(Some(ruling)),
            LinkEvent::Late(AgentEvidence { incident, host_evidence, .. }) => {
                self.group.step(now, Event::LateEvidence { incident, host_evidence });
            }
            LinkEvent::RankContext(known) => {
                self.hang.job.gpus_at_work(&known.at_work, now);
                self.group.step(now, Event::RankContext(known));
            }
            LinkEvent::Leave(leave) => self.asked_to_leave(leave),
        }
    }

    fn host(&mut self, report: SensorReport) {
        for fact in report.facts {
            match fact {
                // Kills that were counted when a rank ended are already reported.
                Fact::OutOfMemoryKills { .. } => self.ranks.count_oom_kills(&mut self.group),
                fact => self.group.fact(fact),
            }
        }
        let snapshots = &mut self.journal.snapshots;
        snapshots.show_host(clock::now(), report.components);
        if !self.agent.is_attached() {
            // The agent knows more than this: do not replace what it reports.
            let components: Vec<Component> = snapshots.view().components.values().cloned().collect();
            let known = slowdown_hints(&[], &Owners::new(), &components, &[]);
            if !known.is_as(&self.agent.rank_context) {
                self.agent.rank_context = known.clone();
                self.group.step(clock::mono(), Event::RankContext(known));
            }
        }
    }

    fn asked_to_stop(&mut self, signal: i32) {
        let (by, now) = (ExitStatus::Signal(signal).to_string(), clock::mono());
        if let Some((_, first)) = self.ranks.stopping.asked_by {
            if is_in_a_hurry(signal, now.since(first)) {
                self.output.terminal.print(format!("{by} again: ranks that still run are killed"));
                let (ranks, mut to) = self.split();
                return ranks.force(&mut to);
            }
            return self.output.terminal.print(format!(
                "{by} again within {IMPATIENT_AFTER}: it counts as the same request, and the ranks keep their time to save \
                 (SIGINT, or a later {by}, kills them)"
            ));
        }
        self.ranks.stopping.asked_by = Some((signal, now));
        if let Some(following) =
            self.group.follower_mut().filter(|following| following.follow.waits_for_a_seat())
        {
            // A spare has no ranks to stop.
            following.cut_off = Some(format!("signal {signal} while it waited as a spare"));
            self.exit = Some(128 + signal);
            return self
                .output
                .terminal
                .print(format!("signal {signal} while this host waited as a spare: it leaves the job"));
        }
        if let Some(stop) = &mut self.ranks.stopping.stop {
            // Ranks that are being stopped for a fault get no more time than this request gives.
            stop.within(now, self.settings.grace.requested);
        }
        let by = format!("{}{}", ExitStatus::Signal(signal), self.group.on_host());
        if let Some(attempt) = self.checkpoints.give_up_start() {
            let error = format!("{by} arrived before the ranks were started");
            self.group.fact(Fact::start_failed(attempt, error));
        }
        self.group.fact(Fact::StopRequested { by, exit: 128 + signal });
    }

    /// The machine is about to be taken away: ranks save and end within the time that is left, and the scheduler starts the
    /// job elsewhere. The signal with which the system shuts the machine down meanwhile does not cut their saving short.
    fn asked_to_leave(&mut self, leave: Leave) {
        if self.ranks.stopping.is_requested() || !self.settings.leave_on_notice {
            return;
        }
        let now = clock::now();
        let left = leave.by.map(|by| Span(u64::try_from(by.0.saturating_sub(now.wall.0)).unwrap_or(0)));
        let within = Grace::before_the_machine_goes(self.settings.grace.requested, left);
        self.ranks.stopping.leave_within = Some(within);
        if let Some(stop) = &mut self.ranks.stopping.stop {
            stop.within(now.mono, within);
        }
        let exit = self.settings.policy.hand_back_exit;
        self.group.fact(Fact::StopRequested { by: leave.reason, exit });
    }

    fn policy_news(&mut self, news: News) {
        match news {
            News::Ready => {}
            News::Broken(words) => {
                let fact = policy_trouble(&PolicyProblem::Failed(words));
                if let Some(lead) = self.group.lead_mut() {
                    lead.begin_with(clock::mono(), vec![JobOutput::Record(Body::Fact(fact))]);
                }
            }
            News::Printed(line) => self.output.terminal.print(format!("policy: {line}")),
            News::Answered(incident, reply) => {
                self.group.step(clock::mono(), Event::PolicyAnswer { incident, advice: reply.advice });
            }
        }
    }

    fn start_progress(&mut self, progress: StartProgress) {
        if let Some(start) = self.checkpoints.start_progress(progress, &self.output.terminal) {
            self.start(start);
        }
    }

    /// Starts the ranks of an attempt.
    pub(crate) fn start(&mut self, start: Start) {
        self.checkpoints.begin_attempt(start.attempt);
        let (ranks, mut to) = self.split();
        ranks.start(start, &mut to);
    }

    /// The leader gives this host a seat, perhaps with other ranks than before. No rank runs meanwhile.
    pub(crate) async fn take_seat(&mut self, attempt: mainstay_model::id::Attempt, seat: Seat) {
        self.finish_moving().await;
        self.end_those_that_wait().await;
        if seat == self.ranks.spec.seat {
            self.checkpoints.keep_seat(&self.ranks.spec);
            return self.group.step(clock::mono(), Event::Seated { attempt, seat });
        }
        self.ranks.pages.clear();
        self.ranks.spec.seat = seat.clone();
        if let Some(following) = self.group.follower_mut() {
            following.sit(&seat);
        }
        // Which ranks are judged here depends on the seats.
        let now = clock::mono();
        let mut learned = JobMemory::default();
        self.hang.remember(&mut learned);
        let ranks = self.settings.ranks.local_world_size as usize;
        self.hang = Hang::new(&self.settings.hang, Rank(seat.first_rank), ranks, now);
        self.hang.recall(&learned);
        self.group.judge_hangs_with(&mut self.hang, now);
        self.checkpoints.change_seat(attempt, seat, &self.ranks.spec, &mut self.group);
    }

    /// Ends ranks that wait in their processes: they have the numbers and memory of the former world, and get new processes.
    async fn end_those_that_wait(&mut self) {
        let waiting: Vec<Rank> = self.ranks.living().map(|rank| rank.rank).collect();
        if !waiting.is_empty() {
            let words = "ranks that wait in their processes get new ones: their numbers may change";
            self.output.terminal.print(words.to_owned());
        }
        for rank in waiting {
            self.end_rank(rank).await;
        }
    }

    /// Ends a rank that waits in its process and must not continue in it.
    pub(crate) async fn end_rank(&mut self, rank: Rank) {
        let (ranks, mut to) = self.split();
        if !ranks.end_rank(rank, &mut to).await || self.ranks.is_stopped() {
            self.end_attempt().await;
        }
    }

    fn moved(&mut self, moved: Moved) {
        let Launcher { checkpoints, ranks, group, output, .. } = self;
        checkpoints.moved(moved, &mut ranks.spec, group, &output.terminal);
    }

    async fn finish_moving(&mut self) {
        if let Some(moving) = &mut self.checkpoints.moving {
            let moved = moving.done().await;
            self.moved(moved);
        }
    }

    /// Starts to wait as a spare. Its journal names the job; once it has a seat, it records the leader's journal.
    pub(crate) fn begin_to_wait(&mut self) {
        let Some(spec) = self.group.waiting().map(|following| following.spec.clone()) else { return };
        self.publish(clock::mono(), Body::Fact(Fact::JobStarted(spec)));
        self.look_what_is_ready();
    }

    /// Reports what a spare has ready, if that changed.
    fn look_what_is_ready(&mut self) {
        if self.group.waiting().is_none() {
            return;
        }
        let imports = self.ranks.warm.are_imports_done();
        let now = SpareReady { imports, copy: self.checkpoints.kept_for_others() };
        let Some(is_news) = self.group.follower_mut().and_then(|following| following.take_ready(&now)) else {
            return;
        };
        if is_news {
            self.output.terminal.print(now.describe());
        }
        self.publish(clock::mono(), Body::Fact(now.fact()));
    }

    /// Shows and records an entry of this host's journal.
    pub(crate) fn publish(&mut self, at: Mono, body: Body) {
        let line = self.journal.line(&body);
        line.into_iter().for_each(|line| self.output.terminal.print(line));
        let entry = self.journal.record(clock::stamp_of(at), None, body);
        self.pass_on(entry);
    }

    /// Passes on an entry that is recorded.
    pub(crate) fn pass_on(&mut self, entry: Entry) {
        if let Some(lead) = self.group.lead_mut() {
            lead.keep_recent(&entry);
        }
        self.agent.send_entry(entry, self.ranks.spec.own_ranks());
    }

    async fn end(mut self, exit: i32, mut outside: Outside) -> JobEnd {
        self.output.terminal.progress(Vec::new());
        self.journal.snapshots.release();
        self.finish_moving().await;
        // What it keeps for others is in the pool, which is removed.
        self.checkpoints.replicas = None;
        if outside.agent_expected && !self.agent.is_attached() {
            // A job that ended at once must reach the agent all the same.
            let found = tokio::time::timeout(EVIDENCE_TIMEOUT, outside.link_events.recv()).await;
            if let Ok(Some(event)) = found {
                self.link(event);
            }
        }
        while let Ok(event) = outside.link_events.try_recv() {
            self.link(event);
        }
        self.poll_group(clock::mono());
        self.sample();
        if !self.journal.has_end() {
            let reason = self.group.reason();
            self.publish(clock::mono(), Body::Fact(Fact::JobEnded { exit, reason }));
        }
        self.journal.snapshots.sync();
        if self.journal.snapshots.unwritten() > 0 {
            self.output.terminal.print(format!(
                "{} entries are not in the journal: its file system in {} does not answer",
                self.journal.snapshots.unwritten(),
                self.ranks.spec.run_dir.display()
            ));
        }
        if let Some(lead) = self.group.lead() {
            self.journal.remember(lead.job(), &mut self.hang);
        }
        self.announce_end().await;
        let summary = self.group.summary(clock::mono(), exit);
        let summary = summary.unwrap_or_else(|| self.journal.recount(exit, self.group.reason()));
        if let Some(policy) = self.policy.take() {
            // What it does in threads may take a while.
            let printed = policy.end().await;
            printed.into_iter().for_each(|line| self.output.terminal.print(format!("policy: {line}")));
        }
        self.ranks.warm.end();
        // Its template may have just forked: no process of the job may outlive it.
        let helpers = self.ranks.helpers(&self.group, None);
        sweep(None, || helpers.clone(), Span::default()).await;
        if let Some(pool_owner) = self.checkpoints.pool_owner.take() {
            // The guardian stays until this is done: if this launcher is killed meanwhile, the guardian completes it.
            let messages = tokio::task::spawn_blocking(move || pool_owner.finish()).await.unwrap_or_default();
            messages.into_iter().for_each(|line| self.output.terminal.print(line));
        }
        let stopping = &self.ranks.stopping;
        let may_return = self.group.may_return() && !stopping.is_requested();
        let is_of_job = self.group.ends_with_the_job();
        // Last: until then messages to the leader are delivered.
        self.group.leave(exit, &summary.reason, stopping.asked_by.is_some()).await;
        if let Some(guardian) = self.ranks.guardian.take() {
            guardian.dismiss();
        }
        let mirror = self.ranks.mirror.take();
        JobEnd { exit, summary, terminal: self.output.terminal, may_return, is_of_job, mirror }
    }
}

/// Whether a repeated request, this long after the first, means that the sender does not want to wait for the ranks.
/// People send SIGINT and SIGQUIT, from the keyboard.
fn is_in_a_hurry(signal: i32, since_first: Span) -> bool {
    matches!(signal, nix::libc::SIGINT | nix::libc::SIGQUIT) || since_first >= IMPATIENT_AFTER
}

async fn until(deadline: Option<Instant>) {
    next_of(deadline.map(tokio::time::sleep_until)).await;
}

/// What comes next of something; waits forever if there is none.
pub(crate) async fn next_of<T>(next: Option<impl Future<Output = T>>) -> T {
    match next {
        Some(next) => next.await,
        None => std::future::pending().await,
    }
}

/// Converts a point of this program's clock to one of the runtime's.
pub(crate) fn from_now(at: Mono) -> Instant {
    Instant::now() + Duration::from_nanos(at.since(clock::mono()).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_person_is_in_a_hurry_at_once_and_a_program_only_later() {
        let (early, late) = (Span::millis(3), IMPATIENT_AFTER);
        for (signal, hurries) in [
            (nix::libc::SIGINT, true),
            (nix::libc::SIGQUIT, true),
            (nix::libc::SIGTERM, false),
            (nix::libc::SIGHUP, false),
        ] {
            assert_eq!(is_in_a_hurry(signal, early), hurries, "{signal}");
            assert!(is_in_a_hurry(signal, late), "{signal}");
        }
    }
}

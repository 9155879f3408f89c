//! The end of ranks and of attempts: which ranks failed, which are stopped and why, which stay in their processes, and what
//! is left then.

use std::time::Duration;

use mainstay_model::entry::{ExitStatus, Fact, Note};
use mainstay_model::id::{Pid, Rank};
use mainstay_model::time::Span;
use mainstay_recovery::in_process::{Call, RankMessage, Received, RoundState};
use mainstay_recovery::protocol::{Event, StopWhy};
use mainstay_sensors::source::error_file;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::timed_files::Patient;
use mainstay_sys::{clock, pidfd, processes};
use nix::sys::signal::Signal;

use super::process::RankProcess;
use super::stop::{Spared, Stop, sweep};
use super::warm::with_descendants;
use super::{Ended, Ranks, Reports, save};
use crate::output::Output;
use crate::output::rank_output::StreamTails;
use crate::{log_files, signatures};

/// How long a restart waits for the terminal, so that a rank's last lines appear before the lines about its failure.
const LAST_WORDS_WITHIN: Duration = Duration::from_millis(20);

/// How long a killed process may take to be gone.
const DEATH_WITHIN: Duration = Duration::from_secs(5);

/// For reads of other processes.
static PROC: Patient = Patient::new("proc");

/// How long a look at all processes of the host may take.
const PROC_WITHIN: Duration = Duration::from_secs(2);

/// How long a rank that raised an exception may take to print its traceback.
const TO_PRINT: Span = Span::millis(300);

/// How long the other ranks may take to end in the same way, if the first shows that the program cannot run.
const TO_END_ALIKE: Span = Span::seconds(2);

/// How often to check whether a traceback is printed. Only files of ranks that raised and have not printed are read.
const LOOK_AT_SPARED_EVERY: Span = Span::millis(2);

impl Ranks {
    /// Stops the attempt's ranks. After a fault, ranks that can wait in their processes do so.
    pub(crate) fn stop(&mut self, why: StopWhy, to: &Reports<'_>) {
        if why == StopWhy::Fault {
            // A follower makes no verdict: sixty of them on one machine would read the catalog sixty times.
            if to.group.lead().is_some() {
                signatures::prepare();
            }
            // While the ranks end and are judged.
            self.warm.prepare(&self.spec);
            if self.gather() {
                return;
            }
        }
        self.round.dissolve();
        let now = clock::mono();
        let signal = self.stopping.asked_by.map_or(nix::libc::SIGTERM, |(signal, _)| signal);
        let saving = why.lets_save() && save::is_listened_for(self);
        if saving {
            save::request(self);
        }
        let spared = self.to_spare(why, to.output);
        let grace = self.stopping.grace();
        self.stopping.stop = Some(Stop::begin(now, why, grace, signal, saving, spared, &self.processes));
    }

    /// Has the ranks leave the attempt in their processes, if any of them can. Returns whether any can.
    fn gather(&mut self) -> bool {
        let has_left = |rank: &RankProcess| {
            matches!(self.round.standing(rank.rank), Some(RoundState::Leaving | RoundState::Ready))
        };
        let can = self.round.can_gather() || self.processes.iter().any(has_left);
        if self.round_server.is_none() || !can {
            return false;
        }
        self.stopping.stop = Some(Stop::gather(clock::mono(), self.stopping.grace));
        let gathered = self.round.gather();
        self.call(&gathered, &Call::Leave { epoch: self.attempt.0 });
        true
    }

    /// The ranks that a stop leaves out at first: they are about to end by themselves, and their last output is needed. A
    /// rank that raised an exception writes its exit note before its traceback if another hook encloses the client's:
    /// `torch.distributed` collects what the inner hook prints, and prints it afterwards. And if one rank shows that the
    /// program cannot run, the launcher waits to see how the others end.
    fn to_spare(&self, why: StopWhy, output: &Output) -> Spared {
        let now = clock::mono();
        let wake_at = now.after(LOOK_AT_SPARED_EVERY);
        if why != StopWhy::Fault {
            return Spared::default();
        }
        if output.spoken.may_not_run && !output.spoken.has_steps() {
            let ranks = self.living().map(|rank| rank.pid).collect();
            return Spared { ranks, until: now.after(TO_END_ALIKE), wake_at: now.after(TO_END_ALIKE) };
        }
        Spared { ranks: self.silent(output), until: now.after(TO_PRINT), wake_at }
    }

    /// Checks whether spared ranks have printed their tracebacks.
    pub(crate) fn look_at_spared(&mut self, output: &Output) {
        let silent = self.silent(output);
        let now = clock::mono();
        if let Some(stop) = &mut self.stopping.stop {
            stop.spare_only(&silent, now.after(LOOK_AT_SPARED_EVERY), now, &self.processes);
        }
    }

    /// Ranks that raised and whose traceback is not in their standard error yet.
    fn silent(&self, output: &Output) -> Vec<Pid> {
        let silent = |rank: &&RankProcess| {
            rank.raised && rank.ending.is_none() && !output.spoken.has_printed(rank.rank, &rank.files)
        };
        self.living().filter(silent).map(|rank| rank.pid).collect()
    }

    /// A rank's first thread has ended. If it failed, the others are stopped now, not when its memory is released.
    pub(crate) fn ending(&mut self, pid: Pid, to: &mut Reports<'_>) {
        let living = |rank: &RankProcess| rank.pid == pid && rank.exit.is_none() && rank.ending.is_none();
        let Some(index) = self.processes.iter().position(living) else { return };
        // Ranks that leave a round in their processes do so when this rank is gone: until then its ends of their
        // connections are open, and the calls that they are interrupted in may not return.
        let in_process = self.round.can_gather();
        if self.stopping.stop.is_some()
            || in_process
            || matches!(pidfd::exit_status(pid), Ok(Some(_)) | Err(_))
        {
            return;
        }
        let Some(status) = processes::ending(pid).filter(|status| !status.is_success()) else { return };
        // The page is the black box: read the rank's last writes before its end.
        self.look(to);
        self.count_oom_kills(to.group);
        let rank = &mut self.processes[index];
        rank.ending = Some(status);
        to.group.fact(Fact::RankEnding { attempt: self.attempt, rank: rank.rank, pid, status });
    }

    pub(crate) fn ended(&mut self, end: &Ended, to: &mut Reports<'_>) {
        let known = self.processes.iter().position(|rank| rank.pid == end.pid && rank.exit.is_none());
        let Some(index) = known else {
            // A process that was abandoned has died after all.
            return pidfd::reap(end.pid);
        };
        // The page is the black box: read the rank's last writes before its end.
        self.look(to);
        let rank = &mut self.processes[index];
        let status = match pidfd::exit_status(rank.pid) {
            Ok(Some(status)) => status,
            // The child was reaped elsewhere; all that is sure is that it is gone.
            Ok(None) | Err(_) => ExitStatus::Code(255),
        };
        let status = rank.ending.unwrap_or(status);
        rank.exit = Some(status);
        if status.is_success() {
            to.hang.job.finished(rank.local_rank as usize, end.at);
        } else {
            self.count_oom_kills(to.group);
            // Before another process can get the number of the group.
            processes::signal_group(end.pid, Signal::SIGKILL);
        }
        if let Some(guardian) = &mut self.guardian {
            guardian.release(end.pid);
        }
        pidfd::reap(end.pid);
        let rank = &self.processes[index];
        let (attempt, which, pid, files) = (self.attempt, rank.rank, rank.pid, &rank.files);
        let after_stop = rank.ending.is_none()
            && self.stopping.stop.as_ref().is_some_and(|stop| match status {
                _ if stop.spares(pid) => false,
                ExitStatus::Signal(signal) => stop.sent(signal),
                ExitStatus::Code(_) => true,
            });
        let failed = !status.is_success() && !after_stop;
        // The output of a rank that raised is read even if the rank was asked to end on its way out.
        let tails = if failed || rank.raised {
            let all: Vec<_> = self.processes.iter().map(|rank| &rank.files).collect();
            to.output.spoken.tails(which, files, &all, end.at)
        } else {
            StreamTails::default()
        };
        let (error_file, at) = (files.error.clone(), end.at);
        let read = move || error_file::read(&error_file, at);
        let note =
            if failed && !rank.raised { log_files::ask_at(&files.error, read).flatten() } else { None };
        if failed {
            to.output.note_end(attempt, note.as_ref(), Some(status), &tails);
        }
        if let Some(note) = note {
            to.output.spoken.note(which, &note);
            if let Some(file) = note.file.as_ref().filter(|_| !to.output.spoken.has_printed(which, files)) {
                to.output.terminal.print(format!("{which} printed no traceback; it is in {file}"));
            }
            let data = self.pages.get(which).and_then(PageReader::data);
            to.group.fact(Fact::RankRaised { attempt, rank: which, pid, note, data });
        }
        to.group.step(end.at, Event::Fact(self.exited(which, pid, status, after_stop, tails)));
        self.rank_gone(which, pid);
    }

    fn exited(&self, rank: Rank, pid: Pid, status: ExitStatus, after_stop: bool, tails: StreamTails) -> Fact {
        let StreamTails { stderr_tail, stdout_tail, stderr_times, stdout_times } = tails;
        Fact::RankExited {
            attempt: self.attempt,
            rank,
            pid,
            status,
            step: self.pages.step(rank),
            data: self.pages.get(rank).and_then(PageReader::data),
            after_stop,
            stderr_tail,
            stdout_tail,
            stderr_times,
            stdout_times,
        }
    }

    /// Whether an attempt that is being stopped has ended: all its ranks are gone or wait in their processes.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopping.stop.is_some() && (self.round.is_gathered() || !self.are_running())
    }

    /// Removes what the ranks of the attempt left. Returns the end of the attempt.
    pub(crate) async fn end_attempt(&mut self, to: &mut Reports<'_>) -> Fact {
        let stop = self.stopping.stop.take();
        if self.are_running() {
            return self.end_round(to).await;
        }
        let patience = match stop.map(|stop| stop.why) {
            None | Some(StopWhy::Fault | StopWhy::Dismissed) => Span::default(),
            Some(StopWhy::Requested | StopWhy::Ordered) => Span::seconds(1),
            Some(StopWhy::Done) => self.stopping.grace.done,
        };
        let helpers = self.helpers(to.group, to.policy);
        let spared = || self.warm.processes().into_iter().chain(helpers.iter().copied()).collect();
        let swept = sweep(self.cgroup.as_ref(), spared, patience).await;
        self.undying = swept.undying;
        to.output.terminal.flush(LAST_WORDS_WITHIN);
        Fact::AttemptEnded { attempt: self.attempt, orphans_killed: swept.killed, waiting: Vec::new() }
    }

    /// Ends a round when all ranks wait in their processes or are gone: what the lost ranks left is removed too.
    async fn end_round(&mut self, to: &mut Reports<'_>) -> Fact {
        // The pages stay in use: read what they report of this round before the next one.
        self.look(to);
        let waiting = self.round.waiting();
        let mut orphans_killed = 0;
        if waiting.len() < self.processes.len() {
            let spared = || {
                let spared = with_descendants(&self.live_and_helper_pids(to));
                spared.into_iter().chain(self.warm.processes()).collect()
            };
            // Not by the cgroup: it also contains the ranks that wait.
            let swept = sweep(None, spared, Span::default()).await;
            (self.undying, orphans_killed) = (swept.undying, swept.killed);
        }
        Fact::AttemptEnded { attempt: self.attempt, orphans_killed, waiting }
    }

    /// Kills processes of the ranks that are no longer descendants of this launcher, by the launch's mark in their
    /// environment. It runs only if something is held, since it reads every process of the host, and not while ranks wait
    /// in their processes, to which they may belong.
    pub(crate) fn end_what_escaped(&self, to: &Reports<'_>) {
        if self.are_running() {
            return;
        }
        let us = Pid(i32::try_from(std::process::id()).unwrap_or(0));
        let helpers = self.helpers(to.group, to.policy);
        let spared: Vec<Pid> = self.warm.processes().into_iter().chain(helpers).chain([us]).collect();
        let mark = self.spec.mark();
        // In a thread: `/proc` blocks readers of a process that the kernel cannot access.
        let of_launch = mark.clone();
        let marked = PROC.ask(PROC_WITHIN, move || processes::marked(&of_launch)).unwrap_or_default();
        for pid in marked.into_iter().filter(|pid| !spared.contains(pid)) {
            to.output.terminal.print(format!("process {} was left behind by the ranks and is killed", pid.0));
            let of_launch = mark.clone();
            let _ = PROC.ask(PROC_WITHIN, move || processes::kill_marked(pid, &of_launch));
        }
    }

    /// Asks ranks to end that were asked to save and did not end by themselves.
    pub(crate) fn ask_to_end(&mut self) {
        if let Some(stop) = &mut self.stopping.stop {
            stop.report(&self.processes);
        }
    }

    /// Kills ranks that have not ended in time, and abandons those that survive it.
    pub(crate) fn force(&mut self, to: &mut Reports<'_>) {
        let Some(stop) = &mut self.stopping.stop else { return };
        let gathered = self.round.is_gathering().then(|| self.round.missing());
        let is_late = |rank: &&RankProcess| {
            rank.exit.is_none() && gathered.as_ref().is_none_or(|missing| missing.contains(&rank.rank))
        };
        let late: Vec<&RankProcess> = self.processes.iter().filter(is_late).collect();
        let hopeless = stop.force(clock::mono(), late.iter().copied());
        let late: Vec<(Rank, Pid)> = late.into_iter().map(|rank| (rank.rank, rank.pid)).collect();
        for (rank, pid) in late {
            if hopeless {
                self.give_up(rank, pid, to);
            } else {
                let killed = format!("{rank} (pid {}) did not end in time and is killed", pid.0);
                to.output.terminal.print(killed);
            }
        }
    }

    /// Counts a rank that SIGKILL does not end as ended, so that a decision can be made. Its process is handled with what
    /// ranks leave behind: the host is not ready while it exists.
    fn give_up(&mut self, rank: Rank, pid: Pid, to: &mut Reports<'_>) {
        to.output.terminal.print(format!(
            "{rank} (pid {}) did not exit after SIGKILL; it is {}",
            pid.0,
            processes::waits_in(pid)
        ));
        let status = ExitStatus::Signal(nix::libc::SIGKILL);
        if let Some(process) = self.processes.iter_mut().find(|process| process.pid == pid) {
            process.exit = Some(status);
        }
        to.group.fact(self.exited(rank, pid, status, true, StreamTails::default()));
        self.rank_gone(rank, pid);
    }

    /// Ends a rank that waits in its process and must not continue in it. Returns whether there is one.
    pub(crate) async fn end_rank(&mut self, rank: Rank, to: &mut Reports<'_>) -> bool {
        let Some(process) = self.living().find(|process| process.rank == rank) else { return false };
        let mut stop = Stop::gather(clock::mono(), self.stopping.grace);
        stop.kill(process);
        let pidfd = process.pidfd.clone();
        self.stopping.stop = Some(stop);
        // Its end is the last event that the round waited for.
        if tokio::time::timeout(DEATH_WITHIN, pidfd.ended()).await.is_ok() {
            self.ended(&Ended { pid: pidfd.pid(), at: clock::mono() }, to);
        } else {
            self.give_up(rank, pidfd.pid(), to);
        }
        true
    }

    /// A process sent a message about its round. Only messages from ranks of the current attempt count.
    pub(crate) fn received(&mut self, pid: Pid, word: RankMessage, to: &mut Reports<'_>) {
        let known = self.living().find(|rank| rank.pid == pid);
        let Some(rank) = known.map(|rank| rank.rank) else {
            tracing::debug!(pid = pid.0, "a process that is not a rank of this attempt sent a round message");
            // It sees its connection end, and acts as it would without a launcher.
            if let Some(round_server) = &self.round_server {
                round_server.forget(pid);
            }
            return;
        };
        match self.round.receive(rank, word) {
            Received::Noted => {}
            Received::Late => self.call(&[rank], &Call::Leave { epoch: self.attempt.0 }),
            Received::PassedOver => {
                tracing::debug!(%rank, "a rank sent a message about a round that is over");
            }
            Received::AllDone(ranks) => self.finished(&ranks),
            Received::Raised(note) => self.raised_in_process(rank, pid, note, to),
        }
    }

    fn raised_in_process(&mut self, rank: Rank, pid: Pid, note: Note, to: &mut Reports<'_>) {
        // The steps in its page come before what ended them.
        self.look(to);
        let is_ending = self.round.standing(rank) == Some(RoundState::Ending);
        let data = self.pages.get(rank).and_then(PageReader::data);
        self.count_oom_kills(to.group);
        to.group.fact(Fact::RankRaised { attempt: self.attempt, rank, pid, note, data });
        for process in self.processes.iter_mut().filter(|process| process.rank == rank) {
            process.raised = true;
            if is_ending {
                process.signal(nix::libc::SIGKILL);
            }
        }
        if is_ending {
            let why = format!("{rank} cannot go on in its process after this error and gets a new one");
            to.output.terminal.print(why);
        }
    }

    /// A rank's process is gone: send nothing more to it, and wait for nothing from it.
    fn rank_gone(&mut self, rank: Rank, pid: Pid) {
        self.forget(pid);
        let done = self.round.gone(rank);
        self.finished(&done);
    }

    pub(super) fn forget(&self, pid: Pid) {
        for round_server in self.round_server.iter().chain(&self.drill_server) {
            round_server.forget(pid);
        }
    }

    /// Reports to the ranks that all functions have returned.
    fn finished(&self, ranks: &[Rank]) {
        self.call(ranks, &Call::Finished { epoch: self.attempt.0 });
    }

    fn call(&self, ranks: &[Rank], call: &Call) {
        let Some(round_server) = &self.round_server else { return };
        for process in self.processes.iter().filter(|process| ranks.contains(&process.rank)) {
            round_server.send(process.pid, call);
        }
    }
}

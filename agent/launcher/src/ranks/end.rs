//! The end of ranks and of attempts: which ranks failed, which are stopped and why, and what is left then.

use std::time::Duration;

use mainstay_health::host::cloud::leave::Leave;
use mainstay_model::entry::{ExitStatus, Fact};
use mainstay_model::id::{Pid, Rank};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::job::EXHAUSTED;
use nix::sys::signal::Signal;

use crate::log_files;
use crate::output::rank_output::StreamTails;
use crate::ranks::process::RankProcess;
use crate::ranks::save;
use crate::ranks::spec::RankFiles;
use crate::ranks::stop::{Grace, Stop, sweep};
use crate::run::{Ended, Launcher};
use crate::signatures;
use mainstay_recovery::protocol::StopWhy;
use mainstay_sensors::source::error_file;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::timed_files::Patient;
use mainstay_sys::{clock, pidfd, processes};

/// How long a restart waits for the terminal, so that a rank's last lines appear before the lines about its failure.
const LAST_WORDS_WITHIN: Duration = Duration::from_millis(20);

/// A program may repeat its request to stop within this time without being in a hurry. At a time limit Slurm sends
/// SIGTERM twice, 3 ms apart, and SIGKILL only after `KillWait`; systemd may send SIGHUP together with SIGTERM.
const IMPATIENT_AFTER: Span = Span::seconds(5);

/// For reads of other processes.
static PROC: Patient = Patient::new("proc");

/// How long a look at all processes of the host may take.
const PROC_WITHIN: Duration = Duration::from_secs(2);

/// Whether a repeated request, this long after the first, means that the sender does not want to wait for the ranks.
/// People send SIGINT and SIGQUIT, from the keyboard.
fn is_in_a_hurry(signal: i32, since_first: Span) -> bool {
    matches!(signal, nix::libc::SIGINT | nix::libc::SIGQUIT) || since_first >= IMPATIENT_AFTER
}

impl Launcher {
    /// Stops the attempt's ranks. After a fault, ranks that can wait in their processes do so.
    pub(crate) async fn stop_ranks(&mut self, why: StopWhy) {
        let _ = self.give_up_start();
        if why == StopWhy::Fault {
            // A follower makes no verdict: sixty of them on one machine would read the catalog sixty times.
            if self.group.lead().is_some() {
                signatures::prepare();
            }
            // While the ranks end and are judged.
            self.ranks.warm.prepare(&self.rank_spec);
            if self.gather().await {
                return;
            }
        }
        self.ranks.round.dissolve();
        let (now, grace) = (clock::mono(), self.grace());
        let signal = self.stopping.asked_by.map_or(nix::libc::SIGTERM, |(signal, _)| signal);
        let saving = why.lets_save() && save::is_listened_for(&self.ranks.processes, &self.ranks.pages);
        if saving {
            self.request_save();
        }
        let spared = self.to_spare(why);
        self.stopping.stop =
            Some(Stop::begin(now, why, grace, signal, saving, spared, &self.ranks.processes));
        self.end_attempt_if_over().await;
    }

    /// A rank's first thread has ended. If it failed, the others are stopped now, not when its memory is released.
    pub(crate) fn rank_ending(&mut self, pid: Pid) {
        let living = |rank: &RankProcess| rank.pid == pid && rank.exit.is_none() && rank.ending.is_none();
        let Some(index) = self.ranks.processes.iter().position(living) else { return };
        // Ranks that leave a round in their processes do so when this rank is gone: until then its ends of their
        // connections are open, and the calls that they are interrupted in may not return.
        let in_process = self.ranks.round.can_gather();
        if self.stopping.stop.is_some()
            || in_process
            || matches!(pidfd::exit_status(pid), Ok(Some(_)) | Err(_))
        {
            return;
        }
        let Some(status) = processes::ending(pid).filter(|status| !status.is_success()) else { return };
        // The page is the black box: read the rank's last writes before its end.
        self.look();
        self.count_oom_kills();
        let rank = &mut self.ranks.processes[index];
        rank.ending = Some(status);
        let (attempt, rank) = (self.ranks.attempt, rank.rank);
        self.fact(Fact::RankEnding { attempt, rank, pid, status });
    }

    /// Reports that a process, thread or file descriptor could not be had.
    pub(crate) fn note_exhausted(&mut self, detail: String) {
        self.fact(Fact::Observed(Observation {
            component: "job".to_owned(),
            event: EXHAUSTED.to_owned(),
            weight: Weight::Error,
            detail,
            ..Observation::default()
        }));
    }

    /// Counts the kernel's OOM kills and refused processes now. The kernel may have killed a rank that fails, or a worker process that it waited
    /// for, and the regular look at the host comes too late for the verdict.
    pub(crate) fn count_oom_kills(&mut self) {
        self.ranks.limits.sample();
        let count = self.ranks.oom_kills.new_ones();
        if count > 0 {
            self.fact(Fact::OutOfMemoryKills { count });
        }
        if let Some(refused) = self.ranks.limits.refused() {
            self.note_exhausted(refused);
        }
    }

    pub(crate) async fn rank_ended(&mut self, end: &Ended) {
        let known = self.ranks.processes.iter().position(|rank| rank.pid == end.pid && rank.exit.is_none());
        let Some(index) = known else {
            // A process that was abandoned has died after all.
            return pidfd::reap(end.pid);
        };
        // The page is the black box: read the rank's last writes before its end.
        self.look();
        let rank = &mut self.ranks.processes[index];
        let status = match pidfd::exit_status(rank.pid) {
            Ok(Some(status)) => status,
            // The child was reaped elsewhere; all that is sure is that it is gone.
            Ok(None) | Err(_) => ExitStatus::Code(255),
        };
        let status = rank.ending.unwrap_or(status);
        rank.exit = Some(status);
        if !status.is_success() {
            self.count_oom_kills();
        }
        let rank = &mut self.ranks.processes[index];
        if status.is_success() {
            self.hang.judge.finished(rank, end.at);
        }
        if !status.is_success() {
            // Before another process can get the number of the group.
            processes::signal_group(rank.pid, Signal::SIGKILL);
        }
        if let Some(guardian) = &mut self.ranks.guardian {
            guardian.release(rank.pid);
        }
        pidfd::reap(rank.pid);
        let (which, pid, files) = (rank.rank, rank.pid, rank.files.clone());
        let (raised, ending) = (rank.raised, rank.ending);
        let page = self.ranks.pages.get(&rank.rank);
        let step = page.and_then(|page| page.beat()?.step);
        let data = page.and_then(PageReader::data);
        let after_stop = ending.is_none()
            && self.stopping.stop.as_ref().is_some_and(|stop| match status {
                _ if stop.spares(pid) => false,
                ExitStatus::Signal(signal) => stop.sent(signal),
                ExitStatus::Code(_) => true,
            });
        let failed = !status.is_success() && !after_stop;
        let (attempt, at) = (self.ranks.attempt, end.at);
        // The output of a rank that raised is read even if the rank was asked to end on its way out.
        let words = if failed || raised { self.words(which, &files, end.at) } else { StreamTails::default() };
        let error_file = files.error.clone();
        let read = move || error_file::read(&error_file, at);
        let note = if failed && !raised { log_files::ask_at(&files.error, read).flatten() } else { None };
        if failed {
            self.note_end(note.as_ref(), Some(status), &words);
        }
        if let Some(note) = note {
            self.output.spoken.note(which, &note);
            if let Some(file) = note.file.as_ref().filter(|_| !self.output.spoken.has_printed(which, &files))
            {
                self.output.terminal.print(format!("{which} printed no traceback; it is in {file}"));
            }
            self.fact(Fact::RankRaised { attempt, rank: which, pid, note, data });
        }
        let StreamTails { stderr_tail, stdout_tail, stderr_times, stdout_times } = words;
        self.fact_at(
            end.at,
            Fact::RankExited {
                attempt,
                rank: which,
                pid,
                status,
                step,
                data,
                after_stop,
                stderr_tail,
                stdout_tail,
                stderr_times,
                stdout_times,
            },
        );
        self.rank_gone(which, pid);
        self.end_attempt_if_over().await;
    }

    fn words(&mut self, rank: Rank, files: &RankFiles, ended: Mono) -> StreamTails {
        let all: Vec<RankFiles> = self.ranks.processes.iter().map(|rank| rank.files.clone()).collect();
        self.output.spoken.words(rank, files, &all, ended)
    }

    /// Ends an attempt that is being stopped when all its ranks are gone: what they left is removed too.
    pub(crate) async fn end_attempt_if_over(&mut self) {
        let Some(stop) = &self.stopping.stop else { return };
        if self.ranks.round.is_gathered() && self.ranks.are_running() {
            return self.end_round().await;
        }
        if self.ranks.are_running() {
            return;
        }
        let patience = match stop.why {
            StopWhy::Fault | StopWhy::Dismissed => Span::default(),
            StopWhy::Requested | StopWhy::Ordered => Span::seconds(1),
            StopWhy::Done => self.settings.grace.done,
        };
        self.stopping.stop = None;
        let helpers = self.helpers();
        let warm = &self.ranks.warm;
        let spared = || warm.processes().into_iter().chain(helpers.iter().copied()).collect();
        let swept = sweep(self.ranks.cgroup.as_ref(), spared, patience).await;
        self.ranks.undying = swept.undying;
        self.output.terminal.flush(LAST_WORDS_WITHIN);
        // The next ranks start with what is sealed by now.
        self.compare_what_was_saved();
        let attempt = self.ranks.attempt;
        self.fact(Fact::AttemptEnded { attempt, orphans_killed: swept.killed, waiting: Vec::new() });
    }

    /// Kills processes of the ranks that are no longer descendants of this launcher, by the launch's mark in their
    /// environment. It runs only if something is held, since it reads every process of the host, and not while ranks wait
    /// in their processes, to which they may belong.
    pub(crate) fn end_what_escaped(&self) {
        if self.ranks.are_running() {
            return;
        }
        let us = Pid(i32::try_from(std::process::id()).unwrap_or(0));
        let helpers = self.helpers();
        let spared: Vec<Pid> = self.ranks.warm.processes().into_iter().chain(helpers).chain([us]).collect();
        let mark = self.rank_spec.mark();
        // In a thread: `/proc` blocks readers of a process that the kernel cannot access.
        let of_launch = mark.clone();
        let marked = PROC.ask(PROC_WITHIN, move || processes::marked(&of_launch)).unwrap_or_default();
        for pid in marked.into_iter().filter(|pid| !spared.contains(pid)) {
            self.output
                .terminal
                .print(format!("process {} was left behind by the ranks and is killed", pid.0));
            let of_launch = mark.clone();
            let _ = PROC.ask(PROC_WITHIN, move || processes::kill_marked(pid, &of_launch));
        }
    }

    pub(crate) fn asked_to_stop(&mut self, signal: i32) {
        let (by, now) = (ExitStatus::Signal(signal).to_string(), clock::mono());
        if let Some((_, first)) = self.stopping.asked_by {
            if is_in_a_hurry(signal, now.since(first)) {
                self.output.terminal.print(format!("{by} again: ranks that still run are killed"));
                return self.force();
            }
            return self.output.terminal.print(format!(
                "{by} again within {IMPATIENT_AFTER}: it counts as the same request, and the ranks keep their time to save \
                 (SIGINT, or a later {by}, kills them)"
            ));
        }
        self.stopping.asked_by = Some((signal, now));
        if self.leaves_as_spare(signal) {
            return;
        }
        if let Some(stop) = &mut self.stopping.stop {
            // Ranks that are being stopped for a fault get no more time than this request gives.
            stop.within(now, self.settings.grace.requested);
        }
        let by = format!("{}{}", ExitStatus::Signal(signal), self.on_host());
        if let Some(attempt) = self.give_up_start() {
            let error = format!("{by} arrived before the ranks were started");
            self.fact(Fact::start_failed(attempt, error));
        }
        self.fact(Fact::StopRequested { by, exit: 128 + signal });
    }

    /// The machine is about to be taken away: ranks save and end within the time that is left, and the scheduler starts the
    /// job elsewhere. The signal with which the system shuts the machine down meanwhile does not cut their saving short.
    pub(crate) fn asked_to_leave(&mut self, leave: Leave) {
        if self.stopping.asked_by.is_some()
            || self.stopping.leave_within.is_some()
            || !self.settings.leave_on_notice
        {
            return;
        }
        let now = clock::now();
        let left = leave.by.map(|by| Span(u64::try_from(by.0.saturating_sub(now.wall.0)).unwrap_or(0)));
        let within = Grace::before_the_machine_goes(self.settings.grace.requested, left);
        self.stopping.leave_within = Some(within);
        if let Some(stop) = &mut self.stopping.stop {
            stop.within(now.mono, within);
        }
        let exit = self.settings.policy.hand_back_exit;
        self.fact(Fact::StopRequested { by: leave.reason, exit });
    }

    /// How long stops may take now.
    pub(crate) fn grace(&self) -> Grace {
        let settings = self.settings.grace;
        Grace { requested: self.stopping.leave_within.unwrap_or(settings.requested), ..settings }
    }

    /// Asks ranks to end that were asked to save and did not end by themselves.
    pub(crate) fn ask_to_end(&mut self) {
        if let Some(stop) = &mut self.stopping.stop {
            stop.report(&self.ranks.processes);
        }
    }

    /// Kills ranks that have not ended in time, and abandons those that survive it.
    pub(crate) fn force(&mut self) {
        let Some(stop) = &mut self.stopping.stop else { return };
        let gathered = self.ranks.round.is_gathering().then(|| self.ranks.round.missing());
        let is_late = |rank: &RankProcess| {
            rank.exit.is_none() && gathered.as_ref().is_none_or(|missing| missing.contains(&rank.rank))
        };
        let late: Vec<&RankProcess> = self.ranks.processes.iter().filter(|rank| is_late(rank)).collect();
        let hopeless = stop.force(clock::mono(), late.iter().copied());
        let late: Vec<(Rank, Pid)> = late.into_iter().map(|rank| (rank.rank, rank.pid)).collect();
        for (rank, pid) in late {
            if hopeless {
                self.give_up(rank, pid);
            } else {
                self.output
                    .terminal
                    .print(format!("{rank} (pid {}) did not end in time and is killed", pid.0));
            }
        }
    }

    /// Counts a rank that SIGKILL does not end as ended, so that a decision can be made. Its process is handled with what
    /// ranks leave behind: the host is not ready while it exists.
    pub(crate) fn give_up(&mut self, rank: Rank, pid: Pid) {
        self.output.terminal.print(format!(
            "{rank} (pid {}) did not exit after SIGKILL; it is {}",
            pid.0,
            processes::waits_in(pid)
        ));
        let status = ExitStatus::Signal(nix::libc::SIGKILL);
        if let Some(process) = self.ranks.processes.iter_mut().find(|process| process.pid == pid) {
            process.exit = Some(status);
        }
        let page = self.ranks.pages.get(&rank);
        let step = page.and_then(|page| page.beat()?.step);
        let data = page.and_then(PageReader::data);
        let StreamTails { stderr_tail, stdout_tail, stderr_times, stdout_times } = StreamTails::default();
        let attempt = self.ranks.attempt;
        let after_stop = true;
        self.fact(Fact::RankExited {
            attempt,
            rank,
            pid,
            status,
            step,
            data,
            after_stop,
            stderr_tail,
            stdout_tail,
            stderr_times,
            stdout_times,
        });
        self.rank_gone(rank, pid);
    }
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

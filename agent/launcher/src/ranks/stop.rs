//! Stopping an attempt: first the ranks, in order, then all processes that they left behind.

use std::time::{Duration, Instant};

use mainstay_model::id::Pid;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::StopWhy;
use mainstay_sys::cgroup::Cgroup;
use mainstay_sys::processes;
use nix::libc::{SIGCONT, SIGKILL, SIGTERM};
use nix::sys::signal::Signal;

use crate::ranks::process::RankProcess;

/// How long a stop may take before SIGKILL is sent.
#[derive(Clone, Copy, Debug)]
pub struct Grace {
    /// When the launcher was asked to stop: ranks may want to save.
    pub requested: Span,
    /// After a fault: the ranks can only wait for one that is gone.
    pub fault: Span,
    /// For processes that ranks leave behind when all are done.
    pub done: Span,
}

/// The part of the ranks' time that is reserved to end those that did not save in time by a signal.
const TO_END: Span = Span::seconds(5);

/// A rank that does not end delays its job's next start: at most this long, even if the machine goes later.
const MAX_TIME_TO_LEAVE: Span = Span::seconds(600);

impl Grace {
    fn at_stop(self, why: StopWhy) -> Span {
        match why {
            StopWhy::Requested | StopWhy::Ordered => self.requested,
            StopWhy::Fault | StopWhy::Dismissed => self.fault,
            StopWhy::Done => self.done,
        }
    }

    /// How long a stop may take on a machine that goes when `left` is over: until shortly before that, which may be more or
    /// less than usual. If it is unknown when the machine goes, the usual time.
    pub fn before_the_machine_goes(usual: Span, left: Option<Span>) -> Span {
        left.map_or(usual, |left| Grace::to_save(left).min(MAX_TIME_TO_LEAVE))
    }

    /// How long ranks may take to save and end by themselves, out of their total time.
    pub fn to_save(in_all: Span) -> Span {
        in_all.minus(Span(in_all.0 / 5).min(TO_END))
    }
}

/// A process that survives SIGKILL for this time is inside a driver or a file system that hangs.
const DEATH_WITHIN: Span = Span::seconds(10);

/// The same if the launcher was asked to stop: with the usual time for the ranks it must end within 30 s, after which
/// Slurm (`KillWait`) and Kubernetes kill the launcher too, and nobody would write the summary.
const DEATH_WITHIN_REQUESTED: Span = Span::seconds(5);

/// Processes that ranks left must die of SIGKILL within this time. Otherwise they count as undying.
const KILLED_WITHIN: Duration = Duration::from_secs(2);

/// The longest pause between two looks at processes that do not die.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub struct Stop {
    pub why: StopWhy,
    /// When SIGKILL is sent.
    pub force_at: Mono,
    /// When ranks that were asked to save are asked to end; none after that.
    pub report_at: Option<Mono>,
    /// When SIGKILL was first sent to all that were still alive.
    forced_at: Option<Mono>,
    /// The signal that asks them to end.
    signal: i32,
    /// Signals sent so far, to distinguish our signals from others'.
    sent: Vec<i32>,
    /// Ranks that may end by themselves.
    spared: Spared,
}

/// Ranks that are asked to end later than the others: they are about to end by themselves, and their last output is needed.
#[derive(Clone, Debug, Default)]
pub struct Spared {
    pub ranks: Vec<Pid>,
    pub until: Mono,
    /// When to check next whether they still have something to write.
    pub wake_at: Mono,
}

impl Stop {
    /// Asks all living ranks to end: with `signal` if the launcher was stopped by one, else with SIGTERM. Ranks that are
    /// `saving` are asked later; usually they have ended by themselves until then.
    pub fn begin(
        now: Mono,
        why: StopWhy,
        grace: Grace,
        signal: i32,
        saving: bool,
        spared: Spared,
        ranks: &[RankProcess],
    ) -> Stop {
        let grace = grace.at_stop(why);
        let signal = if why == StopWhy::Requested { signal } else { SIGTERM };
        let report_at = saving.then(|| now.after(Grace::to_save(grace)));
        let mut stop = Stop { report_at, signal, spared, ..Stop::new(why, now.after(grace)) };
        if !saving {
            stop.report(ranks);
        }
        stop
    }

    /// Leaves at most this much time from now on.
    pub fn within(&mut self, now: Mono, span: Span) {
        self.force_at = self.force_at.min(now.after(span));
        self.report_at = self.report_at.map(|at| at.min(now.after(Grace::to_save(span))));
    }

    pub fn report(&mut self, ranks: &[RankProcess]) {
        self.report_at = None;
        let spared = self.spared.ranks.clone();
        self.announce_stop(ranks.iter().filter(|rank| !spared.contains(&rank.pid)));
    }

    fn announce_stop<'a>(&mut self, ranks: impl Iterator<Item = &'a RankProcess> + Clone) {
        self.send(self.signal, ranks.clone());
        // A stopped rank would handle the signal only when it continues.
        self.send(SIGCONT, ranks);
    }

    /// When to look next at spared ranks; none if there are none.
    pub fn wake_at(&self) -> Option<Mono> {
        (!self.spared.ranks.is_empty()).then_some(self.spared.wake_at)
    }

    /// Whether a rank was not asked to end so far.
    pub fn spares(&self, pid: Pid) -> bool {
        self.spared.ranks.contains(&pid)
    }

    /// Spares only these of the spared ranks until `wake_at`, and asks the others to end. After the deadline it asks all of them.
    pub fn spare_only(&mut self, still: &[Pid], wake_at: Mono, now: Mono, ranks: &[RankProcess]) {
        let over = now >= self.spared.until;
        let before = self.spared.ranks.clone();
        self.spared.ranks.retain(|pid| !over && still.contains(pid));
        self.spared.wake_at = wake_at;
        let spared = self.spared.ranks.clone();
        let is_announced = |rank: &&RankProcess| before.contains(&rank.pid) && !spared.contains(&rank.pid);
        self.announce_stop(ranks.iter().filter(is_announced));
    }

    /// Gives ranks that can leave the attempt in their processes the time to do so; sends nothing.
    pub fn gather(now: Mono, grace: Grace) -> Stop {
        Stop::new(StopWhy::Fault, now.after(grace.at_stop(StopWhy::Fault)))
    }

    fn new(why: StopWhy, force_at: Mono) -> Stop {
        let (report_at, forced_at, sent, spared) = (None, None, Vec::new(), Spared::default());
        Stop { why, force_at, report_at, forced_at, signal: SIGTERM, sent, spared }
    }

    pub fn kill(&mut self, rank: &RankProcess) {
        self.send(SIGKILL, std::slice::from_ref(rank));
    }

    /// Sends SIGKILL to these ranks. Returns whether that was done long ago without effect: then nothing more can be done.
    pub fn force<'a>(&mut self, now: Mono, ranks: impl IntoIterator<Item = &'a RankProcess>) -> bool {
        let patience = match self.why {
            StopWhy::Requested => DEATH_WITHIN_REQUESTED,
            _ => DEATH_WITHIN,
        };
        let hopeless = self.forced_at.is_some_and(|forced| now >= forced.after(patience));
        self.spared.ranks.clear();
        self.forced_at.get_or_insert(now);
        self.force_at = now.after(patience);
        self.send(SIGKILL, ranks);
        hopeless
    }

    /// Whether a signal that ended a rank was one of ours.
    pub fn sent(&self, signal: i32) -> bool {
        self.sent.contains(&signal)
    }

    fn send<'a>(&mut self, signal: i32, ranks: impl IntoIterator<Item = &'a RankProcess>) {
        self.sent.push(signal);
        ranks.into_iter().for_each(|rank| rank.signal(signal));
    }
}

/// The result of ending the processes that ranks have left.
#[derive(Clone, Debug, Default)]
pub struct Swept {
    pub killed: u32,
    /// Those that still exist: inside a driver or a file system that hangs.
    pub undying: Vec<Pid>,
}

/// Ends the processes that ranks have left: members of their process groups and cgroup, and orphans that became our
/// children as subreaper. `spared` returns the exceptions: guardian and template, and ranks that stay in their processes.
pub async fn sweep(cgroup: Option<&Cgroup>, spared: impl Fn() -> Vec<Pid>, patience: Span) -> Swept {
    let us = Pid(i32::try_from(std::process::id()).unwrap_or(0));
    let left = || -> Vec<Pid> {
        let mut left = processes::descendants(us);
        left.extend(cgroup.map(Cgroup::members).unwrap_or_default());
        let spared = spared();
        left.retain(|pid| !spared.contains(pid) && processes::is_alive(*pid));
        left.sort_unstable();
        left.dedup();
        left
    };
    let mut remaining = left();
    for pid in &remaining {
        processes::signal(*pid, Signal::SIGTERM);
    }
    // We have no pidfd of orphans: poll a few times, and only while there are any.
    let mut waited = Span::default();
    while !remaining.is_empty() && waited < patience {
        tokio::time::sleep(Duration::from_millis(10)).await;
        waited = waited.plus(Span::millis(10));
        reap_orphans(|pid| !spared().contains(&pid));
        remaining = left();
    }
    let killed = u32::try_from(remaining.len()).unwrap_or(u32::MAX);
    // Most die at once. Poll the rest less and less often: each look goes through all descendants.
    let (killing, mut pause) = (Instant::now(), Duration::from_millis(2));
    while !remaining.is_empty() && killing.elapsed() < KILLED_WITHIN {
        if let Some(cgroup) = cgroup {
            let _ = cgroup.kill();
        }
        for pid in &remaining {
            processes::kill_process(*pid);
        }
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
        reap_orphans(|pid| !spared().contains(&pid));
        remaining = left();
    }
    for pid in &remaining {
        tracing::error!(
            pid = pid.0,
            waits_in = processes::waits_in(*pid),
            "a process did not exit after SIGKILL"
        );
    }
    Swept { killed, undying: remaining }
}

/// Reaps ended orphans. `may_reap` excludes children whose exit status another part of the launcher reads.
pub fn reap_orphans(may_reap: impl Fn(Pid) -> bool) {
    use nix::sys::wait::{Id, WaitPidFlag, waitid};
    let peek = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    while let Ok(status) = waitid(Id::All, peek) {
        match status.pid().map(|pid| Pid(pid.as_raw())) {
            Some(pid) if may_reap(pid) => mainstay_sys::pidfd::reap(pid),
            // The first in the queue is a rank: its own watcher reaps it, and the next call those behind it.
            Some(_) | None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_time_that_the_machine_has_but_for_what_it_takes_to_end_them() {
        let usual = Span::seconds(30);
        let grace = |left| Grace::before_the_machine_goes(usual, left);
        assert_eq!(grace(None), usual);
        assert_eq!(grace(Some(Span::seconds(120))), Span::seconds(115));
        assert_eq!(grace(Some(Span::seconds(10))), Span::seconds(8));
        assert_eq!(grace(Some(Span::default())), Span::default());
        assert_eq!(grace(Some(Span::seconds(86_400))), MAX_TIME_TO_LEAVE);
    }
}

//! Stopping an attempt: the ranks first, in order, then all that they left behind.

use std::time::{Duration, Instant};

use mainstay_core::base::id::Pid;
use mainstay_core::base::time::{Mono, Span};
use mainstay_core::recovery::job::StopWhy;
use nix::libc::{SIGCONT, SIGKILL, SIGTERM};
use nix::sys::signal::Signal;

use crate::act::rank_processes::RankProcess;
use crate::os::cgroup::Cgroup;
use crate::os::processes;

/// How long a stop may take before force is used.
#[derive(Clone, Copy, Debug)]
pub struct Grace {
    /// When the launcher was asked to stop: ranks may want to save.
    pub requested: Span,
    /// After a fault: the ranks can only wait for one that is gone.
    pub fault: Span,
    /// For what ranks leave behind when all are done.
    pub done: Span,
}

/// Of the time that ranks have, so much is kept for those that did not save in time to end by a signal.
const TO_END: Span = Span::seconds(5);

/// A rank that does not end holds up its job's next start: no longer than this, however late the machine goes.
const MOST_TO_LEAVE: Span = Span::seconds(600);

impl Grace {
    fn of(self, why: StopWhy) -> Span {
        match why {
            StopWhy::Requested | StopWhy::Ordered => self.requested,
            StopWhy::Fault | StopWhy::Dismissed => self.fault,
            StopWhy::Done => self.done,
        }
    }

    /// How long a stop may take on a machine that goes when `left` is over: until shortly before that, which may be more or
    /// less than what is usual. Where nobody told when it goes, what is usual.
    pub fn before_the_machine_goes(usual: Span, left: Option<Span>) -> Span {
        left.map_or(usual, |left| Grace::to_save(left).min(MOST_TO_LEAVE))
    }

    /// How long ranks may take to save and end by themselves, of the time that they have in all.
    pub fn to_save(in_all: Span) -> Span {
        in_all.minus(Span(in_all.0 / 5).min(TO_END))
    }
}

/// A process that SIGKILL has not ended by then is inside a driver or a file system that hangs.
const DEATH_WITHIN: Span = Span::seconds(10);

/// What ranks left has to die of SIGKILL within this; what does not counts as undying.
const KILLED_WITHIN: Duration = Duration::from_secs(2);

/// Between two looks at what does not die.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// A stop under way.
#[derive(Debug)]
pub struct Stop {
    /// Why.
    pub why: StopWhy,
    /// When force is used.
    pub force_at: Mono,
    /// When ranks that were asked to save are told to end; none once they were.
    pub report_at: Option<Mono>,
    /// When SIGKILL was first sent to all that still lived.
    forced_at: Option<Mono>,
    /// What they are told to end with.
    signal: i32,
    /// Signals sent so far, to tell our own doing from others'.
    sent: Vec<i32>,
    /// Ranks that are to end by themselves.
    spared: Spared,
}

/// Ranks that are told to end later than the others: they are about to end by themselves, and what they still write is wanted.
#[derive(Clone, Debug, Default)]
pub struct Spared {
    /// Which.
    pub ranks: Vec<Pid>,
    /// Until when.
    pub until: Mono,
    /// When is looked next whether they still have something to write.
    pub look_at: Mono,
}

impl Stop {
    /// Asks all living ranks to end: `signal` if the launcher was told to stop by one, else SIGTERM. Ranks that are
    /// `saving` are told later, and have ended by themselves until then if all goes well.
    pub fn begin(
        now: Mono,
        why: StopWhy,
        grace: Grace,
        signal: i32,
        saving: bool,
        spared: Spared,
        ranks: &[RankProcess],
    ) -> Stop {
        let grace = grace.of(why);
        let signal = if why == StopWhy::Requested { signal } else { SIGTERM };
        let report_at = saving.then(|| now.after(Grace::to_save(grace)));
        let force_at = now.after(grace);
        let mut stop = Stop { why, force_at, report_at, forced_at: None, signal, sent: Vec::new(), spared };
        if !saving {
            stop.report(ranks);
        }
        stop
    }

    /// Leaves no more time than this from now on; less, if it was less.
    pub fn within(&mut self, now: Mono, span: Span) {
        self.force_at = self.force_at.min(now.after(span));
        self.report_at = self.report_at.map(|at| at.min(now.after(Grace::to_save(span))));
    }

    /// Tells the ranks to end.
    pub fn report(&mut self, ranks: &[RankProcess]) {
        self.report_at = None;
        let spared = self.spared.ranks.clone();
        self.tell_those(ranks.iter().filter(|rank| !spared.contains(&rank.pid)));
    }

    fn tell_those<'a>(&mut self, ranks: impl Iterator<Item = &'a RankProcess> + Clone) {
        self.send(self.signal, ranks.clone());
        // A rank that was stopped would only take the signal when it goes on.
        self.send(SIGCONT, ranks);
    }

    /// When is looked next at ranks that are spared; none if there are none.
    pub fn look_at(&self) -> Option<Mono> {
        (!self.spared.ranks.is_empty()).then_some(self.spared.look_at)
    }

    /// Whether a rank was not told to end so far.
    pub fn spares(&self, pid: Pid) -> bool {
        self.spared.ranks.contains(&pid)
    }

    /// Spares only these of the spared ranks until `look_at`, and tells the others to end. All are told once their time is over.
    pub fn spare_only(&mut self, still: &[Pid], look_at: Mono, now: Mono, ranks: &[RankProcess]) {
        let over = now >= self.spared.until;
        let before = self.spared.ranks.clone();
        self.spared.ranks.retain(|pid| !over && still.contains(pid));
        self.spared.look_at = look_at;
        let spared = self.spared.ranks.clone();
        let reported = |rank: &&RankProcess| before.contains(&rank.pid) && !spared.contains(&rank.pid);
        self.tell_those(ranks.iter().filter(reported));
    }

    /// Gives ranks that can leave the attempt in their processes the time to do so; nothing is sent.
    pub fn gather(now: Mono, grace: Grace) -> Stop {
        let (why, force_at) = (StopWhy::Fault, now.after(grace.of(StopWhy::Fault)));
        Stop {
            why,
            force_at,
            report_at: None,
            forced_at: None,
            signal: SIGTERM,
            sent: Vec::new(),
            spared: Spared::default(),
        }
    }

    /// Uses force on one rank.
    pub fn kill(&mut self, rank: &RankProcess) {
        self.send(SIGKILL, std::slice::from_ref(rank));
    }

    /// Uses force on these ranks. Whether that was done long ago already, and to no avail: then nothing more can be done to them.
    pub fn force<'a>(&mut self, now: Mono, ranks: impl IntoIterator<Item = &'a RankProcess>) -> bool {
        let hopeless = self.forced_at.is_some_and(|forced| now >= forced.after(DEATH_WITHIN));
        self.spared.ranks.clear();
        self.forced_at.get_or_insert(now);
        self.force_at = now.after(DEATH_WITHIN);
        self.send(SIGKILL, ranks);
        hopeless
    }

    /// Whether a signal that ended a rank was one of ours.
    pub fn sent(&self, signal: i32) -> bool {
        self.sent.contains(&signal)
    }

    fn send<'a>(&mut self, signal: i32, ranks: impl IntoIterator<Item = &'a RankProcess>) {
        self.sent.push(signal);
        for rank in ranks.into_iter().filter(|rank| rank.exit.is_none()) {
            if let Err(error) = rank.pidfd.signal(signal) {
                tracing::error!(rank = rank.rank.0, signal, %error, "could not signal a rank");
            }
        }
    }
}

/// What came of ending what ranks have left.
#[derive(Clone, Debug, Default)]
pub struct Swept {
    /// How many had to be killed.
    pub killed: u32,
    /// Those that are still there: inside a driver or a file system that hangs.
    pub undying: Vec<Pid>,
}

/// Ends what ranks that are gone have left: members of their process groups and cgroup, and orphans that came to
/// us as subreaper. `spared` names what is not of it: guardian and template, and ranks that stay in their processes.
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
    // Orphans have no pidfd of ours; what is left is looked for a few times, and only while there is something.
    let mut waited = Span::default();
    while !remaining.is_empty() && waited < patience {
        tokio::time::sleep(Duration::from_millis(10)).await;
        waited = waited.plus(Span::millis(10));
        reap_orphans(|pid| !spared().contains(&pid));
        remaining = left();
    }
    let killed = u32::try_from(remaining.len()).unwrap_or(u32::MAX);
    // Most die at once. What does not is looked for less and less often: each look goes through all descendants.
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
            "a process does not die of SIGKILL"
        );
    }
    Swept { killed, undying: remaining }
}

/// Takes ended orphans off the process table. `may_reap` spares children whose end somebody else will ask for.
pub fn reap_orphans(may_reap: impl Fn(Pid) -> bool) {
    use nix::sys::wait::{Id, WaitPidFlag, waitid};
    let peek = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    while let Ok(status) = waitid(Id::All, peek) {
        match status.pid().map(|pid| Pid(pid.as_raw())) {
            Some(pid) if may_reap(pid) => crate::os::pidfd::reap(pid),
            // The first in line is a rank: its own watcher comes for it, and for those behind it the next call.
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
        let of = |left| Grace::before_the_machine_goes(usual, left);
        assert_eq!(of(None), usual);
        assert_eq!(of(Some(Span::seconds(120))), Span::seconds(115));
        assert_eq!(of(Some(Span::seconds(10))), Span::seconds(8));
        assert_eq!(of(Some(Span::default())), Span::default());
        assert_eq!(of(Some(Span::seconds(86_400))), MOST_TO_LEAVE);
    }
}

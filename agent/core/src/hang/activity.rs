//! What a rank's processes do while no counter moves: the difference between a rank that is dead still and one that
//! is at something long that nobody announced.

use serde::{Deserialize, Serialize};

use crate::base::time::{Mono, Span};

/// A rank's process and its children at one time, as the kernel counts. All counts only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// When it was read.
    pub at: Mono,
    /// The state of the rank's own process.
    pub state: ProcessState,
    /// CPU time used by all threads of the rank's processes.
    pub cpu: Span,
    /// One of the processes ran or waited for a CPU: one that is kept from it by others is not dead still.
    pub runnable: bool,
    /// Bytes read and written by system calls.
    pub bytes: u64,
    /// Pages touched for the first time, or fetched from disk.
    pub faults: u64,
    /// Processes of the rank.
    pub processes: u32,
    /// One of them holds an accelerator, or cannot be asked: what that does is not seen in its process.
    pub holds_device: bool,
}

/// The state of a process, or of the thread of it that stands out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessState {
    /// It sleeps or runs.
    #[default]
    Normal,
    /// Stopped by a signal.
    Stopped,
    /// Held by a debugger.
    Traced,
    /// It waits for a device or a file system: in uninterruptible sleep, or for an answer of FUSE.
    Uninterruptible,
}

/// What a rank's processes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activity {
    /// Next to nothing.
    Still,
    /// It uses CPU time and does nothing else: a loop, or a wait that spins.
    Spinning,
    /// It reads, writes, touches new memory.
    Working,
}

/// CPU time below this share of one core is what idle threads of a hung process use.
const STILL: f64 = 0.01;
/// A rank that used so much of a core all the time computes by itself.
const HALF_A_CORE: f64 = 0.5;
/// Bytes a second below which system calls are somebody's idle chatter.
const CHATTER: f64 = 4096.0;
/// New pages a second below which a process only spins.
const FEW_FAULTS: f64 = 20.0;
/// The shortest time between two probes from which anything can be told.
const APART: Span = Span::millis(700);
/// How long a probe is of interest.
const KEPT: Span = Span::millis(2500);

/// The last probes of a rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct Probes {
    kept: Vec<Probe>,
}

impl Probes {
    pub(crate) fn add(&mut self, probe: Probe) {
        self.kept.retain(|old| probe.at.since(old.at) <= KEPT && old.at < probe.at);
        self.kept.push(probe);
    }

    pub(crate) fn clear(&mut self) {
        self.kept.clear();
    }

    /// The state at the last probe.
    pub(crate) fn state(&self) -> ProcessState {
        let mut newest = self.kept.iter().rev().map(|probe| probe.state);
        match (newest.next(), newest.next()) {
            // A disk is waited for now and then; only who is found so twice is stuck there.
            (Some(ProcessState::Uninterruptible), before)
                if before != Some(ProcessState::Uninterruptible) =>
            {
                ProcessState::Normal
            }
            (Some(state), _) => state,
            (None, _) => ProcessState::Normal,
        }
    }

    /// Whether whatever the rank does for its steps is seen in its processes: it holds no accelerator, and used at least half a core
    /// from when it began until nothing moved any more, be it by work or by waiting.
    pub(crate) fn works_in_the_open(&self, began: Mono, moved: Mono) -> bool {
        let Some(last) = self.kept.last() else { return false };
        !last.holds_device && last.cpu.as_seconds() >= HALF_A_CORE * moved.since(began).as_seconds()
    }

    /// What the rank did since the earliest probe that is kept; none if the probes are too close to tell.
    pub(crate) fn activity(&self) -> Option<Activity> {
        let (first, last) = (self.kept.first()?, self.kept.last()?);
        if last.at.since(first.at) < APART {
            return None;
        }
        // Two of the probes; one may have hit upon a thread that wakes now and then.
        let runs = self.kept.iter().filter(|probe| probe.runnable).count() > 1;
        match between(first, last)? {
            Activity::Still if runs => Some(Activity::Spinning),
            activity => Some(activity),
        }
    }
}

/// What a rank's processes did between two probes; none if there is no time between them.
pub(crate) fn between(first: &Probe, last: &Probe) -> Option<Activity> {
    let seconds = last.at.since(first.at).as_seconds();
    if seconds <= 0.0 {
        return None;
    }
    let per_second = |from: u64, to: u64| to.saturating_sub(from) as f64 / seconds;
    let bytes = per_second(first.bytes, last.bytes);
    let faults = per_second(first.faults, last.faults);
    if bytes >= CHATTER || faults >= FEW_FAULTS || first.processes != last.processes {
        return Some(Activity::Working);
    }
    let cpu = last.cpu.minus(first.cpu).as_seconds() / seconds;
    Some(if cpu >= STILL { Activity::Spinning } else { Activity::Still })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activity(cpu: u64, bytes: u64, faults: u64) -> Option<Activity> {
        let mut probes = Probes::default();
        let first =
            Probe { at: Mono(Span::seconds(5).0), cpu: Span::seconds(9), bytes: 77, ..Probe::default() };
        probes.add(first);
        probes.add(Probe {
            at: first.at.after(Span::seconds(1)),
            cpu: first.cpu.plus(Span::millis(cpu)),
            bytes: first.bytes + bytes,
            faults,
            ..first
        });
        probes.activity()
    }

    #[test]
    fn idle_threads_are_no_work_and_a_loop_is_not_either() {
        assert_eq!(activity(2, 100, 0), Some(Activity::Still));
        assert_eq!(activity(990, 100, 1), Some(Activity::Spinning));
        assert_eq!(activity(2, 1 << 20, 0), Some(Activity::Working));
        assert_eq!(activity(300, 0, 500), Some(Activity::Working));
    }

    #[test]
    fn one_look_tells_nothing() {
        let mut probes = Probes::default();
        probes.add(Probe { at: Mono(1), ..Probe::default() });
        assert_eq!(probes.activity(), None);
    }
}

//! What a rank's processes do while no counter moves. Distinguishes a rank that does nothing from one that does long
//! work that it did not announce.

use serde::{Deserialize, Serialize};

use mainstay_model::time::{Mono, Span};

/// Kernel counters of a rank's process and its children at one time. All counts only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// When it was read.
    pub at: Mono,
    /// The state of the rank's own process.
    pub state: ProcessState,
    /// CPU time used by all threads of the rank's processes.
    pub cpu: Span,
    /// At least one process ran or waited for a CPU. A process that waits for a CPU is not idle.
    pub runnable: bool,
    /// Bytes read and written by system calls.
    pub bytes: u64,
    /// Pages touched for the first time, or fetched from disk.
    pub faults: u64,
    /// Processes of the rank.
    pub processes: u32,
    /// At least one process holds an accelerator, or this is unknown. Work on a device does not show in the process.
    pub holds_device: bool,
}

/// The state of a process, or of its most conspicuous thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessState {
    /// It sleeps or runs.
    #[default]
    Normal,
    /// Stopped by a signal.
    Stopped,
    /// Stopped by a debugger.
    Traced,
    /// In uninterruptible sleep (device or file system), or waiting for an answer of FUSE.
    Uninterruptible,
}

/// What a rank's processes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activity {
    /// Almost nothing.
    Still,
    /// It uses CPU time and does nothing else: a loop, or a wait that spins.
    Spinning,
    /// It reads, writes, touches new memory.
    Working,
}

/// Idle threads of a hung process use less than this share of one core.
const STILL: f64 = 0.01;
/// A rank that uses at least this share of a core all the time computes on the CPU.
const HALF_A_CORE: f64 = 0.5;
/// System calls that move fewer bytes per second are background noise.
const CHATTER: f64 = 4096.0;
/// A process that touches fewer new pages per second only spins.
const FEW_FAULTS: f64 = 20.0;
/// Two probes must be at least this far apart to be compared.
const MIN_PROBE_DISTANCE: Span = Span::millis(700);
/// Probes older than this are dropped.
const MAX_PROBE_AGE: Span = Span::millis(2500);

/// The last probes of a rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct Probes {
    kept: Vec<Probe>,
}

impl Probes {
    pub(crate) fn add(&mut self, probe: Probe) {
        self.kept.retain(|old| probe.at.since(old.at) <= MAX_PROBE_AGE && old.at < probe.at);
        self.kept.push(probe);
    }

    pub(crate) fn clear(&mut self) {
        self.kept.clear();
    }

    /// The state at the last probe.
    pub(crate) fn state(&self) -> ProcessState {
        let mut newest = self.kept.iter().rev().map(|probe| probe.state);
        match (newest.next(), newest.next()) {
            // Any process waits for a disk now and then. It is stuck only if two probes in a row show it.
            (Some(ProcessState::Uninterruptible), before)
                if before != Some(ProcessState::Uninterruptible) =>
            {
                ProcessState::Normal
            }
            (Some(state), _) => state,
            (None, _) => ProcessState::Normal,
        }
    }

    /// Whether the rank's work shows in its processes: it holds no accelerator, and used at least half a core from
    /// its start until nothing moved any more, by computing or by spinning.
    pub(crate) fn works_in_the_open(&self, began: Mono, moved: Mono) -> bool {
        let Some(last) = self.kept.last() else { return false };
        !last.holds_device && last.cpu.as_seconds() >= HALF_A_CORE * moved.since(began).as_seconds()
    }

    /// What the rank did since the oldest probe that is kept. `None` if the probes are too close together.
    pub(crate) fn activity(&self) -> Option<Activity> {
        let (first, last) = (self.kept.first()?, self.kept.last()?);
        if last.at.since(first.at) < MIN_PROBE_DISTANCE {
            return None;
        }
        // At least two probes: a single one may catch a thread that wakes up now and then.
        let runs = self.kept.iter().filter(|probe| probe.runnable).count() > 1;
        match between(first, last)? {
            Activity::Still if runs => Some(Activity::Spinning),
            activity => Some(activity),
        }
    }
}

/// What a rank's processes did between two probes. `None` if both have the same time.
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
    fn idle_threads_are_still_and_a_loop_is_spinning() {
        assert_eq!(activity(2, 100, 0), Some(Activity::Still));
        assert_eq!(activity(990, 100, 1), Some(Activity::Spinning));
        assert_eq!(activity(2, 1 << 20, 0), Some(Activity::Working));
        assert_eq!(activity(300, 0, 500), Some(Activity::Working));
    }

    #[test]
    fn one_probe_shows_no_activity() {
        let mut probes = Probes::default();
        probes.add(Probe { at: Mono(1), ..Probe::default() });
        assert_eq!(probes.activity(), None);
    }
}

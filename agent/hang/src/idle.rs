//! Judges jobs whose ranks send no heartbeats by the activity of their processes: CPU time, reading and writing, new
//! memory, processes that start and end, output. That is weaker evidence than steps, so the limits are long, and each
//! verdict states it.
//!
//! Idleness alone is no fault. A job is judged only if it worked nearly all its life, and only after a rest that is
//! much longer than any before. A program that sleeps by design or waits for requests is never judged.

mod devices;
mod findings;

use crate::activity::{Activity, Probe, ProcessState, between};
use crate::finding::HangStatus;
use mainstay_model::hang::{Waits, listed};
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};

use devices::Devices;

/// A rest is unusual if it is this many times as long as the longest before.
const BEYOND: u64 = 5;
/// A job counts as one that always works if it rested for at most one part in this many of its life.
const MIN_WORK_TO_REST: u64 = 10;
/// The limit is multiplied by this if work that is not visible here may be in progress.
const UNSEEN: u64 = 3;
/// Output, I/O or new memory must have occurred this often before its absence means anything.
const REGULAR: u32 = 20;
/// Bytes per second on the host's network that may belong to the job.
const NETWORK: f64 = 1e6;

/// The activity of a rank's processes at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivitySample {
    /// The kernel's counters.
    pub probe: Probe,
    /// Bytes of output so far.
    pub output: u64,
    /// Bytes that the network of its namespace has carried so far, in both directions.
    pub network: u64,
}

/// The last state of a rank.
#[derive(Clone, Copy, Debug, Default)]
struct RankState {
    pulse: Option<ActivitySample>,
    activity: Option<Activity>,
    /// Since when a signal stops it.
    stopped: Option<Mono>,
    /// Since when it waits for a device or a file system.
    blocked: Option<Mono>,
}

/// The judge of a job without heartbeats.
#[derive(Clone, Debug)]
pub struct Idle {
    first_rank: u32,
    /// The shortest rest that counts as a hang.
    floor: Span,
    ranks: Vec<RankState>,
    looked: Option<Mono>,
    /// When any rank last worked, and when one last did more than use CPU time.
    active: Mono,
    worked: Mono,
    at_work: Span,
    rested: Span,
    longest: Span,
    /// How often more than CPU time was seen, and the longest time between two such signs.
    signs: u32,
    gap: Span,
    network: f64,
    devices: Devices,
    /// When NCCL was last asked, and its answers since nothing but CPU time is seen.
    asked: Option<Mono>,
    collectives: Option<Collectives>,
}

/// An answer of NCCL's RAS service about the ranks' collectives, unchanged for some time.
#[derive(Clone, Debug)]
struct Collectives {
    counts: String,
    waits: Waits,
    since: Mono,
    last: Mono,
}

impl Idle {
    /// The judge of a job of `ranks` ranks, of which the first has the number `first_rank`.
    pub fn new(floor: Span, first_rank: Rank, ranks: usize) -> Idle {
        Idle {
            first_rank: first_rank.0,
            floor,
            ranks: vec![RankState::default(); ranks],
            looked: None,
            active: Mono::default(),
            worked: Mono::default(),
            at_work: Span::default(),
            rested: Span::default(),
            longest: Span::default(),
            signs: 0,
            gap: Span::default(),
            network: 0.0,
            devices: Devices::default(),
            asked: None,
            collectives: None,
        }
    }

    /// Starts a new attempt: new processes. What was learned about the job is kept.
    pub fn begin_attempt(&mut self) {
        self.ranks.fill(RankState::default());
        self.looked = None;
        self.collectives = None;
        self.devices.forget_the_present();
    }

    /// Records how long all devices that the ranks hold have been idle, as their driver or libtpu reports; zero while
    /// one has work. Call it repeatedly: a report older than 30 seconds does not count.
    pub fn devices(&mut self, now: Mono, idle: Span) {
        self.devices.take(now, idle);
    }

    /// Whether the caller should ask NCCL how far the ranks are. True rarely, and only while the ranks do nothing but
    /// use CPU time, because each query involves all processes of the job. A returned `true` counts as asked.
    pub fn wants_collectives(&mut self, now: Mono) -> bool {
        let due = self.looked.is_some()
            && now.since(self.worked) >= Span(self.floor.0 / 2)
            && self.asked.is_none_or(|asked| now.since(asked) >= Span(self.floor.0 / 4));
        if due {
            self.asked = Some(now);
        }
        due
    }

    /// Records NCCL's answer: all counts as text, and which ranks the others wait for.
    pub fn collectives(&mut self, now: Mono, counts: String, waits: Waits) {
        match &mut self.collectives {
            Some(known) if known.counts == counts => known.last = now,
            known => *known = Some(Collectives { counts, waits, since: now, last: now }),
        }
    }

    /// The longest rest that ended by itself.
    pub fn longest_rest(&self) -> Span {
        self.longest
    }

    /// Records the longest rest of earlier runs of the job.
    pub fn recall(&mut self, rest: Span) {
        self.longest = self.longest.max(rest);
    }

    /// The interval between looks.
    pub fn interval(&self) -> Span {
        Span(self.floor.0 / 20).max(Span::millis(200)).min(Span::seconds(5))
    }

    /// Whether it is time for the next look.
    pub fn wants_look(&self, now: Mono) -> bool {
        self.looked.is_none_or(|looked| now.since(looked) >= self.interval())
    }

    /// When any rank was last at work.
    pub fn last_active(&self) -> Mono {
        self.active
    }

    /// Records a look at the ranks (`None` for those that have ended) and judges. `unseen` returns whether the ranks
    /// may be working where it is not visible, on a device. It is called only when that matters.
    pub fn look(
        &mut self,
        now: Mono,
        pulses: &[Option<ActivitySample>],
        unseen: impl FnOnce() -> bool,
    ) -> HangStatus {
        let before = self.looked.replace(now);
        let Some(before) = before.filter(|before| now.since(*before) <= self.held_up()) else {
            self.begin(now, pulses);
            return HangStatus::Progressing;
        };
        self.take(before, now, pulses);
        if self.ranks.iter().any(|seen| seen.state() == Some(ProcessState::Traced)) {
            (self.active, self.worked) = (now, now);
            return HangStatus::Progressing;
        }
        // Devices that are known to be idle are not unseen work.
        let unseen = || self.devices.rest(now).is_none_or(|rest| rest < self.interval()) && unseen();
        let known = self.stopped(now).or_else(|| self.waits_in_collectives(now));
        let outlook =
            known.or_else(|| self.devices_rest(now)).unwrap_or_else(|| match now.since(self.active) {
                Span(0) => self.only_spins(now),
                rest => self.rests(now, rest, unseen),
            });
        match outlook {
            HangStatus::Confirmed(_) => outlook,
            // This is more specific than that nothing moves.
            _ => self.stopped_of_late(now).unwrap_or(outlook),
        }
    }

    /// A look later than this means that the launcher was held up itself, and perhaps the ranks with it.
    fn held_up(&self) -> Span {
        Span(self.interval().0.saturating_mul(3)).plus(Span::seconds(1))
    }

    fn begin(&mut self, now: Mono, pulses: &[Option<ActivitySample>]) {
        (self.active, self.worked) = (now, now);
        for (seen, pulse) in self.ranks.iter_mut().zip(pulses) {
            *seen = RankState { pulse: *pulse, ..RankState::default() };
        }
    }

    fn take(&mut self, before: Mono, now: Mono, pulses: &[Option<ActivitySample>]) {
        let seconds = now.since(before).as_seconds();
        let (mut active, mut worked) = (false, false);
        self.network = 0.0;
        for (seen, pulse) in self.ranks.iter_mut().zip(pulses) {
            let ended = seen.pulse.is_some() && pulse.is_none();
            seen.activity = match (&seen.pulse, pulse) {
                (Some(first), Some(last)) if last.output != first.output => Some(Activity::Working),
                (Some(first), Some(last)) => between(&first.probe, &last.probe),
                _ => None,
            };
            if let (Some(first), Some(last)) = (&seen.pulse, pulse) {
                let carried = last.network.saturating_sub(first.network) as f64 / seconds.max(1e-3);
                self.network = self.network.max(carried);
            }
            active |= ended || !matches!(seen.activity, None | Some(Activity::Still));
            worked |= ended || seen.activity == Some(Activity::Working);
            seen.pulse = *pulse;
            seen.stopped = match seen.state() {
                Some(ProcessState::Stopped) => seen.stopped.or(Some(now)),
                _ => None,
            };
            seen.blocked = match seen.state() {
                Some(ProcessState::Uninterruptible) => seen.blocked.or(Some(now)),
                _ => None,
            };
        }
        if active {
            let rest = before.since(self.active);
            self.rested = self.rested.plus(rest);
            self.longest = self.longest.max(rest);
            self.at_work = self.at_work.plus(now.since(before));
            self.active = now;
        }
        if worked {
            self.gap = self.gap.max(now.since(self.worked));
            self.signs = self.signs.saturating_add(1);
            self.worked = now;
        }
    }

    fn lives(&self, rank: usize) -> bool {
        self.ranks[rank].pulse.is_some()
    }

    fn numbers(&self, ranks: &[usize]) -> Vec<Rank> {
        let number =
            |rank: &usize| Rank(self.first_rank.saturating_add(u32::try_from(*rank).unwrap_or(u32::MAX)));
        ranks.iter().map(number).collect()
    }

    fn named(&self, ranks: &[usize]) -> String {
        listed(&self.numbers(ranks))
    }
}

fn now_minus(now: Mono, span: Span) -> Mono {
    Mono(now.0.saturating_sub(span.0))
}

impl RankState {
    fn state(&self) -> Option<ProcessState> {
        self.pulse.map(|pulse| pulse.probe.state)
    }
}

#[cfg(test)]
mod tests;

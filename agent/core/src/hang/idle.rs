//! Judges jobs whose ranks send no heartbeats by the activity of their processes: CPU time, reading and writing, new
//! memory, processes that start and end, output. That is weaker evidence than steps, so the limits are long, and each
//! verdict states it.
//!
//! Idleness alone is no fault. A job is judged only if it worked nearly all its life, and only after a rest that is
//! much longer than any before. A program that sleeps by design or waits for requests is never judged.

mod devices;

use crate::base::id::Rank;
use crate::base::time::{Mono, Span};
use crate::hang::activity::{Activity, Probe, ProcessState, between};
use crate::hang::finding::{HangStatus, Suspicion};
use crate::model::hang::Waits;
use crate::model::hang::{ACTIVITY, Hang, HangKind, listed};

use devices::Devices;

/// A rest is unusual if it is this many times as long as the longest before.
const BEYOND: u64 = 5;
/// A job counts as one that always works if it rested for at most one part in this many of its life.
const SELDOM: u64 = 10;
/// Ranks that a signal stopped are reported after this fraction (one part in this many) of the time after which they
/// count as hung.
const STOPPED_REPORTED: u64 = 10;
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
struct Seen {
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
    ranks: Vec<Seen>,
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
            ranks: vec![Seen::default(); ranks],
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
        self.ranks.fill(Seen::default());
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
            *seen = Seen { pulse: *pulse, ..Seen::default() };
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

    /// Ranks that a signal stopped. Such a rest is not the program's own.
    fn stopped(&self, now: Mono) -> Option<HangStatus> {
        let (culprits, since) = self.stopped_for(now, self.floor)?;
        let reported = format!("{} in state T (stopped) for {}", self.named(&culprits), now.since(since));
        Some(self.hang(now, HangKind::Stopped, &culprits, since, self.floor, 0.9, reported))
    }

    /// Ranks that a signal stopped too recently to count as hung.
    fn stopped_of_late(&self, now: Mono) -> Option<HangStatus> {
        let (ranks, since) = self.stopped_for(now, Span(self.floor.0 / STOPPED_REPORTED))?;
        let why = "a signal stopped them".to_owned();
        Some(HangStatus::Stopped(Suspicion { ranks: self.numbers(&ranks), since, limit: self.floor, why }))
    }

    /// Ranks that have been stopped for at least `span`, and since when.
    fn stopped_for(&self, now: Mono, span: Span) -> Option<(Vec<usize>, Mono)> {
        let stopped = |rank: &usize| self.ranks[*rank].stopped.is_some_and(|at| now.since(at) >= span);
        let ranks: Vec<usize> = (0..self.ranks.len()).filter(stopped).collect();
        let since = ranks.iter().filter_map(|rank| self.ranks[*rank].stopped).min()?;
        Some((ranks, since))
    }

    /// Ranks do nothing but use CPU time, and NCCL's counters show that some wait for others, always the same ones.
    fn waits_in_collectives(&self, now: Mono) -> Option<HangStatus> {
        let Collectives { waits, since, last, .. } = self.collectives.as_ref()?;
        let limit = self.floor.max(Span(self.gap.0.saturating_mul(BEYOND)));
        let all_the_while = *since >= self.worked && last.since(*since) >= limit;
        if !all_the_while || now.since(*last) >= Span(self.floor.0 / 2) {
            return None;
        }
        let place = |rank: &Rank| rank.0.checked_sub(self.first_rank).map(|place| place as usize);
        let culprits: Vec<usize> = waits.culprits.iter().filter_map(place).collect();
        let kind = waits.kind.unwrap_or(HangKind::UserCode);
        let reported = format!("{}, and no counter of NCCL moved for {}", waits.reported, last.since(*since));
        Some(self.hang(now, kind, &culprits, self.worked, limit, 0.7, reported))
    }

    /// The devices always had work and are now idle, and the processes do nothing but use CPU time.
    fn devices_rest(&self, now: Mono) -> Option<HangStatus> {
        let rest = self.devices.rest(now)?;
        let limit = self.floor.max(Span(self.devices.longest().0.saturating_mul(BEYOND)));
        let out_of_the_ordinary = rest >= limit && now.since(self.worked) >= limit;
        if !out_of_the_ordinary || !self.devices.usually_work(Span(self.floor.0 / 2), SELDOM) {
            return None;
        }
        let reported = format!(
            "no device of the job has had work for {rest}, and its processes read, wrote and printed nothing in that time"
        );
        Some(self.hang(now, HangKind::AllStill, &[], now_minus(now, rest), limit, 0.6, reported))
    }

    /// No process of the job does anything.
    fn rests(&self, now: Mono, rest: Span, unseen: impl FnOnce() -> bool) -> HangStatus {
        let usual = self.floor.max(Span(self.longest.0.saturating_mul(BEYOND)));
        let long_enough = self.at_work >= Span(self.floor.0 / 2);
        let at_work = long_enough
            && self.rested.0.saturating_mul(SELDOM) <= self.at_work.0.saturating_add(self.rested.0);
        // Nothing is known about a rank whose processes cannot be read.
        let known = self.ranks.iter().all(|seen| seen.pulse.is_none() || seen.activity.is_some());
        // No program waits for a file system by design, even if it worked only briefly before.
        let blocked = self
            .ranks
            .iter()
            .filter_map(|seen| seen.blocked)
            .any(|since| since <= self.active.after(self.held_up()));
        if !known || rest < Span(usual.0 / 2) {
            return HangStatus::Progressing;
        }
        if !(at_work || blocked) {
            return if long_enough { HangStatus::Progressing } else { self.rests_since_early(rest, usual) };
        }
        let (limit, why) = if !at_work {
            (Span(usual.0.saturating_mul(UNSEEN)), "it has waited for a file system since it started")
        } else if self.network >= NETWORK {
            (
                Span(usual.0.saturating_mul(UNSEEN)),
                "this host's network carries data that may belong to the job",
            )
        } else if unseen() {
            (Span(usual.0.saturating_mul(UNSEEN)), "it holds a device whose work is not seen from here")
        } else {
            (usual, "it sends no heartbeats and was idle before")
        };
        if rest < limit {
            let why = why.to_owned();
            return HangStatus::Pending(Suspicion { ranks: Vec::new(), since: self.active, limit, why });
        }
        let asleep = |rank: &usize| self.ranks[*rank].state() == Some(ProcessState::Uninterruptible);
        let living: Vec<usize> = (0..self.ranks.len()).filter(|rank| self.lives(*rank)).collect();
        let in_disk_sleep: Vec<usize> = living.iter().copied().filter(asleep).collect();
        let reported = format!(
            "no process of {} used CPU time, read, wrote, touched new memory or printed anything for {rest}",
            self.named(&living)
        );
        match (in_disk_sleep.len(), living.as_slice()) {
            (1.., _) => {
                self.hang(now, HangKind::BlockedIo, &in_disk_sleep, self.active, limit, 0.6, reported)
            }
            (0, [only]) => self.hang(now, HangKind::AllStill, &[*only], self.active, limit, 0.6, reported),
            (0, _) => self.hang(now, HangKind::AllStill, &[], self.active, limit, 0.4, reported),
        }
    }

    /// The job does nothing, and worked too briefly before to show that it always works: a hang early in the run, or
    /// a program that waits by design. It is reported and never acted on.
    fn rests_since_early(&self, rest: Span, usual: Span) -> HangStatus {
        let limit = Span(usual.0.saturating_mul(UNSEEN));
        if self.at_work == Span::default() || rest < limit {
            return HangStatus::Progressing;
        }
        let living: Vec<usize> = (0..self.ranks.len()).filter(|rank| self.lives(*rank)).collect();
        let why = format!(
            "no process of {} has done anything, and before that the job was active for {} only; without heartbeats this looks \
             the same as a program that waits",
            self.named(&living),
            self.at_work
        );
        HangStatus::Suspected(Suspicion { ranks: self.numbers(&living), since: self.active, limit, why })
    }

    /// For much longer than ever before, CPU time is used and nothing else happens: a loop, a wait that spins, or
    /// work that looks like it. It is reported and never acted on.
    fn only_spins(&self, now: Mono) -> HangStatus {
        let quiet = now.since(self.worked);
        let limit = Span(self.floor.0.max(self.gap.0.saturating_mul(2)).saturating_mul(UNSEEN));
        if self.signs < REGULAR || quiet < limit {
            return HangStatus::Progressing;
        }
        let of = |activity| {
            let is = move |rank: &usize| self.ranks[*rank].activity == Some(activity);
            (0..self.ranks.len()).filter(is).collect::<Vec<usize>>()
        };
        let (still, spinning) = (of(Activity::Still), of(Activity::Spinning));
        let (few, does) = if still.len() <= spinning.len() && !still.is_empty() {
            (still, "does nothing while others use CPU time")
        } else {
            (spinning, "uses CPU time and does nothing else")
        };
        let why = format!(
            "{} {does}, and nothing was put out or read meanwhile; without heartbeats this looks the same as work",
            self.named(&few)
        );
        HangStatus::Suspected(Suspicion { ranks: self.numbers(&few), since: self.worked, limit, why })
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one record, from its makers")]
    fn hang(
        &self,
        now: Mono,
        kind: HangKind,
        culprits: &[usize],
        since: Mono,
        limit: Span,
        confidence: f64,
        reported: String,
    ) -> HangStatus {
        let victims = (0..self.ranks.len()).filter(|rank| self.lives(*rank) && !culprits.contains(rank));
        let victims: Vec<usize> = victims.collect();
        let evidence = vec![
            reported,
            format!(
                "before, the job was active for {}, and its longest idle period was {}: the limit is {limit}",
                self.at_work, self.longest
            ),
            "the job sends no heartbeats: this is based on the activity of its processes, which is weaker evidence"
                .to_owned(),
        ];
        HangStatus::Confirmed(Box::new(Hang {
            kind,
            culprits: self.numbers(culprits),
            victims: self.numbers(&victims),
            since,
            confirmed: now,
            phase: ACTIVITY.to_owned(),
            limit,
            step: None,
            confidence,
            evidence,
        }))
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

impl Seen {
    fn state(&self) -> Option<ProcessState> {
        self.pulse.map(|pulse| pulse.probe.state)
    }
}

#[cfg(test)]
mod tests;

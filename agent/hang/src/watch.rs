//! The judge of hangs of one job.
//!
//! There are two stages, both counted from the last time that anything in the job moved. Suspicion: the ranks that
//! all others wait for take longer than usual in this job. Confirmation: no counter of any rank moved for a while,
//! two snapshots name the same ranks, and the processes of these ranks do not work. `patience` decides how long to
//! wait, `verdict` writes the conclusion.

mod patience;
mod verdict;

use crate::activity::{Activity, Probe, Probes, ProcessState};
use crate::counters::{Count, Counters};
use crate::finding::{HangStatus, STOPPED_LIMIT, Suspicion};
use crate::locate::Suspects;
use crate::phase::{Limits, PhaseId, Phases};
use crate::rank::{Life, RankSample, RankState};
use mainstay_model::hang::{Hang, HangKind, listed};
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};

/// When nothing has moved for this long, the processes are probed too.
const PROBE_AFTER: Span = Span::millis(400);
/// Probes start this long before the earliest confirmation.
const PROBED_BEFORE: Span = Span::millis(1400);
const PROBES_APART: Span = Span::millis(340);
/// A judge that did not look for this long was held up itself, and perhaps the ranks with it. Its clock restarts.
const HELD_UP: Span = Span::seconds(1);

/// The judge. Ranks are given by their index, from 0, in the order of their numbers.
#[derive(Clone, Debug)]
pub struct Watch {
    first_rank: u32,
    pub(crate) phases: Phases,
    pub(crate) ranks: Vec<RankState>,
    pub(crate) counters: Counters,
    /// The host of each rank; empty if all are on one host, or if unknown.
    hosts: Vec<u32>,
    probes: Vec<Probes>,
    probed: bool,
    probed_at: Mono,
    /// When the ranks' devices, which had work, were first reported idle.
    devices_rest: Option<Mono>,
    began: Mono,
    looked: Mono,
    /// When anything last moved.
    pub(crate) moved: Mono,
    /// When a step or a collective was last completed, or a phase that may take long was last open.
    completed: Mono,
    /// Whether the last look saw a rank whose steps are known only because it prints them.
    has_printed: bool,
    /// Anything before this time does not count.
    restarted: Mono,
    first: Option<(Mono, Vec<u32>)>,
    beats_then: Option<(Mono, Vec<u64>)>,
}

impl Watch {
    /// The judge of a job of `ranks` ranks, of which the first has the number `first_rank`.
    pub fn new(limits: Limits, first_rank: Rank, ranks: usize, now: Mono) -> Watch {
        let mut watch = Watch {
            first_rank: first_rank.0,
            phases: Phases::new(limits),
            ranks: Vec::new(),
            counters: Counters::default(),
            hosts: Vec::new(),
            probes: Vec::new(),
            probed: false,
            probed_at: Mono::default(),
            devices_rest: None,
            began: now,
            looked: now,
            moved: now,
            completed: now,
            has_printed: false,
            restarted: now,
            first: None,
            beats_then: None,
        };
        watch.begin_attempt(now, ranks);
        watch
    }

    /// Starts a new attempt: new processes, about which nothing is known. What was learned about the job is kept.
    pub fn begin_attempt(&mut self, now: Mono, ranks: usize) {
        self.ranks = vec![RankState::default(); ranks];
        self.probes = vec![Probes::default(); ranks];
        self.counters = Counters::new(ranks);
        self.phases.begin_attempt();
        self.probed = false;
        self.has_printed = false;
        self.devices_rest = None;
        (self.began, self.looked, self.moved, self.completed) = (now, now, now, now);
        self.restart_clock(now);
    }

    /// Sets the host of each rank, so that ranks that fall silent together are judged together.
    pub fn set_hosts(&mut self, hosts: Vec<u32>) {
        self.hosts = hosts;
    }

    /// The memory that it uses, in bytes, without what the phases learned.
    pub fn bytes(&self) -> usize {
        let rank = size_of::<RankState>() + size_of::<Probes>() + size_of::<u32>();
        size_of::<Self>() + self.ranks.capacity() * rank + self.counters.bytes()
    }

    /// The phases, to name sections and to learn from steps.
    pub fn phases(&mut self) -> &mut Phases {
        &mut self.phases
    }

    /// Records a look at a rank's page.
    pub fn sample(&mut self, rank: usize, now: Mono, sample: &RankSample) {
        let Some(state) = self.ranks.get_mut(rank) else { return };
        let before = &state.sample;
        let stepped = before.step != sample.step;
        let moved = before.beats != sample.beats
            || stepped
            || before.claim != sample.claim
            || before.registered != sample.registered
            || before.closed != sample.closed
            || before.quiet_until != sample.quiet_until;
        if moved {
            // The rank's own time is exact, while a look is late by up to its interval. It must not be in the future.
            let at =
                if sample.beat_at > before.beat_at && sample.beat_at <= now { sample.beat_at } else { now };
            self.moved = self.moved.max(at);
        }
        if stepped || sample.step.is_none() || sample.long.is_some() || sample.quiet_until > now {
            self.completed = now;
        }
        state.sample = *sample;
        state.received = now;
    }

    /// Records a rank's collective counters.
    pub fn counts(&mut self, rank: usize, now: Mono, counts: &[Count]) {
        let moved = self.counters.set(rank, counts);
        if moved.any {
            self.moved = now;
        }
        if moved.completed {
            self.completed = now;
        }
    }

    /// A rank ended in order while others continue.
    pub fn finished(&mut self, rank: usize, now: Mono) {
        if let Some(state) = self.ranks.get_mut(rank) {
            state.life = Life::Finished;
            self.moved = now;
        }
    }

    /// Whether nothing has moved for so long that the processes should be probed with [`probe`](Self::probe).
    pub fn wants_probes(&self, now: Mono) -> bool {
        let silence = self.silence(now);
        // Not at every look, and for long steps not from their start: reading all threads costs time.
        let from = PROBE_AFTER.max(self.confirmation().minus(PROBED_BEFORE));
        let apart =
            if silence < self.confirmation().plus(PROBED_BEFORE) { PROBES_APART } else { Span::seconds(1) };
        silence >= from && now.since(self.probed_at) >= apart
    }

    /// Records the kernel's counters of a rank's processes.
    pub fn probe(&mut self, rank: usize, probe: Probe) {
        if let Some(probes) = self.probes.get_mut(rank) {
            self.probed_at = self.probed_at.max(probe.at);
            probes.add(probe);
            self.probed = true;
        }
    }

    /// Records when the devices of all ranks, which had work, were first reported idle by their driver. `None` while
    /// one has work, and if nothing reports it.
    pub fn devices_rest(&mut self, since: Option<Mono>) {
        self.devices_rest = since;
    }

    /// How long nothing has moved, as far as the judge was awake to see it.
    pub fn silence(&self, now: Mono) -> Span {
        now.since(self.moved.max(self.restarted))
    }

    /// When anything last moved.
    pub fn last_moved(&self) -> Mono {
        self.moved
    }

    /// When a step or a collective was last completed, or something long was in progress.
    pub fn last_completed(&self) -> Mono {
        self.completed
    }

    /// Judges. Call it after each look at all pages.
    pub fn look(&mut self, now: Mono) -> HangStatus {
        if now.since(self.looked) > HELD_UP {
            self.restart_clock(now);
        }
        self.looked = now;
        let silence = self.silence(now);
        if silence < PROBE_AFTER {
            self.first = None;
            return self.livelock(now);
        }
        self.phases.refresh();
        let prints =
            |rank: &RankState| rank.sample.step.is_some() && self.phases.is_output(rank.sample.phase);
        self.has_printed = self.ranks.iter().any(prints);
        if silence.0 < self.phases.limits().confirm.0 / 3 || !self.anybody_trains() {
            return HangStatus::Progressing;
        }
        if let Some(why) = self.expected(now) {
            self.first = None;
            return self.waiting(Vec::new(), Span(u64::MAX), why);
        }
        let suspects = self.locate();
        let agreed = self.agreed(now, &suspects.culprits);
        if suspects.kind == HangKind::Stopped {
            return self.stopped(now, suspects, agreed);
        }
        let (limit, why) = self.patience(now, &suspects);
        let usual = self.usual(&suspects);
        if silence < self.confirmation() || self.overdue(now, &suspects) < Span(1) {
            return HangStatus::Progressing;
        }
        if silence < limit {
            return self.waiting(self.numbers(&suspects.culprits), limit, why);
        }
        if !agreed {
            return HangStatus::Progressing;
        }
        HangStatus::Confirmed(Box::new(self.hang(now, suspects, usual)))
    }

    /// Ranks that a signal stopped. What they were doing does not matter: a stopped process completes nothing.
    fn stopped(&self, now: Mono, suspects: Suspects, agreed: bool) -> HangStatus {
        let (phase, usual) = self.usual(&suspects);
        let limit = usual.span.min(STOPPED_LIMIT).max(self.confirmation());
        if self.silence(now) < limit {
            let ranks = self.numbers(&suspects.culprits);
            return HangStatus::Stopped(Suspicion { ranks, since: self.moved, limit, why: String::new() });
        }
        if !agreed {
            return HangStatus::Progressing;
        }
        let hang = self.hang(now, suspects, (phase, usual));
        HangStatus::Confirmed(Box::new(Hang { limit, ..hang }))
    }

    /// Forgets everything before now: the judge was held up, or a hang passed.
    pub fn restart_clock(&mut self, now: Mono) {
        self.restarted = now;
        self.completed = self.completed.max(now);
        self.first = None;
        self.beats_then = None;
        for probes in &mut self.probes {
            probes.clear();
        }
    }

    fn waiting(&self, ranks: Vec<Rank>, limit: Span, why: String) -> HangStatus {
        HangStatus::Pending(Suspicion { ranks, since: self.moved, limit, why })
    }

    /// Whether any living rank has a connected client. Without one nothing is known, and nothing is judged.
    fn anybody_trains(&self) -> bool {
        self.ranks
            .iter()
            .any(|rank| rank.life == Life::Lives && rank.sample.registered && !rank.sample.closed)
    }

    /// Whether any rank's client has connected in this attempt. Otherwise only the processes can be judged.
    pub fn receives_any(&self) -> bool {
        self.ranks.iter().any(|rank| rank.sample.registered)
    }

    /// Whether this snapshot names the same ranks as one that was taken long enough before.
    fn agreed(&mut self, now: Mono, culprits: &[u32]) -> bool {
        let apart = Span(self.phases.limits().confirm.0 / 3).min(Span::seconds(1));
        match &self.first {
            Some((at, named)) if named == culprits => now.since(*at) >= apart,
            _ => {
                self.first = Some((now, culprits.to_vec()));
                false
            }
        }
    }

    /// A rank's host. If unknown, each rank counts as a host, so that no ranks are judged together.
    pub(crate) fn host(&self, rank: usize) -> u32 {
        self.hosts.get(rank).copied().unwrap_or_else(|| u32::try_from(rank).unwrap_or(u32::MAX))
    }

    pub(crate) fn lives(&self, rank: usize) -> bool {
        self.ranks.get(rank).is_some_and(|state| state.life == Life::Lives)
    }

    pub(crate) fn state(&self, rank: usize) -> ProcessState {
        self.probes.get(rank).map_or(ProcessState::Normal, Probes::state)
    }

    pub(crate) fn activity(&self, rank: usize) -> Option<Activity> {
        self.probes.get(rank).and_then(Probes::activity)
    }

    /// What a rank is doing.
    fn phase(&self, rank: usize) -> PhaseId {
        let sample = &self.ranks[rank].sample;
        let first = sample.step.is_none() && !self.prints_nothing(rank);
        if first { PhaseId::FIRST_STEP } else { sample.phase }
    }

    /// Whether a rank is expected to print its steps while others do: often only one rank prints.
    pub(crate) fn prints_nothing(&self, rank: usize) -> bool {
        let sample = &self.ranks[rank].sample;
        self.has_printed && sample.step.is_none() && self.phases.is_output(sample.phase)
    }

    pub(crate) fn newest_step(&self) -> Option<u64> {
        let living = self.ranks.iter().filter(|rank| rank.life == Life::Lives);
        living.map(|rank| rank.sample.step).max().flatten()
    }

    pub(crate) fn ranks_where(&self, is: impl Fn(usize) -> bool) -> Vec<u32> {
        (0..self.ranks.len())
            .filter(|rank| is(*rank))
            .map(|rank| u32::try_from(rank).unwrap_or(u32::MAX))
            .collect()
    }

    fn number(&self, rank: usize) -> Rank {
        Rank(self.first_rank.saturating_add(u32::try_from(rank).unwrap_or(u32::MAX)))
    }

    fn numbers(&self, ranks: &[u32]) -> Vec<Rank> {
        ranks.iter().map(|rank| self.number(*rank as usize)).collect()
    }

    pub(crate) fn listed(&self, ranks: &[u32]) -> String {
        listed(&self.numbers(ranks))
    }

    pub(crate) fn processes(&self, ranks: &[u32]) -> String {
        let verb = if ranks.len() == 1 { "the process of" } else { "the processes of" };
        format!("{verb} {}", self.listed(ranks))
    }
}

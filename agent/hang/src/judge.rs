//! The judge of hangs of one job. It receives what the ranks' pages and processes show, judges by heartbeats if there
//! are any and by activity otherwise, and returns the facts to record.

use std::collections::BTreeMap;

use crate::activity::Probe;
use crate::counters::Count;
use crate::finding::{HangStatus, STOPPED_REPORT_AFTER, Suspicion};
use crate::idle::{ActivitySample, Idle};
use crate::phase::{Limits, Phases};
use crate::rank::RankSample;
use crate::remote_ranks::{RankSeen, ToReport};
use crate::watch::Watch;
use mainstay_model::entry::Fact;
use mainstay_model::hang::{ACTIVITY, Hang, HangKind, listed};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};

/// Shorter waits are not reported.
const REPORT_AFTER: Span = Span::seconds(10);

/// The judge of hangs of one job. Ranks are given by their index among those of the host, from 0.
#[derive(Clone, Debug)]
pub struct HangJudge {
    /// Whether hung ranks are stopped, and not only reported.
    acts: bool,
    watch: Watch,
    /// Judges while no rank sends heartbeats.
    idle: Idle,
    /// Whether the ranks' GPUs have work, as last reported by the agent.
    gpus: BTreeMap<Rank, bool>,
    /// Since when all of them are idle.
    gpus_idle: Option<Mono>,
    /// Since when all those that had work before are idle.
    gpus_rest: Option<Mono>,
    first: Rank,
    ranks: usize,
    over: Scope,
    attempt: Attempt,
    /// The time of the last movement at the last suspicion that was reported.
    reported_at: Option<Mono>,
    /// The current hang, until it passes or the attempt ends.
    confirmed: Option<ConfirmedHang>,
}

/// Which ranks are judged by their heartbeats.
#[derive(Clone, Debug)]
enum Scope {
    /// Those of this host, which are all ranks or are judged alone.
    Here,
    /// Those of all hosts of the job, with the number of hosts.
    Job(usize),
    /// None: sights of this host are sent to the judge on another host.
    OtherHosts(ToReport),
}

/// A hang that was found.
#[derive(Clone, Copy, Debug)]
struct ConfirmedHang {
    kind: HangKind,
    confirmed: Mono,
    /// ConfirmedHang by process activity, because there are no heartbeats.
    by_activity: bool,
}

impl HangJudge {
    /// The judge of `ranks` ranks, starting with rank `first`. `acts`: hung ranks are stopped.
    pub fn new(limits: Limits, acts: bool, first: Rank, ranks: usize, now: Mono) -> HangJudge {
        HangJudge {
            acts,
            idle: Idle::new(limits.idle, first, ranks),
            watch: Watch::new(limits, first, ranks, now),
            gpus: BTreeMap::new(),
            gpus_idle: None,
            gpus_rest: None,
            first,
            ranks,
            over: Scope::Here,
            attempt: Attempt(0),
            reported_at: None,
            confirmed: None,
        }
    }

    /// Judges the ranks of all hosts from now on. `hosts` gives the host of each rank. What was learned is kept.
    pub fn judge_all(&mut self, hosts: Vec<u32>, now: Mono) {
        let mut watch = Watch::new(self.watch.phases.limits().clone(), Rank(0), hosts.len(), now);
        std::mem::swap(&mut watch.phases, &mut self.watch.phases);
        self.over = Scope::Job(hosts.len());
        watch.set_hosts(hosts);
        self.watch = watch;
        (self.reported_at, self.confirmed) = (None, None);
    }

    /// Leaves ranks with heartbeats to the judge on another host, in a job of `hosts` hosts.
    pub fn judged_by_leader(&mut self, hosts: u32) {
        self.over = Scope::OtherHosts(ToReport::new(self.ranks, hosts));
    }

    /// What to report to the judge on another host.
    pub fn to_report(&mut self, now: Mono) -> Vec<RankSeen> {
        match &mut self.over {
            Scope::OtherHosts(seen) => seen.due(self.first, &self.watch.phases, now),
            Scope::Here | Scope::Job(_) => Vec::new(),
        }
    }

    /// Records what another host reports about a rank.
    pub fn seen_elsewhere(&mut self, now: Mono, seen: &RankSeen) {
        if !matches!(self.over, Scope::Job(_)) {
            return;
        }
        let (rank, sample) = (seen.rank.0 as usize, seen.sight_here(&mut self.watch.phases));
        self.watch.sample(rank, now, &sample);
        self.watch.counts(rank, now, &seen.counts);
        if let Some(probe) = seen.probe {
            self.watch.probe(rank, probe);
        }
    }

    /// The process of a rank of another host ended with status 0.
    pub fn finished_elsewhere(&mut self, rank: Rank, now: Mono) {
        if matches!(self.over, Scope::Job(_)) {
            self.watch.finished(rank.0 as usize, now);
        }
    }

    /// The index of a rank of this host among those that are judged.
    fn watched(&self, index: usize) -> usize {
        match self.over {
            Scope::Job(_) => index.saturating_add(self.first.0 as usize),
            Scope::Here | Scope::OtherHosts(_) => index,
        }
    }

    /// Whether hung ranks are stopped, and not only reported.
    pub fn acts(&self) -> bool {
        self.acts
    }

    /// Ranks on this host.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The learned durations of phases, to read and to teach.
    pub fn phases(&mut self) -> &mut Phases {
        self.watch.phases()
    }

    /// The judge by activity, for reports of devices and NCCL and for what earlier runs learned.
    pub fn idle(&mut self) -> &mut Idle {
        &mut self.idle
    }

    /// Starts a new attempt: new processes. What was learned about the job is kept.
    pub fn begin_attempt(&mut self, attempt: Attempt, now: Mono) {
        self.attempt = attempt;
        let ranks = match &mut self.over {
            Scope::Here => self.ranks,
            Scope::Job(ranks) => *ranks,
            Scope::OtherHosts(seen) => {
                seen.begin_attempt(self.ranks);
                self.ranks
            }
        };
        self.watch.begin_attempt(now, ranks);
        self.idle.begin_attempt();
        (self.reported_at, self.confirmed) = (None, None);
    }

    /// Records whether ranks' GPUs have work, as the agent reports it; empty if there is no agent.
    pub fn gpus_at_work(&mut self, at_work: &BTreeMap<Rank, bool>, now: Mono) {
        let any = |states: &BTreeMap<Rank, bool>| states.values().any(|at_work| *at_work);
        if at_work.is_empty() || any(at_work) {
            self.gpus_rest = None;
        } else if any(&self.gpus) {
            self.gpus_rest = Some(now);
        }
        self.gpus.clone_from(at_work);
    }

    /// How long all GPUs of the `living` ranks have been idle. `None` unless it is known for all of them.
    pub fn gpus_idle(&mut self, living: &[Rank], now: Mono) -> Option<Span> {
        if living.is_empty() || !self.gpus_are_known(living) {
            self.gpus_idle = None;
            return None;
        }
        if living.iter().any(|rank| self.gpus.get(rank) == Some(&true)) {
            self.gpus_idle = None;
            return Some(Span(0));
        }
        Some(now.since(*self.gpus_idle.get_or_insert(now)))
    }

    fn gpus_are_known(&self, living: &[Rank]) -> bool {
        living.iter().all(|rank| self.gpus.contains_key(rank))
    }

    /// A rank's process ended with status 0.
    pub fn finished(&mut self, index: usize, now: Mono) {
        self.watch.finished(self.watched(index), now);
    }

    /// Records what a rank's page shows.
    pub fn sample(&mut self, index: usize, now: Mono, sample: &RankSample, counts: &[Count]) {
        if let Scope::OtherHosts(seen) = &mut self.over {
            seen.sample(index, sample, counts);
        }
        let index = self.watched(index);
        self.watch.sample(index, now, sample);
        self.watch.counts(index, now, counts);
    }

    /// Whether to sample the processes, because no rank sends heartbeats.
    pub fn wants_pulses(&self, now: Mono) -> bool {
        !self.watch.receives_any() && self.idle.wants_look(now)
    }

    /// Whether to probe the processes, because the pages show no movement.
    pub fn wants_probes(&self, now: Mono) -> bool {
        self.confirmed.is_none() && self.watch.receives_any() && self.watch.wants_probes(now)
    }

    /// Records a probe of a rank's processes.
    pub fn probe(&mut self, index: usize, probe: Probe) {
        if let Scope::OtherHosts(seen) = &mut self.over {
            seen.probe(index, probe);
        }
        self.watch.probe(self.watched(index), probe);
    }

    /// Judges after a look at all pages, and at the processes if that was wanted. `living` are the ranks that have
    /// not ended. Returns the facts to record.
    pub fn judge(
        &mut self,
        now: Mono,
        pulses: Option<&[Option<ActivitySample>]>,
        living: &[Rank],
    ) -> Option<Fact> {
        let looked = pulses.map(|pulses| {
            let holds_device = || pulses.iter().flatten().any(|pulse| pulse.probe.holds_device);
            self.idle.look(now, pulses, holds_device)
        });
        if self.confirmed.is_some() {
            return self.passed(now);
        }
        let outlook = match looked {
            Some(outlook) => outlook,
            None if self.watch.receives_any() && matches!(self.over, Scope::OtherHosts(_)) => {
                HangStatus::Progressing
            }
            None if self.watch.receives_any() => {
                // Nothing is known about GPUs of other hosts.
                let known = matches!(self.over, Scope::Here) && self.gpus_are_known(living);
                self.watch.devices_rest(self.gpus_rest.filter(|_| known));
                self.watch.look(now)
            }
            None => HangStatus::Progressing,
        };
        match outlook {
            HangStatus::Progressing => None,
            HangStatus::Pending(suspicion) => self.suspicion(&suspicion, now, REPORT_AFTER, waiting),
            HangStatus::Stopped(suspicion) => self.suspicion(&suspicion, now, STOPPED_REPORT_AFTER, stopped),
            HangStatus::Suspected(suspicion) => self.suspicion(&suspicion, now, REPORT_AFTER, doubted),
            HangStatus::Confirmed(hang) => Some(self.hung(*hang)),
        }
    }

    fn hung(&mut self, hang: Hang) -> Fact {
        let by_activity = hang.phase == ACTIVITY;
        self.confirmed = Some(ConfirmedHang { kind: hang.kind, confirmed: hang.confirmed, by_activity });
        Fact::RanksHung { attempt: self.attempt, hang: Box::new(hang), acts: self.acts }
    }

    /// Whether a hang that was found has moved again. Then it was none, and the job continues.
    pub fn passed(&mut self, now: Mono) -> Option<Fact> {
        let ConfirmedHang { kind, confirmed, by_activity } = self.confirmed?;
        let moved = match kind {
            _ if by_activity && !self.watch.receives_any() => self.idle.last_active(),
            // A livelock sends heartbeats all the time.
            HangKind::Livelock => self.watch.last_completed(),
            _ => self.watch.last_moved(),
        };
        if moved <= confirmed {
            return None;
        }
        self.confirmed = None;
        self.watch.restart_clock(now);
        Some(Fact::HangPassed { attempt: self.attempt, after: moved.since(confirmed) })
    }

    /// Reports a suspicion once, and only if the rank did not announce the wait.
    fn suspicion(
        &mut self,
        suspicion: &Suspicion,
        now: Mono,
        after: Span,
        detail: fn(&Suspicion, Span) -> String,
    ) -> Option<Fact> {
        let silence = now.since(suspicion.since);
        if self.reported_at == Some(suspicion.since) || suspicion.limit.0 == u64::MAX || silence < after {
            return None;
        }
        self.reported_at = Some(suspicion.since);
        let numbers: Vec<String> = suspicion.ranks.iter().map(|rank| rank.0.to_string()).collect();
        Some(Fact::Observed(Observation {
            component: "job".to_owned(),
            event: "hang_suspected".to_owned(),
            weight: Weight::Warning,
            detail: detail(suspicion, silence),
            values: BTreeMap::from([
                ("silent_ns".to_owned(), silence.0.to_string()),
                ("limit_ns".to_owned(), suspicion.limit.0.to_string()),
                ("ranks".to_owned(), numbers.join(",")),
            ]),
        }))
    }
}

fn waiting(suspicion: &Suspicion, silence: Span) -> String {
    let Suspicion { ranks, limit, why, .. } = suspicion;
    let who = if ranks.is_empty() {
        "no rank stands out".to_owned()
    } else {
        format!("all wait for {}", listed(ranks))
    };
    format!("no progress for {silence}, {who}; it counts as a hang after {limit}, because {why}")
}

fn stopped(Suspicion { ranks, limit, .. }: &Suspicion, silence: Span) -> String {
    let (who, has) = (listed(ranks), if ranks.len() == 1 { "has" } else { "have" });
    format!(
        "{who} {has} been stopped by a signal for {silence} (state T); it counts as a hang after {limit}, unless SIGCONT arrives"
    )
}

fn doubted(Suspicion { why, .. }: &Suspicion, silence: Span) -> String {
    format!("possible hang: for {silence} {why}; no action is taken")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activity::ProcessState;

    fn judge(ranks: usize) -> HangJudge {
        HangJudge::new(Limits::default(), true, Rank(0), ranks, Mono(1))
    }

    #[test]
    fn gpus_rest_when_all_that_had_work_are_reported_idle() {
        let mut judge = judge(2);
        let mut report = |at_work: &[bool], now: u64| {
            let reported_at = (0..).map(Rank).zip(at_work.iter().copied()).collect();
            judge.gpus_at_work(&reported_at, Mono(now));
            judge.gpus_rest
        };
        assert_eq!(report(&[false, false], 2), None, "nobody knows whether they ever had any");
        assert_eq!(report(&[true, false], 3), None);
        assert_eq!(report(&[false, false], 4), Some(Mono(4)));
        assert_eq!(report(&[false, false], 5), Some(Mono(4)), "the same as before");
        assert_eq!(report(&[false, true], 6), None);
        assert_eq!(report(&[false, false], 7), Some(Mono(7)));
        assert_eq!(report(&[], 8), None, "the agent is gone");
        assert_eq!(report(&[false, false], 9), None, "and may report of long ago");
    }

    #[test]
    fn gpus_are_idle_only_if_all_living_ranks_are_known() {
        let mut judge = judge(2);
        let ranks = [Rank(0), Rank(1)];
        assert_eq!(judge.gpus_idle(&ranks, Mono(5)), None);
        judge.gpus_at_work(&BTreeMap::from([(Rank(0), false)]), Mono(6));
        assert_eq!(judge.gpus_idle(&ranks, Mono(7)), None, "of rank 1 nothing is known");
        assert_eq!(judge.gpus_idle(&ranks[..1], Mono(8)), Some(Span(0)), "rank 1 has ended");
        assert_eq!(judge.gpus_idle(&ranks[..1], Mono(10)), Some(Span(2)));
        assert_eq!(judge.gpus_idle(&[], Mono(11)), None);
    }

    /// A job without heartbeats works and then does nothing: the hang is reported once, and passes when it moves.
    #[test]
    fn a_hang_is_reported_once_and_passes_when_something_moves() {
        let mut judge = judge(1);
        judge.begin_attempt(Attempt(2), Mono(1));
        let mut pulse = ActivitySample::default();
        let mut facts = Vec::new();
        for second in 1..3_600 {
            let now = Mono(Span::seconds(second).0);
            pulse.probe.at = now;
            if !(1_500..=3_500).contains(&second) {
                pulse.output += 10;
            }
            if judge.wants_pulses(now) {
                facts.extend(judge.judge(now, Some(&[Some(pulse)]), &[Rank(0)]));
            }
        }
        let hangs: Vec<&Fact> = facts.iter().filter(|fact| matches!(fact, Fact::RanksHung { .. })).collect();
        assert!(
            matches!(hangs[..], [Fact::RanksHung { attempt: Attempt(2), acts: true, .. }]),
            "one hang: {facts:?}"
        );
        assert!(matches!(facts.last(), Some(Fact::HangPassed { attempt: Attempt(2), .. })), "{facts:?}");
        let suspected = |fact: &&Fact| matches!(fact, Fact::Observed(observation) if observation.event == "hang_suspected");
        assert_eq!(facts.iter().filter(suspected).count(), 1, "{facts:?}");
    }

    #[test]
    fn a_rank_stopped_by_a_signal_is_reported_long_before_it_is_a_hang() {
        let mut judge = judge(1);
        let mut pulse = ActivitySample::default();
        let mut facts = Vec::new();
        for second in 1..800 {
            let now = Mono(Span::seconds(second).0);
            pulse.probe.at = now;
            if second < 700 {
                pulse.output += 10;
            } else {
                pulse.probe.state = ProcessState::Stopped;
            }
            if judge.wants_pulses(now) {
                facts.extend(judge.judge(now, Some(&[Some(pulse)]), &[Rank(0)]).map(|fact| (second, fact)));
            }
        }
        let [(reported_at, Fact::Observed(seen)), (hung, Fact::RanksHung { hang, .. })] = &facts[..] else {
            panic!("{facts:?}")
        };
        assert!(*reported_at < 720 && (730..750).contains(hung), "{reported_at} {hung}");
        assert_eq!((seen.event.as_str(), hang.kind), ("hang_suspected", HangKind::Stopped));
    }
}

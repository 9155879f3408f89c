//! Measures the cost of replication for the jobs of this host and decides whether the next replica has to wait.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use mainstay_checkpoint::replication_cost::{DelayReason, ReplicationCost, StepTime};
use mainstay_model::time::{Mono, Span};

use mainstay_sys::clock::mono;

use crate::lock;

/// Number of remembered periods of replication: steps are reported up to a second after they ended.
const MAX_PERIODS: usize = 256;

/// A job that reports no step for this time has ended or stopped training.
const JOB_MAX_SILENCE: Span = Span::seconds(3600);

/// Current replication, and its cost for each job.
#[derive(Debug)]
pub(crate) struct ReplicationThrottle {
    allowed: f64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    jobs: BTreeMap<String, (ReplicationCost, Mono)>,
    /// Shards in transfer, in and out.
    any: Transfers,
    /// Those that this host sends. It pays for them only: the host that sends the others pays for those, and could not be
    /// stopped from here.
    sent: Transfers,
    /// Earlier periods of replication.
    spells: VecDeque<(Mono, Mono)>,
    /// The time since which a replica waits, and the reason.
    waits: Option<(Mono, DelayReason)>,
    held: Span,
    /// Seconds of training, each time of the job with the highest cost.
    paid_s: f64,
}

/// Number of transfers, and the time since which there is any.
#[derive(Debug, Default)]
struct Transfers {
    count: usize,
    since: Mono,
}

impl Transfers {
    fn begin(&mut self, now: Mono) {
        if self.count == 0 {
            self.since = now;
        }
        self.count += 1;
    }

    /// Ends one. Returns the beginning of the period if it was the last.
    fn end(&mut self) -> Option<Mono> {
        self.count = self.count.saturating_sub(1);
        (self.count == 0).then_some(self.since)
    }
}

/// The cost of replication for training, from the duration of steps with and without it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReplicationOverhead {
    /// Seconds of training that a second of replication costs the most affected job, if known; may be negative by chance.
    pub per_second: Option<f64>,
    /// Training time lost since the start, as far as it is distinguishable from noise.
    pub paid: Duration,
    /// Total time that something to send had to wait.
    pub held: Duration,
}

/// Marks a shard as in transfer until it is dropped.
#[derive(Debug)]
pub(crate) struct TransferGuard<'a> {
    throttle: &'a ReplicationThrottle,
    is_sent: bool,
}

impl ReplicationThrottle {
    /// Replication may cost each job the share `allowed` of its time; 0: no limit.
    pub(crate) fn new(allowed: f64) -> ReplicationThrottle {
        ReplicationThrottle { allowed, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Records that this host starts to send a shard.
    pub(crate) fn begin_to_send(&self) -> TransferGuard<'_> {
        self.begin(true)
    }

    /// Records that another host starts to send a shard to this one.
    pub(crate) fn begin_to_receive(&self) -> TransferGuard<'_> {
        self.begin(false)
    }

    fn begin(&self, is_sent: bool) -> TransferGuard<'_> {
        let (now, mut state) = (mono(), self.state());
        state.any.begin(now);
        if is_sent {
            state.sent.begin(now);
        }
        TransferGuard { throttle: self, is_sent }
    }

    /// Records steps that a rank of a job on this host completed.
    pub(crate) fn stepped(&self, job: &str, steps: &[StepTime]) {
        let now = mono();
        let mut state = self.state();
        let times: Vec<Span> = steps.iter().map(|step| state.within(step.start, step.end, now)).collect();
        let fresh = || (ReplicationCost::new(self.allowed), now);
        let (cost, last_report) = state.jobs.entry(job.to_owned()).or_insert_with(fresh);
        *last_report = now;
        steps.iter().zip(times).for_each(|(step, replicating)| cost.record_step(*step, replicating));
    }

    /// Whether a replica may be sent now: no job requires it to wait.
    pub(crate) fn allows(&self) -> bool {
        let now = mono();
        let mut state = self.state();
        state.jobs.retain(|_, (_, reported)| now.since(*reported) < JOB_MAX_SILENCE);
        // Ask each job: one with enough budget must also see that time passes.
        let holds: Vec<DelayReason> =
            state.jobs.values_mut().filter_map(|(cost, _)| cost.holds(now)).collect();
        let why = holds.into_iter().min();
        match (why, state.waits) {
            (None, Some((since, _))) => {
                state.held = state.held.plus(now.since(since));
                state.waits = None;
            }
            (Some(why), waits) => state.waits = Some((waits.map_or(now, |(since, _)| since), why)),
            (None, None) => {}
        }
        why.is_none()
    }

    /// The reason why a replica waits, if one does.
    pub(crate) fn holds(&self) -> Option<DelayReason> {
        self.state().waits.map(|(_, why)| why)
    }

    /// The current and total cost of replication.
    pub(crate) fn overhead(&self) -> ReplicationOverhead {
        let state = self.state();
        let waits = state.waits.map_or(Span::default(), |(since, _)| mono().since(since));
        ReplicationOverhead {
            per_second: state.jobs.values().filter_map(|(cost, _)| cost.per_second()).reduce(f64::max),
            paid: Duration::from_secs_f64(state.paid_s),
            held: Duration::from_nanos(state.held.plus(waits).0),
        }
    }
}

impl State {
    /// Time of replication between these times.
    fn within(&self, from: Mono, to: Mono, now: Mono) -> Span {
        let running = (self.any.count > 0).then_some((self.any.since, now));
        let spells = self.spells.iter().copied().chain(running);
        let shared = spells.map(|(began, ended)| ended.min(to).since(began.max(from)));
        shared.fold(Span::default(), Span::plus)
    }
}

impl Drop for TransferGuard<'_> {
    fn drop(&mut self) {
        let now = mono();
        let mut state = self.throttle.state();
        if let Some(began) = state.any.end() {
            if state.spells.len() >= MAX_PERIODS {
                state.spells.pop_front();
            }
            state.spells.push_back((began, now));
        }
        if let Some(began) = self.is_sent.then(|| state.sent.end()).flatten() {
            let costs = state.jobs.values_mut().map(|(cost, _)| cost.replicated(now.since(began), now));
            let most = costs.fold(0.0, f64::max);
            state.paid_s += most;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(end: Mono, took: Span) -> StepTime {
        StepTime { start: Mono(end.0 - took.0), end, saving: Span::default() }
    }

    /// Steps before any replication, then steps of twice the duration during replication until now.
    fn dear(throttle: &ReplicationThrottle) {
        let (began, took) = (Mono(mono().0 - 3_000_000_000), Span::millis(10));
        let quiet: Vec<StepTime> = (1..=100).map(|n| step(Mono(began.0 + n * took.0), took)).collect();
        throttle.stepped("job", &quiet);
        throttle.state().spells.push_back((Mono(began.0 + 1_000_000_000), mono()));
        let slow = Span::millis(20);
        let beside: Vec<StepTime> =
            (1..=100).map(|n| step(Mono(began.0 + 1_000_000_000 + n * slow.0), slow)).collect();
        throttle.stepped("job", &beside);
    }

    #[test]
    fn steps_during_a_transfer_are_distinguished_and_pay_for_it() {
        let throttle = ReplicationThrottle::new(0.01);
        dear(&throttle);
        assert!(throttle.overhead().per_second.unwrap() > 0.4, "{:?}", throttle.overhead());
        assert!(throttle.allows());
        // Two transfers overlap: they are one period.
        let (one, other) = (throttle.begin_to_send(), throttle.begin_to_send());
        drop(one);
        throttle.state().sent.since = Mono(mono().0 - 100_000_000_000);
        drop(other);
        assert!(!throttle.allows());
        assert!(throttle.overhead().paid > Duration::from_secs(40), "{:?}", throttle.overhead());
        let state = throttle.state();
        assert_eq!((state.spells.len(), state.any.count, state.sent.count), (2, 0, 0));
        assert!(matches!(state.waits, Some((_, DelayReason::Spent))), "{:?}", state.waits);
    }

    #[test]
    fn what_others_send_delays_nothing_that_this_host_sends() {
        let throttle = ReplicationThrottle::new(0.01);
        dear(&throttle);
        let received = throttle.begin_to_receive();
        throttle.state().any.since = Mono(mono().0 - 100_000_000_000);
        drop(received);
        assert_eq!((throttle.allows(), throttle.overhead().paid), (true, Duration::ZERO));
        // A short transfer during a long one of another host.
        let (received, sent) = (throttle.begin_to_receive(), throttle.begin_to_send());
        throttle.state().any.since = Mono(mono().0 - 100_000_000_000);
        drop((sent, received));
        assert!(throttle.overhead().paid < Duration::from_secs(40), "{:?}", throttle.overhead());
    }

    #[test]
    fn without_jobs_or_without_a_bound_nothing_waits() {
        let (no_one, unbounded) = (ReplicationThrottle::new(0.01), ReplicationThrottle::new(0.0));
        dear(&unbounded);
        for throttle in [&no_one, &unbounded] {
            let busy = throttle.begin_to_send();
            throttle.state().sent.since = Mono(1);
            drop(busy);
            assert!(throttle.allows());
            assert_eq!(throttle.overhead().held, Duration::ZERO);
        }
    }

    #[test]
    fn a_running_transfer_counts_for_current_steps() {
        let throttle = ReplicationThrottle::new(0.01);
        let busy = throttle.begin_to_receive();
        let (now, state) = (mono(), throttle.state());
        let within = state.within(Mono(now.0 - 5), Mono(now.0 + 7), Mono(now.0 + 100));
        assert!(within.0 >= 7, "{within:?}");
        assert_eq!(state.within(Mono(1), Mono(2), now), Span::default());
        drop(state);
        drop(busy);
    }
}

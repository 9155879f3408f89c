use super::*;

/// A simulated job: consecutive steps, and a replica to send after every `every` of them.
struct Job {
    step_s: f64,
    /// Random variation of steps, as a share.
    noise: f64,
    /// Additional time of a step per time of replication.
    cost_per_second: f64,
    /// Time to send a replica, seconds.
    sending_s: f64,
    every: usize,
    /// Additional time of a step that saves, seconds, and how much of it is reported as saving.
    saving_s: (f64, f64),
    /// Additional time of the first two steps after a save, as a share: the save is checked and written.
    after_save: f64,
    /// Drift of the machine's speed from one minute to the next, as a share.
    drift: f64,
    /// Interval between reports of steps, seconds.
    reported_each_s: f64,
}

/// The result of a simulated job.
#[derive(Debug)]
struct Went {
    /// Training time lost to replication, as a share of all time.
    cost: f64,
    sent: usize,
    saved: usize,
    per_second: Option<f64>,
}

/// A deterministic random number generator (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Approximately normal, with variance 1.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

fn mono(seconds: f64) -> Mono {
    Mono((seconds * 1e9) as u64)
}

fn span(seconds: f64) -> Span {
    Span((seconds * 1e9) as u64)
}

impl Job {
    fn of(step_s: f64, cost_per_second: f64, sending_s: f64, every: usize) -> Job {
        Job {
            step_s,
            noise: 0.01,
            cost_per_second,
            sending_s,
            every,
            saving_s: (0.0, 0.0),
            after_save: 0.0,
            drift: 0.0,
            reported_each_s: 0.0,
        }
    }

    fn run(&self, allowed: f64, steps: usize, seed: u64) -> Went {
        let (mut replication, mut numbers) = (ReplicationCost::new(allowed), Numbers(seed));
        let (mut now, mut extra, mut sent, mut saved) = (1.0, 0.0, 0, 0);
        let (mut to_send, mut sending_until, mut offered) = (0.0, 0.0_f64, false);
        let (mut reported_at, mut unreported) = (0.0, Vec::new());
        for step in 1..=steps {
            let saves = step % self.every == 0;
            let (itself, reported) = if saves { self.saving_s } else { (0.0, 0.0) };
            let is_after = step > self.every && (1..=2).contains(&(step % self.every));
            let after = if is_after { 1.0 + self.after_save } else { 1.0 };
            let drift = 1.0 + self.drift * f64::sin(now / 20.0);
            let own = self.step_s * after * drift * (1.0 + self.noise * numbers.normal()).max(0.1) + itself;
            // Replication during the step: the rest of a running transfer, or one that starts now.
            if offered && sending_until <= now && replication.holds(mono(now)).is_none() {
                (sending_until, offered, sent, to_send) =
                    (now + self.sending_s, false, sent + 1, self.sending_s);
            }
            let beside = (sending_until - now).clamp(0.0, own);
            let longer = beside * self.cost_per_second;
            let (start, end) = (now, now + own + longer);
            (now, extra) = (end, extra + longer);
            let time = StepTime { start: mono(start), end: mono(end), saving: span(reported) };
            unreported.push((time, span(beside)));
            if now - reported_at >= self.reported_each_s {
                reported_at = now;
                unreported.drain(..).for_each(|(time, beside)| replication.record_step(time, beside));
            }
            if to_send > 0.0 && sending_until <= now {
                replication.replicated(span(to_send), mono(now));
                to_send = 0.0;
            }
            if saves {
                (saved, offered) = (saved + 1, true);
            }
        }
        Went { cost: extra / now, sent, saved, per_second: replication.per_second() }
    }
}

#[test]
fn constant_replication_that_costs_an_eighth_is_limited_to_one_percent() {
    // A constant 1 GiB/s on a machine with two cores.
    let went = Job::of(0.05, 0.13, 0.5, 10).run(0.01, 20_000, 1);
    assert!((0.005..0.0125).contains(&went.cost), "{went:?}");
    assert!((0.11..0.15).contains(&went.per_second.unwrap()), "{went:?}");
    assert!(went.sent > went.saved / 20, "replication stopped: {went:?}");
    let unbounded = Job::of(0.05, 0.13, 0.5, 10).run(0.0, 20_000, 1);
    assert!(unbounded.cost > 0.1 && unbounded.sent + 1 >= unbounded.saved, "{unbounded:?}");
}

#[test]
fn replication_that_costs_nothing_is_not_delayed() {
    for (noise, seed) in [(0.0, 1), (0.01, 2), (0.05, 3), (0.3, 4)] {
        let went = Job { noise, ..Job::of(0.05, 0.0, 0.4, 10) }.run(0.01, 20_000, seed);
        assert!(went.sent as f64 > 0.97 * went.saved as f64, "noise {noise}: {went:?}");
    }
}

/// As in `xtask bench training`: 512 MiB every half second, on a shared machine.
fn noisy(cost_per_second: f64) -> Job {
    Job {
        noise: 0.08,
        after_save: 0.1,
        drift: 0.05,
        saving_s: (0.02, 0.02),
        reported_each_s: 1.0,
        ..Job::of(0.05, cost_per_second, 0.45, 10)
    }
}

#[test]
fn a_cost_below_the_noise_of_a_step_is_found_by_cycles_without_a_replica() {
    for seed in 1..=8 {
        let dear = noisy(0.05).run(0.01, 20_000, seed);
        assert!(dear.cost < 0.015, "seed {seed}: {dear:?}");
        assert!((0.03..0.07).contains(&dear.per_second.unwrap()), "seed {seed}: {dear:?}");
        let free = noisy(0.0).run(0.01, 20_000, seed);
        assert!(free.sent as f64 >= 0.95 * free.saved as f64, "seed {seed}: {free:?}");
    }
}

#[test]
fn expensive_but_rare_replication_is_not_delayed() {
    // Five seconds every ten minutes.
    let went = Job::of(1.0, 0.2, 5.0, 600).run(0.01, 60_000, 1);
    assert!(went.sent + 1 >= went.saved && went.cost < 0.002, "{went:?}");
}

#[test]
fn steps_of_ten_seconds_are_measured() {
    let went = Job::of(10.0, 0.1, 40.0, 6).run(0.01, 5_000, 1);
    assert!((0.004..0.02).contains(&went.cost), "{went:?}");
    let free = Job::of(10.0, 0.0, 40.0, 6).run(0.01, 5_000, 2);
    assert!(free.sent as f64 > 0.97 * free.saved as f64, "{free:?}");
}

#[test]
fn constant_replication_pauses_until_there_are_steps_to_compare_with() {
    // A transfer takes longer than the time to the next save, so no step is without replication.
    let went = Job::of(0.05, 0.2, 0.6, 10).run(0.01, 20_000, 1);
    assert!(went.per_second.is_some() && went.cost < 0.015, "{went:?}");
}

#[test]
fn steps_that_save_are_not_compared_with_steps_that_do_not() {
    // The step that saves takes 50 % longer, and only part of that is reported as saving. The transfer of the previous
    // save ends about when it starts.
    let saving_s = (0.025, 0.01);
    let went = Job { saving_s, ..Job::of(0.05, 0.0, 0.2, 5) }.run(0.01, 20_000, 1);
    assert!(went.sent as f64 > 0.95 * went.saved as f64, "{went:?}");
}

#[test]
fn evaluations_and_pauses_do_not_raise_the_cost() {
    let mut replication = ReplicationCost::new(0.01);
    let mut now = 1.0;
    let mut step = |replication: &mut ReplicationCost, took: f64, beside: f64| {
        let time = StepTime { start: mono(now), end: mono(now + took), saving: Span::default() };
        now += took;
        replication.record_step(time, span(beside));
    };
    (0..100).for_each(|_| step(&mut replication, 0.1, 0.0));
    (0..100).for_each(|_| step(&mut replication, 0.1, 0.1));
    step(&mut replication, 250.0, 0.1);
    assert!(replication.per_second().unwrap() < 0.02, "{replication:?}");
}

/// The cost for a job whose steps took twice as long during replication, and when the last one was complete, seconds.
fn with_expensive_replicas() -> (ReplicationCost, f64) {
    let mut replication = ReplicationCost::new(0.01);
    let mut now = 1.0;
    for beside in [0.0, 0.1] {
        for _ in 0..100 {
            let took = 0.1 + beside;
            let time = StepTime { start: mono(now), end: mono(now + took), saving: Span::default() };
            replication.record_step(time, span(beside));
            now += took;
        }
    }
    (replication, now)
}

#[test]
fn a_replica_is_sent_after_ten_minutes_however_high_the_cost() {
    let (mut replication, now) = with_expensive_replicas();
    assert_eq!(replication.holds(mono(now)), None);
    replication.replicated(span(3_600.0), mono(now));
    assert_eq!(replication.holds(mono(now)), Some(DelayReason::Spent));
    for second in 1..600 {
        let end = now + f64::from(second);
        let time = StepTime { start: mono(end - 0.2), end: mono(end), saving: Span::default() };
        replication.record_step(time, span(0.2));
        assert_eq!(replication.holds(mono(end)), Some(DelayReason::Spent), "{second}");
    }
    assert_eq!(replication.holds(mono(now + 601.0)), None);
}

#[test]
fn no_replica_waits_while_training_is_stopped() {
    let (mut replication, now) = with_expensive_replicas();
    replication.replicated(span(3_600.0), mono(now));
    assert_eq!(replication.holds(mono(now + 3.0)), Some(DelayReason::Spent));
    assert_eq!(replication.holds(mono(now + 4.0)), None);
}

#[test]
fn a_replica_that_was_left_out_is_sent_if_the_job_stops_saving() {
    let (mut replication, mut now) = (ReplicationCost::new(0.01), 1.0);
    let mut step = |replication: &mut ReplicationCost, saving: f64, beside: f64| {
        let time = StepTime { start: mono(now), end: mono(now + 0.1), saving: span(saving) };
        now += 0.1;
        replication.record_step(time, span(beside));
        now
    };
    // Cycles of 1 s, half of each with replication.
    let left_out = (0..100).find_map(|_| {
        let now = step(&mut replication, 0.05, 0.0);
        (0..5).for_each(|_| _ = step(&mut replication, 0.0, 0.1));
        (0..4).for_each(|_| _ = step(&mut replication, 0.0, 0.0));
        (replication.holds(mono(now)) == Some(DelayReason::Measurement)).then_some(now)
    });
    let left_out = left_out.expect("no replica was left out");
    let steps = (0..100).map(|_| step(&mut replication, 0.0, 0.0));
    let waits: Vec<f64> = steps.collect();
    let sent = waits.into_iter().find(|now| replication.holds(mono(*now)).is_none()).unwrap();
    assert!((3.0..6.0).contains(&(sent - left_out)), "left out at {left_out} s, sent at {sent} s");
}

#[test]
fn a_pause_of_training_adds_no_budget_and_replication_is_free_during_it() {
    let (mut replication, now) = with_expensive_replicas();
    replication.replicated(span(10.0), mono(now));
    let resumed = now + 300.0;
    assert_eq!(replication.replicated(span(100.0), mono(resumed - 100.0)), 0.0);
    let step = StepTime { start: mono(resumed), end: mono(resumed + 0.1), saving: Span::default() };
    replication.record_step(step, Span::default());
    assert_eq!(
        replication.holds(mono(resumed + 0.1)),
        Some(DelayReason::Spent),
        "only steps pay off what was spent before the pause"
    );
}

#[test]
fn steps_of_several_ranks_at_the_same_time_add_to_the_budget_once() {
    let earned = |ranks: usize| {
        let (mut replication, now) = with_expensive_replicas();
        replication.replicated(span(10.0), mono(now));
        let before = replication.left_s;
        for _ in 0..ranks {
            for step in 0..10 {
                let start = now + f64::from(step) * 0.1;
                let time = StepTime { start: mono(start), end: mono(start + 0.1), saving: Span::default() };
                replication.record_step(time, Span::default());
            }
        }
        replication.left_s - before
    };
    assert!(
        (earned(1) - 0.01).abs() < 1e-6 && (earned(8) - 0.01).abs() < 1e-6,
        "{} {}",
        earned(1),
        earned(8)
    );
}

#[test]
fn without_steps_there_is_no_cost() {
    let mut replication = ReplicationCost::new(0.01);
    for hour in 0..10 {
        let now = mono(f64::from(hour) * 3_600.0);
        assert_eq!(replication.holds(now), None);
        replication.replicated(span(1_800.0), now);
    }
    assert_eq!(replication.per_second(), None);
}

#[test]
fn a_clock_that_goes_back_and_steps_without_duration_are_tolerated() {
    let mut replication = ReplicationCost::new(0.01);
    let time = |start, end| StepTime { start: Mono(start), end: Mono(end), saving: Span(7) };
    replication.record_step(time(9, 3), Span(5));
    replication.record_step(time(5, 5), Span(0));
    replication.record_step(time(u64::MAX, 0), Span(u64::MAX));
    replication.record_step(time(0, u64::MAX), Span(u64::MAX));
    replication.replicated(Span(u64::MAX), Mono(u64::MAX));
    replication.holds(Mono(0));
    assert_eq!(replication.holds(Mono(1)), None);
}

//! The straggler judge on patterns of real traces: stages of different work, sequences of different lengths,
//! checkpoints and evaluation, several slow ranks, slowness that is intermittent or grows. Each has a counterpart
//! that must not be reported.

#![allow(clippy::panic, reason = "a panic is how a test reports")]

use mainstay_progress::straggler::{Change, Judge, Limits, Peers, Role, Row, Slow};
use mainstay_sim::random::Random;

const RANKS: usize = 16;
const STEPS: u64 = 240;

/// The reports with their steps, and the steps at which slowness was over.
#[derive(Debug, Default)]
struct Reported {
    found: Vec<(Slow, u64)>,
    over: Vec<(Slow, u64)>,
}

impl Reported {
    fn ranks(&self) -> Vec<u32> {
        let mut ranks: Vec<u32> = self
            .found
            .iter()
            .filter_map(|(slow, _)| if let Slow::Rank(rank) = slow { Some(*rank) } else { None })
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

/// Runs a job whose rank `rank` takes exp(excess(rank, step)) in each step, with 1 % of noise and a hiccup in 0.2 %
/// of steps.
fn run(roles: &[Role], seed: u64, mut excess: impl FnMut(usize, u64, &mut Random) -> f32) -> Reported {
    let mut random = Random::new(seed);
    let mut judge = Judge::new(Peers::new(roles.to_vec()), Limits::default());
    let (mut reported, mut changes) = (Reported::default(), Vec::new());
    for step in 1..=STEPS {
        let times: Vec<f32> = (0..roles.len())
            .map(|rank| {
                let hiccup = if random.happens(0.002) { 0.2 + random.unit() } else { 0.0 };
                (excess(rank, step, &mut random) + random.normals().0 * 0.01 + hiccup).exp()
            })
            .collect();
        changes.clear();
        judge.step(Row { step, self_times: &times, waits: &[], took: f32::NAN }, &mut changes);
        for change in &changes {
            match change {
                Change::Found(found) => reported.found.push((found.slow, step)),
                Change::Over { slow, .. } => reported.over.push((*slow, step)),
            }
        }
    }
    reported
}

fn alike() -> Vec<Role> {
    vec![Role::default(); RANKS]
}

/// Four stages of four ranks, on two hosts.
fn staged() -> Vec<Role> {
    let role = |rank: u32| Role { group: rank / 4, stage: Some(rank / 4), host: Some(rank / 8) };
    (0..RANKS as u32).map(role).collect()
}

#[test]
fn a_slow_rank_is_found_among_stages_of_different_work() {
    // The last stage does 8 % more work and the first 5 %: that is how the model is split, and a usual difference.
    let work = |rank: usize| [0.05, 0.0, 0.0, 0.08][rank / 4];
    for seed in 0..6 {
        let healthy = run(&staged(), seed, |rank, _, _| work(rank));
        assert_eq!(healthy.found, [], "seed {seed}");
        for slow in [5, 13] {
            let reported = run(&staged(), seed, |rank, step, _| {
                work(rank) + if rank == slow && step >= 60 { 0.08 } else { 0.0 }
            });
            assert_eq!(reported.ranks(), [slow as u32], "seed {seed}: {reported:?}");
        }
    }
}

#[test]
fn a_slow_rank_is_found_among_sequences_of_different_lengths() {
    for seed in 0..4 {
        let lengths = |random: &mut Random| random.normals().0 * 0.12;
        let healthy = run(&alike(), seed, |_, _, random| lengths(random));
        assert!(healthy.ranks().is_empty(), "seed {seed}: {healthy:?}");
        let reported = run(&alike(), seed, |rank, step, random| {
            lengths(random) + if rank == 3 && step >= 60 { 0.5 } else { 0.0 }
        });
        assert_eq!(reported.ranks(), [3], "seed {seed}: {reported:?}");
    }
}

#[test]
fn checkpoints_and_evaluation_neither_cause_nor_hide_a_slow_rank() {
    // Every 20 steps all ranks take three times as long and rank 0 four times. Every 50 steps some ranks evaluate.
    let phases = |rank: usize, step: u64| match (step % 20, step % 50) {
        (0, _) => 1.1 + if rank == 0 { 0.3 } else { 0.0 },
        (_, 25) if rank < 4 => 0.7,
        _ => 0.0,
    };
    for seed in 0..6 {
        let healthy = run(&alike(), seed, |rank, step, _| phases(rank, step));
        assert_eq!(healthy.found, [], "seed {seed}");
        let reported = run(&alike(), seed, |rank, step, _| {
            phases(rank, step) + if rank == 9 && step >= 62 { 0.06 } else { 0.0 }
        });
        assert_eq!(reported.ranks(), [9], "seed {seed}: {reported:?}");
        assert!(reported.found[0].1 <= 62 + 12, "seed {seed}: {reported:?}");
    }
}

#[test]
fn several_slow_ranks_are_all_named() {
    for seed in 0..6 {
        let slow = [2, 7, 11];
        let reported = run(&alike(), seed, |rank, step, _| {
            if slow.contains(&rank) && step >= 50 + 10 * rank as u64 { 0.10 } else { 0.0 }
        });
        assert_eq!(reported.ranks(), [2, 7, 11], "seed {seed}: {reported:?}");
    }
}

#[test]
fn intermittent_slowness_is_reported_each_time_and_is_over_in_between() {
    for seed in 0..6 {
        let slow = |step: u64| (60..100).contains(&step) || (160..200).contains(&step);
        let reported = run(&alike(), seed, |rank, step, _| if rank == 4 && slow(step) { 0.10 } else { 0.0 });
        assert_eq!(reported.ranks(), [4], "seed {seed}: {reported:?}");
        assert_eq!((reported.found.len(), reported.over.len()), (2, 2), "seed {seed}: {reported:?}");
        // Two slow steps now and then, of changing ranks, are not reported.
        let brief =
            run(
                &alike(),
                seed,
                |rank, step, _| {
                    if step % 15 < 2 && rank as u64 == (step / 15 * 7) % 16 { 0.3 } else { 0.0 }
                },
            );
        assert_eq!(brief.found, [], "seed {seed}");
    }
}

#[test]
fn a_gradually_slower_rank_is_reported_and_a_gradually_slower_job_is_not() {
    for seed in 0..6 {
        let ramp = |step: u64| (step.saturating_sub(60) as f32 / 60.0).min(1.0) * 0.12;
        let reported = run(&alike(), seed, |rank, step, _| if rank == 12 { ramp(step) } else { 0.0 });
        assert_eq!(reported.ranks(), [12], "seed {seed}: {reported:?}");
        assert!(reported.found[0].1 <= 120, "before it is at its worst; seed {seed}: {reported:?}");
        let all = run(&alike(), seed, |_, step, _| ramp(step));
        assert_eq!(all.found, [], "seed {seed}");
    }
}

#[test]
fn a_slow_host_is_reported_as_the_host_or_its_ranks_only() {
    let role = |rank: u32| Role { group: 0, stage: None, host: Some(rank / 8) };
    let hosts: Vec<Role> = (0..64).map(role).collect();
    for seed in 0..4 {
        let reported =
            run(&hosts, seed, |rank, step, _| if rank / 8 == 5 && step >= 60 { 0.10 } else { 0.0 });
        assert!(reported.found.iter().any(|(slow, _)| *slow == Slow::Host(5)), "seed {seed}: {reported:?}");
        assert!(reported.ranks().iter().all(|rank| rank / 8 == 5), "seed {seed}: {reported:?}");
        assert_eq!(run(&hosts, seed, |_, _, _| 0.0).found, [], "seed {seed}");
    }
}

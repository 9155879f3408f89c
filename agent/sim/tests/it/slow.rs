//! The straggler judge on simulated jobs. `cargo xtask bench judge` measures whole runs.

#![allow(clippy::panic, reason = "a panic is how a test reports")]

use mainstay_progress::straggler::Slow;
use mainstay_sim::course::{self, SlowRank, Weather};
use mainstay_sim::mesh::Mesh;
use mainstay_sim::random::Random;
use mainstay_sim::slow::{Noise, SlowFault, run};

const BEGINS: u64 = 30;

#[test]
fn a_rank_that_is_5_percent_slow_is_found_within_10_steps() {
    let mut random = Random::new(1);
    for ranks in [64, 1024] {
        let mesh = Mesh::usual(ranks);
        for trial in 0..40 {
            let slow = random.below(ranks);
            let score = run(mesh, Noise::USUAL, SlowFault::Rank(slow, 0.05), BEGINS, 60, trial);
            let steps = score.steps.unwrap_or_else(|| panic!("{ranks} ranks, trial {trial}: not found"));
            assert!(steps <= 10, "{ranks} ranks, trial {trial}: found after {steps} steps");
            assert_eq!(score.false_reports, [], "{ranks} ranks, trial {trial}");
        }
    }
}

#[test]
fn small_jobs_are_judged_too() {
    let mut random = Random::new(2);
    for ranks in [4, 8, 16] {
        let mesh = Mesh { tensor: ranks, pipeline: 1, data: 1 };
        let noise = Noise { lost: 0.0, silent_hosts: 0.0, ..Noise::USUAL };
        for trial in 0..60 {
            let slow = random.below(ranks);
            let score = run(mesh, noise, SlowFault::Rank(slow, 0.05), BEGINS, 60, trial);
            assert!(
                score.steps.is_some_and(|steps| steps <= 26),
                "{ranks} ranks, trial {trial}: {:?}",
                score.steps
            );
            assert_eq!(score.false_reports, [], "{ranks} ranks, trial {trial}");
        }
    }
}

#[test]
fn a_slow_host_is_reported_as_a_host() {
    for trial in 0..10 {
        let score =
            run(Mesh::usual(1024), Noise::USUAL, SlowFault::Host(trial, 0.08), BEGINS, 60, trial as u64);
        assert!(score.steps.is_some_and(|steps| steps <= 10), "{score:?}");
        assert_eq!(score.false_reports, []);
    }
}

#[test]
fn a_stage_with_more_work_is_not_a_slow_rank() {
    let mesh = Mesh { tensor: 8, pipeline: 4, data: 8 };
    for trial in 0..4 {
        let score = run(mesh, Noise::USUAL, SlowFault::Stage(trial, 0.25), 1, 60, trial as u64);
        assert!(score.steps.is_some(), "trial {trial}");
        assert_eq!(score.false_reports, []);
    }
}

#[test]
fn sequences_of_different_lengths_are_not_a_slow_rank() {
    for trial in 0..10 {
        let score = run(Mesh::usual(256), Noise::USUAL, SlowFault::Sequences(0.11), 1, 120, trial);
        assert!(score.steps.is_some(), "trial {trial}");
        assert_eq!(score.false_reports, []);
    }
}

#[test]
fn healthy_jobs_cause_no_reports() {
    // 200,000 rank-steps each, with noise of different kinds.
    for (seed, noise) in [
        Noise::USUAL,
        Noise { step: 0.03, ..Noise::USUAL },
        Noise { rank: 0.01, ..Noise::USUAL },
        Noise { outliers: 0.01, ..Noise::USUAL },
        Noise { lost: 0.3, silent_hosts: 0.2, ..Noise::USUAL },
    ]
    .into_iter()
    .enumerate()
    {
        let score = run(Mesh::usual(1024), noise, SlowFault::None, 1, 200, seed as u64);
        let reported: Vec<Slow> = score.false_reports.iter().map(|found| found.slow).collect();
        assert_eq!(reported, [], "{noise:?}: {:?}", score.false_reports);
    }
}

#[test]
fn the_same_seed_gives_the_same_judgements() {
    let once = || run(Mesh::usual(512), Noise::USUAL, SlowFault::Rank(77, 0.05), BEGINS, 60, 9);
    assert_eq!(once(), once());
}

/// The cost is how much shorter a step would be without the slow rank. This holds also for a pair, where half of the
/// ranks are slow, and if most of the remembered steps precede the slowness.
#[test]
fn the_cost_of_a_slow_rank_is_how_much_longer_it_makes_steps() {
    for ranks in [2, 3, 8, 64] {
        for (by, starts) in [(0.5, 1), (0.5, 80), (0.1, 80)] {
            let slow = SlowRank { rank: 1, starts, by };
            let reported = course::run(ranks, Weather::Carried(0.0), Some(slow), starts + 60, ranks as u64);
            let found = reported.right.unwrap_or_else(|| panic!("{ranks} ranks, {slow:?}: not found"));
            let cost =
                found.cost.unwrap_or_else(|| panic!("{ranks} ranks, {slow:?}: the steps' length is known"));
            // The next slowest rank is itself late by the noise of 1 %, and more so in larger jobs.
            let next = 1.0 + 0.01 * (2.0 * (ranks as f32).ln()).sqrt();
            let (most, least) = (1.0 - 1.0 / (1.0 + by), 1.0 - next / (1.0 + by));
            // In one of the eight steps a hiccup may have delayed another rank.
            assert!((least * 0.85 - 0.02..=most + 0.02).contains(&cost), "{ranks} ranks, {slow:?}: {cost}");
        }
    }
}

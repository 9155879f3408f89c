//! The straggler judge under the conditions of real jobs: hiccups, checkpoints of one rank, a drifting pace, lost
//! reports, few ranks.

#![allow(clippy::panic, reason = "a panic is how a test reports")]

use mainstay_progress::straggler::{Change, Judge, Limits, Peers, Row, Slow};
use mainstay_sim::random::Random;

/// A job of ranks with equal work and 1 % of noise.
#[derive(Clone, Copy, Debug)]
struct Shape {
    ranks: usize,
    /// Probability that a step of a rank takes 1.2 to 3.3 times as long.
    hiccups: f32,
    /// Share of reports that are lost.
    lost: f32,
    /// The share by which all ranks slow down from step to step.
    drift: f32,
    /// Rank 0 saves a checkpoint every N steps.
    checkpoint_every: u64,
}

const PLAIN: Shape = Shape { ranks: 8, hiccups: 0.002, lost: 0.0, drift: 0.0, checkpoint_every: u64::MAX };

/// The number of steps from when `slow` became 5 % slower until it was reported, if it was, and all other reports.
fn run(shape: Shape, slow: Option<usize>, seed: u64) -> (Option<u64>, Vec<Slow>) {
    const BEGINS: u64 = 30;
    let mut random = Random::new(seed);
    let mut judge = Judge::new(Peers::alike(shape.ranks), Limits::default());
    let (mut after, mut wrong, mut changes) = (None, Vec::new(), Vec::new());
    for step in 1..=150 {
        let pace = (step as f32 * shape.drift).exp();
        let times: Vec<f32> = (0..shape.ranks)
            .map(|rank| {
                let mut excess = random.normals().0 * 0.01;
                if random.happens(shape.hiccups) {
                    excess += 0.2 + random.unit();
                }
                if rank == 0 && step % shape.checkpoint_every == 0 {
                    excess += 1.5;
                }
                if Some(rank) == slow && step >= BEGINS {
                    excess += 0.05_f32.ln_1p();
                }
                if random.happens(shape.lost) { f32::NAN } else { pace * excess.exp() }
            })
            .collect();
        changes.clear();
        judge.step(Row { step, self_times: &times, waits: &[], took: f32::NAN }, &mut changes);
        for change in &changes {
            let Change::Found(found) = change else { continue };
            match found.slow {
                Slow::Rank(rank) if Some(rank as usize) == slow && step >= BEGINS => {
                    after.get_or_insert(step - BEGINS + 1);
                }
                other => wrong.push(other),
            }
        }
    }
    (after, wrong)
}

#[test]
fn hiccups_checkpoints_drift_and_lost_reports_are_not_reported() {
    for shape in [
        PLAIN,
        Shape { ranks: 2, ..PLAIN },
        Shape { ranks: 4, ..PLAIN },
        Shape { ranks: 32, hiccups: 0.02, ..PLAIN },
        Shape { ranks: 16, hiccups: 0.02, ..PLAIN },
        Shape { drift: 0.002, ..PLAIN },
        Shape { checkpoint_every: 10, ..PLAIN },
        Shape { lost: 0.2, ..PLAIN },
    ] {
        for seed in 0..6 {
            let (_, wrong) = run(shape, None, 100 + seed);
            assert_eq!(wrong, [], "{shape:?}, seed {seed}");
        }
    }
}

#[test]
fn a_rank_that_is_5_percent_slow_is_found_despite_other_variation() {
    for (shape, within) in [
        (PLAIN, 12),
        (Shape { ranks: 2, ..PLAIN }, 20),
        (Shape { ranks: 3, ..PLAIN }, 20),
        (Shape { ranks: 4, ..PLAIN }, 26),
        (Shape { ranks: 32, hiccups: 0.02, ..PLAIN }, 10),
        (Shape { drift: 0.002, ..PLAIN }, 12),
        (Shape { checkpoint_every: 10, ..PLAIN }, 16),
        (Shape { lost: 0.2, ..PLAIN }, 16),
    ] {
        for seed in 0..6 {
            let (after, wrong) = run(shape, Some(seed as usize % shape.ranks), seed);
            let after = after.unwrap_or_else(|| panic!("{shape:?}, seed {seed}: not found"));
            assert!(after <= within, "{shape:?}, seed {seed}: after {after} steps");
            assert_eq!(wrong, [], "{shape:?}, seed {seed}");
        }
    }
}

/// A few ranks give little information about what is usual, but the noise and past of each rank are analysed in full.
#[test]
fn in_small_jobs_most_ranks_that_become_5_percent_slow_are_found_within_10_steps() {
    for ranks in [2, 3, 4, 5, 8] {
        let (mut soon, mut wrong) = (0, 0);
        for seed in 0..100 {
            let (after, reported) = run(Shape { ranks, ..PLAIN }, Some(seed as usize % ranks), 500 + seed);
            soon += u32::from(after.is_some_and(|after| after <= 10));
            wrong += reported.len();
        }
        assert!(soon >= 96 && wrong == 0, "{ranks} ranks: {soon} of 100 within 10 steps, {wrong} wrong");
    }
}

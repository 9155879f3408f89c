//! Stragglers in small jobs: how many of the ranks that are 5 % slow are told within 10 steps, and how many reports are false,
//! under noise that depends on the step before. `cargo run --release -p mainstay-sim --example small -- TRIALS`.

use mainstay_core::straggler::{Change, Judge, Limits, Peers, Row, Slow};
use mainstay_sim::random::Random;

/// Noise of a rank: from step to step 1 %, of which this share is carried over.
#[derive(Clone, Copy, Debug)]
struct Noise {
    carried: f32,
    hiccups: f32,
}

struct Ranks {
    noise: Noise,
    random: Random,
    level: Vec<f32>,
}

impl Ranks {
    fn new(ranks: usize, noise: Noise, seed: u64) -> Ranks {
        let mut random = Random::new(seed);
        let level = (0..ranks).map(|_| random.normals().0).collect();
        Ranks { noise, random, level }
    }

    fn step(&mut self, slow: Option<usize>) -> Vec<f32> {
        let Noise { carried, hiccups } = self.noise;
        let fresh = (1.0 - carried * carried).sqrt();
        let random = &mut self.random;
        self.level
            .iter_mut()
            .enumerate()
            .map(|(rank, level)| {
                *level = carried * *level + fresh * random.normals().0;
                let mut excess = *level * 0.01;
                if random.happens(hiccups) {
                    excess += 0.2 + random.unit();
                }
                if Some(rank) == slow {
                    excess += 0.05_f32.ln_1p();
                }
                excess.exp()
            })
            .collect()
    }
}

/// Steps from the beginning of the trouble until it is told, if it is; and false reports.
fn run(
    ranks: usize,
    noise: Noise,
    begins: u64,
    steps: u64,
    slow: Option<usize>,
    seed: u64,
) -> (Option<u64>, u64) {
    let mut job = Ranks::new(ranks, noise, seed);
    let mut judge = Judge::new(Peers::alike(ranks), Limits::default());
    let (mut after, mut wrong, mut changes) = (None, 0, Vec::new());
    for step in 1..=steps {
        let self_times = job.step(slow.filter(|_| step >= begins));
        changes.clear();
        judge.step(Row { step, self_times: &self_times, waits: &[], took: f32::NAN }, &mut changes);
        for change in &changes {
            match change {
                Change::Found(found)
                    if slow.is_some_and(|rank| found.slow == Slow::Rank(rank as u32)) && step >= begins =>
                {
                    after.get_or_insert(step - begins + 1);
                }
                Change::Found(found) => {
                    wrong += 1;
                    if std::env::var_os("SHOW").is_some() {
                        eprintln!("{ranks} ranks, {noise:?}, seed {seed}, step {step}: {found:?}");
                    }
                }
                Change::Over { .. } => {}
            }
        }
    }
    (after, wrong)
}

fn main() {
    let trials: u64 = std::env::args().nth(1).and_then(|trials| trials.parse().ok()).unwrap_or(200);
    for begins in [30_u64, 80] {
        for ranks in [2_usize, 3, 4, 8, 16] {
            for carried in [0.0, 0.5, 0.8] {
                let noise = Noise { carried, hiccups: 0.002 };
                let (mut soon, mut late, mut wrong) = (0, 0, 0);
                for seed in 0..trials {
                    let (after, false_reports) =
                        run(ranks, noise, begins, begins + 40, Some(seed as usize % ranks), seed);
                    soon += u64::from(after.is_some_and(|after| after <= 10));
                    late += u64::from(after.is_some());
                    wrong += false_reports;
                }
                println!(
                    "{ranks} ranks, {carried} carried, from step {begins}: {soon} of {trials} within 10, {late} in all, {wrong} wrong"
                );
            }
        }
    }
    for ranks in [2_usize, 3, 4, 8, 16] {
        for (carried, hiccups) in [(0.0, 0.002), (0.5, 0.002), (0.8, 0.002), (0.95, 0.002), (0.5, 0.02)] {
            let noise = Noise { carried, hiccups };
            // Many short jobs and a long one: beginnings are the hardest.
            let short: u64 =
                (0..trials * 20).map(|seed| run(ranks, noise, 0, 200, None, 7_000_000 + seed).1).sum();
            let long: u64 =
                (0..8).map(|seed| run(ranks, noise, 0, trials * 250, None, 9_000_000 + seed).1).sum();
            let steps = ranks as f64 * trials as f64;
            println!(
                "{ranks} ranks, {carried} carried, hiccups {hiccups}: {short} false in {:.1e} rank-steps of short jobs, {long} in {:.1e} of long ones",
                steps * 4000.0,
                steps * 2000.0
            );
        }
    }
}

//! Stragglers in the weather of real jobs: how many ranks that become 5 % slow are reported within 10 steps, how
//! accurate these reports are, and how many reports are false. `cargo run --release -p mainstay-sim --example small
//! -- TRIALS [RANKS [WEATHER]]`.

use mainstay_sim::course::{SimulationResult, SlowRank, Weather, run};

const SIZES: [usize; 7] = [2, 3, 4, 8, 16, 64, 1024];

fn main() {
    let mut arguments = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let trials: u64 = arguments.next().unwrap_or(200);
    let only = arguments.next().map(|ranks| ranks as usize);
    let kind = std::env::args().nth(3);
    let wanted = |weather: &Weather| kind.as_ref().is_none_or(|kind| format!("{weather:?}").contains(kind));
    for ranks in SIZES.into_iter().filter(|ranks| only.is_none_or(|only| only == *ranks)) {
        // Large jobs need fewer runs.
        let trials = (trials * 16 / ranks.max(16) as u64).max(4);
        for weather in Weather::ALL.into_iter().filter(wanted) {
            slow_ranks(ranks, weather, trials);
        }
        for weather in Weather::ALL.into_iter().filter(wanted) {
            healthy(ranks, weather, trials);
        }
    }
}

fn slow_ranks(ranks: usize, weather: Weather, trials: u64) {
    for starts in [30, 80] {
        let (mut soon, mut late, mut wrong, mut right) = (0, 0, 0, Vec::new());
        for seed in 0..trials {
            let slow = SlowRank { rank: (seed % ranks as u64) as usize, starts, by: 0.05 };
            let reported = run(ranks, weather, Some(slow), starts + 60, seed);
            soon += u64::from(reported.after.is_some_and(|after| after <= 10));
            late += u64::from(reported.after.is_some());
            wrong += reported.wrong.len();
            right.extend(reported.right.clone());
            show(ranks, weather, seed, &reported);
        }
        let mut since: Vec<u64> = right.iter().map(|found| found.since.abs_diff(starts)).collect();
        since.sort_unstable();
        let near = since.iter().filter(|away| **away <= 3).count();
        println!(
            "{ranks} ranks, {weather:?}, from step {starts}: {soon} of {trials} within 10 steps, {late} within 60, {wrong} wrong; since right within 3 steps in {near}"
        );
    }
}

fn healthy(ranks: usize, weather: Weather, trials: u64) {
    // Many short jobs and a long one: the first steps are the hardest.
    let mut wrong = 0;
    for seed in 0..trials * 20 {
        let reported = run(ranks, weather, None, 200, 7_000_000 + seed);
        wrong += reported.wrong.len();
        show(ranks, weather, seed, &reported);
    }
    let long = run(ranks, weather, None, trials * 2000, 9_000_000);
    show(ranks, weather, 0, &long);
    let steps = ranks as f64 * trials as f64;
    println!(
        "{ranks} ranks, {weather:?}: {wrong} false in {:.1e} rank-steps of short jobs, {} in {:.1e} of a long one",
        steps * 4000.0,
        long.wrong.len(),
        steps * 2000.0
    );
}

fn show(ranks: usize, weather: Weather, seed: u64, reported: &SimulationResult) {
    if std::env::var_os("SHOW").is_some() {
        for found in &reported.wrong {
            eprintln!("{ranks} ranks, {weather:?}, seed {seed}: {found:?}");
        }
    }
}

//! The straggler judge in the weather of real jobs: noise that is correlated between steps, heavy tails, phases of
//! the whole job, duties and pauses of single ranks, warm-up. No rank is reported that is not slow, and slow ranks
//! are still reported. The example `small` runs the same with larger numbers.

use mainstay_sim::course::{SlowRank, Weather, run};

/// The number of false reports in `jobs` healthy jobs of 200 steps.
fn false_reports(ranks: usize, weather: Weather, jobs: u64) -> usize {
    (0..jobs).map(|seed| run(ranks, weather, None, 200, 100 + seed).wrong.len()).sum()
}

/// The number of jobs, out of `jobs`, in which a rank that becomes 5 % slow is reported within `steps` steps.
fn told_within(steps: u64, ranks: usize, weather: Weather, jobs: u64) -> u64 {
    let reported = |seed: &u64| {
        let slow = SlowRank { rank: (*seed % ranks as u64) as usize, starts: 80, by: 0.05 };
        run(ranks, weather, Some(slow), 80 + steps, *seed).after.is_some_and(|after| after <= steps)
    };
    (0..jobs).filter(reported).count() as u64
}

#[test]
fn noise_that_carries_over_between_steps_is_not_slowness() {
    for (ranks, carried) in [(2, 0.5), (2, 0.8), (4, 0.8), (8, 0.95)] {
        assert_eq!(
            false_reports(ranks, Weather::Carried(carried), 40),
            0,
            "{ranks} ranks, {carried} carried"
        );
    }
}

/// Healthy pairs in which correlated noise made one rank seem slow when the judge required no more than for
/// independent noise.
#[test]
fn correlated_noise_in_a_pair_is_not_reported() {
    for seed in [
        0, 367, 931, 1252, 1560, 1893, 1929, 1943, 2039, 2174, 2184, 2340, 2393, 2596, 3196, 3221, 3908, 3911,
    ] {
        let reported = run(2, Weather::Carried(0.8), None, 200, 7_000_000 + seed);
        assert_eq!(reported.wrong, [], "{seed}");
    }
}

/// In a pair, only the past shows how large the noise is. While the job as a whole changes its pace, as in warm-up
/// and between phases, the past says little.
#[test]
fn in_a_pair_no_rank_is_reported_while_the_job_changes_its_pace() {
    for weather in [Weather::WarmUp, Weather::Regimes] {
        assert_eq!(false_reports(2, weather, 300), 0, "{weather:?}");
    }
}

#[test]
fn no_rank_is_reported_in_any_weather() {
    for weather in Weather::ALL {
        for ranks in [4, 16] {
            let reported = false_reports(ranks, weather, 4);
            assert_eq!(reported, 0, "{ranks} ranks, {weather:?}");
        }
    }
}

#[test]
fn in_small_jobs_with_independent_noise_slow_ranks_are_reported_within_10_steps() {
    for ranks in [2, 3, 4, 8] {
        let reported = told_within(10, ranks, Weather::Carried(0.0), 60);
        assert!(reported >= 58, "{ranks} ranks: {reported} of 60");
    }
}

#[test]
fn in_most_weather_a_slow_rank_is_reported_within_40_steps() {
    for weather in [
        Weather::Carried(0.3),
        Weather::Carried(0.5),
        Weather::HeavyTails,
        Weather::Duty(25),
        Weather::Pauses,
        Weather::WarmUp,
        Weather::LateStart,
    ] {
        let reported = told_within(40, 8, weather, 20);
        assert!(reported >= 19, "{weather:?}: {reported} of 20");
    }
}

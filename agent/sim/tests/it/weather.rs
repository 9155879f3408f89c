//! The judge of stragglers in the weather of real jobs: noise that is carried from step to step, heavy tails, phases of the whole job, duties and
//! pauses of single ranks, beginnings. Nobody is told who is not slow, and who is slow is told all the same. Larger numbers of the same: the
//! example `small`.

use mainstay_sim::course::{SlowRank, Weather, run};

/// False reports in so many healthy jobs of 200 steps.
fn false_reports(ranks: usize, weather: Weather, jobs: u64) -> usize {
    (0..jobs).map(|seed| run(ranks, weather, None, 200, 100 + seed).wrong.len()).sum()
}

/// Of so many jobs in which a rank becomes 5 % slow: in how many it is told within the steps.
fn told_within(steps: u64, ranks: usize, weather: Weather, jobs: u64) -> u64 {
    let reported = |seed: &u64| {
        let slow = SlowRank { rank: (*seed % ranks as u64) as usize, starts: 80, by: 0.05 };
        run(ranks, weather, Some(slow), 80 + steps, *seed).after.is_some_and(|after| after <= steps)
    };
    (0..jobs).filter(reported).count() as u64
}

#[test]
fn noise_that_is_carried_from_step_to_step_is_no_slowness() {
    for (ranks, carried) in [(2, 0.5), (2, 0.8), (4, 0.8), (8, 0.95)] {
        assert_eq!(
            false_reports(ranks, Weather::Carried(carried), 40),
            0,
            "{ranks} ranks, {carried} carried"
        );
    }
}

/// Healthy pairs in whose moods one seemed slow when no more was asked for than of noise that is not carried.
#[test]
fn moods_of_a_pair_condemn_nobody() {
    for seed in [
        0, 367, 931, 1252, 1560, 1893, 1929, 1943, 2039, 2174, 2184, 2340, 2393, 2596, 3196, 3221, 3908, 3911,
    ] {
        let reported = run(2, Weather::Carried(0.8), None, 200, 7_000_000 + seed);
        assert_eq!(reported.wrong, [], "{seed}");
    }
}

/// In a pair only the past tells how noisy it is. While the job as a whole changes its pace, as it does when it warms up and from one
/// phase to the next, the past tells little.
#[test]
fn in_a_pair_nobody_is_told_while_the_job_changes_its_pace() {
    for weather in [Weather::WarmUp, Weather::Regimes] {
        assert_eq!(false_reports(2, weather, 300), 0, "{weather:?}");
    }
}

#[test]
fn nobody_is_told_whatever_the_weather() {
    for weather in Weather::ALL {
        for ranks in [4, 16] {
            let reported = false_reports(ranks, weather, 4);
            assert_eq!(reported, 0, "{ranks} ranks, {weather:?}");
        }
    }
}

#[test]
fn in_small_jobs_whose_noise_is_not_carried_slow_ranks_are_told_within_10_steps() {
    for ranks in [2, 3, 4, 8] {
        let reported = told_within(10, ranks, Weather::Carried(0.0), 60);
        assert!(reported >= 58, "{ranks} ranks: {reported} of 60");
    }
}

#[test]
fn a_slow_rank_is_told_in_any_weather_a_little_later() {
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

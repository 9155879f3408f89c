//! Series with known noise, and what is learned from them.

use super::super::history::History;
use super::*;

/// Scores of ranks in order, and what was learned from them so far.
struct Series {
    history: History,
    carried: NoiseModel,
    moods: Vec<f32>,
    seed: u64,
}

impl Series {
    fn new(ranks: usize) -> Series {
        Series {
            history: History::new(ranks),
            carried: NoiseModel::new(ranks),
            moods: vec![0.0; ranks],
            seed: 20_261_122,
        }
    }

    /// Approximately normal: the sum of twelve uniform values.
    fn normal(&mut self) -> f32 {
        let mut even = || {
            self.seed =
                self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.seed >> 40) as f32 / (1_u64 << 24) as f32
        };
        (0..12).map(|_| even()).sum::<f32>() - 6.0
    }

    /// Adds `steps` steps of this noise, of which a share is carried over to the next step. `level` is added to it.
    fn steps(
        &mut self,
        steps: usize,
        noise: f32,
        share: f32,
        level: impl Fn(usize, usize) -> f32,
    ) -> &mut Series {
        for _ in 0..steps {
            let step = self.history.seen();
            for rank in 0..self.moods.len() {
                let fresh = self.normal();
                let mood = &mut self.moods[rank];
                *mood = share * *mood + (1.0 - share * share).sqrt() * fresh;
            }
            let moods = self.moods.iter().enumerate();
            let scores: Vec<f32> = moods.map(|(rank, mood)| noise * mood + level(step, rank)).collect();
            self.history.push(step as u64, &scores, noise);
            self.carried.push(&self.history, noise);
        }
        self
    }

    fn of_mean(&self, steps: usize) -> f32 {
        self.carried.of_mean(steps) / MIDDLE_HALF
    }
}

fn alike(_step: usize, _rank: usize) -> f32 {
    0.0
}

fn about(value: f32, expected: f32) -> bool {
    (0.8..1.25).contains(&(value / expected))
}

#[test]
fn an_unknown_job_is_assumed_to_have_the_usual_noise() {
    let usual = (1.0 + 2.0 * USUALLY_CARRIED).sqrt() * USUAL_NOISE / 8.0_f32.sqrt();
    assert!(about(Series::new(64).of_mean(8), usual));
}

#[test]
fn independent_noise_scatters_less_in_a_mean_of_more_steps() {
    let mut series = Series::new(8);
    series.steps(400, 0.02, 0.0, alike);
    for steps in [8, 16, 32] {
        let of_mean = series.of_mean(steps);
        assert!(about(of_mean, 0.02 / (steps as f32).sqrt()), "{steps} steps: {of_mean}");
    }
}

#[test]
fn correlated_noise_makes_eight_steps_little_more_than_one_sample() {
    let mut series = Series::new(8);
    series.steps(600, 0.02, 0.9, alike);
    // The variance of the mean of eight values of which 0.9 is carried over is 0.74 of that of one.
    assert!(about(series.of_mean(8), 0.86 * 0.02), "{}", series.of_mean(8));
}

#[test]
fn permanent_differences_between_ranks_are_no_noise() {
    let mut series = Series::new(8);
    series.steps(400, 0.02, 0.0, |_, rank| rank as f32 * 0.1);
    assert!(about(series.of_mean(8), 0.02 / 8.0_f32.sqrt()), "{}", series.of_mean(8));
}

#[test]
fn a_rank_that_becomes_slow_does_not_raise_its_own_noise() {
    let mut series = Series::new(2);
    series.steps(200, 0.01, 0.0, alike);
    let before = series.of_mean(8);
    let mut most = 0.0_f32;
    for _ in 0..80 {
        series.steps(1, 0.01, 0.0, |_, rank| if rank == 1 { 0.04 } else { -0.04 });
        most = most.max(series.of_mean(8) / before);
    }
    assert!(most < 1.4, "{most} times what it was");
}

#[test]
fn single_hiccups_are_no_scatter_of_the_level() {
    let mut series = Series::new(8);
    series.steps(400, 0.01, 0.0, |step, rank| if (step * 7 + rank * 13) % 50 == 0 { 0.5 } else { 0.0 });
    assert!(about(series.of_mean(8), 0.01 / 8.0_f32.sqrt()), "{}", series.of_mean(8));
}

#[test]
fn a_noisy_start_is_soon_forgotten() {
    let mut series = Series::new(8);
    series.steps(48, 0.10, 0.0, alike).steps(96, 0.01, 0.0, alike);
    assert!(series.of_mean(8) < 1.5 * 0.01 / 8.0_f32.sqrt(), "{}", series.of_mean(8));
    // Lasting noise is not forgotten.
    let mut series = Series::new(8);
    series.steps(144, 0.10, 0.0, alike);
    assert!(about(series.of_mean(8), 0.10 / 8.0_f32.sqrt()), "{}", series.of_mean(8));
}

#[test]
fn increased_noise_is_detected_before_it_is_learned() {
    let mut series = Series::new(8);
    series.steps(200, 0.01, 0.0, alike);
    let usually = series.carried.wilder(&series.history, 8);
    assert!(usually < 1.2, "{usually}");
    series.steps(8, 0.03, 0.0, alike);
    let wilder = series.carried.wilder(&series.history, 8);
    assert!(wilder > 1.8, "{wilder}");
}

#[test]
fn the_less_is_known_the_more_deviations_are_required() {
    let sure = |steps| Series::new(2).steps(steps, 0.01, 0.0, alike).carried.sure(5.2);
    let (nothing, little, much) = (sure(0), sure(60), sure(400));
    assert!(nothing > little && little > much && much > 5.2, "{nothing}, {little}, {much}");
    assert!(much < 5.6 && nothing > 5.8, "{nothing}, {much}");
    // Correlated steps contain less information.
    let carried = Series::new(2).steps(400, 0.01, 0.9, alike).carried.sure(5.2);
    assert!(carried > much * 1.1, "{carried}");
}

#[test]
fn earlier_runs_count_until_this_run_has_learned() {
    let mut series = Series::new(8);
    series.carried.recall(0.05);
    assert!(series.of_mean(8) > 0.9 * 0.05 / 8.0_f32.sqrt(), "{}", series.of_mean(8));
    series.steps(400, 0.01, 0.0, alike);
    assert!(series.of_mean(8) < 2.0 * 0.01 / 8.0_f32.sqrt(), "{}", series.of_mean(8));
}

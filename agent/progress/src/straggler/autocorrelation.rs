//! Autocorrelation of the noise: the scatter of a mean over several steps.
//!
//! Real step times drift: warm devices, page caches, neighbors on a host. Eight similar steps may then be one sample
//! of the same condition, so a mean of eight contains less information than eight independent values. The correlation
//! is learned per job from the differences between ranks' scores and their own scores some steps before (the
//! variogram). Permanent differences between ranks cancel out.

use super::history::{CLIP_UNITS, History, ROWS};
use super::score::{median, spread_around_median};

/// The newest steps are left out: a rank that becomes slow now must not raise its own noise.
const DELAY: usize = 8;

/// Bands of lags: 1, 2, 3-4, 5-8, 9-16, 17-32, 33-55.
const BANDS: usize = 7;
const LAST_LAG: usize = ROWS - DELAY - 1;

/// After this many steps an observation counts for a third.
const MEMORY: f32 = 512.0;

/// The first steps, in which ranks warm up at different paces, are compared only with each other.
const WARM: usize = 16;

/// With more ranks than this, only every n-th is sampled.
const SAMPLE: usize = 128;

/// A difference is clipped at this many times its usual size, and ignored above the second factor: hiccups are not
/// scatter of the level.
const CLIP: f32 = 3.5;
const HICCUP: f32 = 5.0;

/// The assumption for an unknown job: noise of 1 %, weighted like this many steps, of which this share is carried
/// over.
const USUAL_NOISE: f32 = 0.01;
const BELIEVED_STEPS: f32 = 45.0;
const USUALLY_CARRIED: f32 = 0.1;
const CARRIED_STEPS: f32 = 6.0;

/// A rank has a new level if its last eight scores are this many deviations from the eight before.
const NEW_LEVEL: f32 = 2.5;

/// If the last steps scatter by no more than this share of the known noise, the earlier noise is over and is soon
/// forgotten.
const CALM: f32 = 0.85;
const FORGETS: f32 = 0.3;

/// When the whole job changes its pace, noise may grow by this factor. The assumption is weighted like this many
/// steps.
const MAY_RISE: f32 = 3.0;
const DOUBTED_STEPS: f32 = 6.0;

/// A change of the noise is detected in this many last steps.
const WINDOW: usize = 8;

/// The mean of the middle half of values scatters by this factor more than the mean of all.
const MIDDLE_HALF: f32 = 1.05;

/// The learned noise of one job.
#[derive(Clone, Debug)]
pub(super) struct NoiseModel {
    /// Half of the squared differences, by band: their sum and their number.
    squares: [f32; BANDS],
    pairs: [f32; BANDS],
    /// Steps that were added, with exponential decay.
    steps: f32,
    /// The number of independent series: of two ranks, each is the other's mirror.
    series: f32,
    /// The assumption before any observation: a variance of scores, and its weight in steps.
    believed: (f32, f32),
    learned: Learned,
    /// Nothing is learned from the first `began` steps: the job was different then.
    began: usize,
    /// For each sampled rank: how many steps had been seen when it reached its present level.
    level_since: Vec<usize>,
}

/// What the differences show.
#[derive(Clone, Copy, Debug)]
struct Learned {
    /// The variance of a score around its rank's level.
    variance: f32,
    /// The correlation of scores at each band of lags.
    correlation: [f32; BANDS],
    /// The number of independent values that this is based on.
    rests_on: f32,
}

impl NoiseModel {
    /// Nothing seen yet.
    pub(super) fn new(ranks: usize) -> NoiseModel {
        let series = (ranks.max(2) - 1) as f32;
        // The peers' median is noisy too.
        let variance = USUAL_NOISE * USUAL_NOISE * (1.0 + 1.2 / series).min(2.0);
        let mut carried = NoiseModel {
            squares: [0.0; BANDS],
            pairs: [0.0; BANDS],
            steps: 0.0,
            series: series.min(SAMPLE as f32),
            believed: (variance, BELIEVED_STEPS),
            learned: Learned { variance, correlation: [0.0; BANDS], rests_on: BELIEVED_STEPS },
            began: 0,
            level_since: vec![WARM; ranks.div_ceil(ranks / SAMPLE + 1)],
        };
        carried.learn();
        carried
    }

    /// Sets the noise of scores in earlier runs.
    pub(super) fn recall(&mut self, noise: f32) {
        self.believed = (noise * noise, 3.0 * BELIEVED_STEPS);
        self.learn();
    }

    /// The job has changed since the first `began` steps: its noise is learned again, and may be much greater than
    /// before.
    pub(super) fn doubt(&mut self, began: usize) {
        let rise = MAY_RISE * MAY_RISE;
        // A repeated doubt before anything is learned does not raise the assumption again.
        let usual =
            if self.began > 0 && self.steps < 1.0 { self.believed.0 / rise } else { self.learned.variance };
        self.believed = (usual * rise, DOUBTED_STEPS);
        (self.squares, self.pairs, self.steps) = ([0.0; BANDS], [0.0; BANDS], 0.0);
        self.began = began;
        self.learn();
    }

    /// Adds the step that was pushed last. `noise` is the usual size of a score.
    pub(super) fn push(&mut self, history: &History, noise: f32) {
        let Some(last) = history.row(DELAY) else { return };
        let newest = history.seen() - DELAY;
        if newest <= self.began {
            return;
        }
        let stride = last.len() / SAMPLE + 1;
        let usual = 2.0 * self.learned.variance.max(noise * noise);
        let (bound, hiccup) = (usual * CLIP * CLIP, usual * HICCUP * HICCUP);
        // The start is forgotten soon.
        let age = history.seen() - self.began;
        let mut keep = 1.0 - 1.0 / (age as f32 / 2.0).clamp(WARM as f32, MEMORY);
        if history.seen().is_multiple_of(3 * WINDOW) && self.is_calm(history, last.len()) {
            keep = FORGETS;
            let since = history.seen() - 3 * WINDOW;
            self.level_since.iter_mut().for_each(|began| *began = since.max(*began));
        }
        self.note_new_levels(history, stride);
        self.steps = self.steps * keep + 1.0;
        let ranks = last.len().div_ceil(stride) as f32;
        for band in 0..BANDS {
            let (mut sum, mut pairs) = (0.0, 0_u32);
            for lag in lags(band) {
                let Some(before) = history.row(DELAY + lag).filter(|_| newest > self.began + lag) else {
                    break;
                };
                let both = last.iter().zip(before).step_by(stride).zip(&self.level_since);
                for ((now, then), since) in both {
                    // A change from one level to another is not scatter.
                    let of_one_level = newest <= *since || newest - lag > *since;
                    if of_one_level
                        && let Some(moved) = History::difference(*now, *then)
                        && moved * moved < hiccup
                    {
                        sum += (moved * moved).min(bound);
                        pairs += 1;
                    }
                }
            }
            let share = 1.0 / (lags(band).count() as f32 * ranks);
            self.squares[band] = self.squares[band] * keep + sum * share / 2.0;
            self.pairs[band] = self.pairs[band] * keep + pairs as f32 * share;
        }
        self.learn();
    }

    /// Notes which ranks have reached a new level within the last steps.
    fn note_new_levels(&mut self, history: &History, stride: usize) {
        let ((last, steps), (twice, both)) = (history.sums(0), history.sums(1));
        if both != 2 * steps {
            return;
        }
        let bar = NEW_LEVEL * CLIP_UNITS * steps as f32;
        let sums = last.iter().zip(twice).step_by(stride).zip(&mut self.level_since);
        for ((last, twice), since) in sums {
            let moved = 2 * i32::from(*last) - i32::from(*twice);
            if moved.abs() as f32 > bar && history.seen() > *since + 2 * steps {
                *since = history.seen() - steps;
            }
        }
    }

    /// Computes the result from the differences. Bands with few observations follow from those before.
    fn learn(&mut self) {
        let (believed, worth) = self.believed;
        let mut level = believed;
        let mut levels = [0.0; BANDS];
        for (band, kept) in levels.iter_mut().enumerate() {
            let known = self.pairs[band] * self.series;
            // Distant values are rarer.
            let weight = known / (1.0 + lags(band).end as f32 / 8.0);
            let seen = if self.pairs[band] > 0.0 { self.squares[band] / self.pairs[band] } else { level };
            level = (seen * weight + level * worth) / (weight + worth);
            *kept = level;
        }
        // If it still rises at the end, it continues to rise.
        let rises = (levels[BANDS - 1] - levels[BANDS - 2]).max(0.0);
        let variance = (level + rises).max(1e-8);
        let mut correlation = [0.0; BANDS];
        let mut before = 1.0_f32;
        let mut repeated = 1.0;
        for (band, kept) in correlation.iter_mut().enumerate() {
            let known = 2.0 * self.pairs[band] * self.series / lags(band).end as f32;
            let expected = if band == 0 { USUALLY_CARRIED } else { before * before };
            let seen = if self.pairs[band] > 0.0 {
                1.0 - self.squares[band] / self.pairs[band] / variance
            } else {
                expected
            };
            let now =
                ((seen * known + expected * CARRIED_STEPS) / (known + CARRIED_STEPS)).clamp(0.0, before);
            *kept = now;
            repeated += 2.0 * lags(band).count() as f32 * now * now;
            before = now;
        }
        self.learned = Learned {
            variance,
            correlation,
            rests_on: (worth + self.steps * self.series) / repeated.powf(1.5),
        };
    }

    /// Whether ranks scatter much less around their own median than known: they have warmed up.
    fn is_calm(&self, history: &History, ranks: usize) -> bool {
        let scatter_of = |rank| {
            let mut scores: Vec<f32> = history.last(rank, 3 * WINDOW).map(|(_, score)| score).collect();
            (scores.len() > 2 * WINDOW).then(|| spread_around_median(&mut scores))
        };
        let sample = (0..ranks as u32).step_by(ranks / SAMPLE + 1);
        let mut scatters: Vec<f32> = sample.filter_map(scatter_of).collect();
        let of_mean = (self.of_mean(3 * WINDOW) / MIDDLE_HALF).powi(2);
        let usually = (self.learned.variance - of_mean).max(0.0).sqrt();
        // NaN if nothing is known: that is not calm.
        median(&mut scatters) < usually * CALM / (1.0 + 0.5 / self.series.sqrt())
    }

    /// By what factor the last steps scatter more than known, beyond chance with so few values: noise may change.
    pub(super) fn wilder(&self, history: &History, ranks: usize) -> f32 {
        let usually = (2.0 * self.learned.variance * (1.0 - self.learned.correlation[0]).max(0.02)).sqrt();
        let over = |window: usize, without_the_farthest: f32, allowed: f32| {
            let unrest_of = |rank| {
                let scores: Vec<f32> = history.last(rank, window).map(|(_, score)| score).collect();
                (scores.len() > window / 2).then(|| unrest(&scores))
            };
            let sample = (0..ranks as u32).step_by(ranks / SAMPLE + 1);
            let mut moves: Vec<f32> = sample.filter_map(unrest_of).collect();
            let usually = usually * without_the_farthest * (1.0 + allowed / self.series.sqrt());
            // NaN if nothing is known: then the factor is 1.
            (median(&mut moves) / usually).max(1.0)
        };
        over(WINDOW, 0.5, 0.8).max(over(3 * WINDOW, 0.65, 0.2))
    }

    /// The share of a score that is carried over to the next step.
    pub(super) fn carried_over(&self) -> f32 {
        self.learned.correlation[0]
    }

    /// The standard deviation of the mean of `steps` scores of a rank around its level.
    pub(super) fn of_mean(&self, steps: usize) -> f32 {
        let n = steps as f32;
        let mut inflated = 1.0;
        for band in 0..BANDS {
            for lag in lags(band).take_while(|lag| *lag < steps) {
                inflated += 2.0 * (1.0 - lag as f32 / n) * self.learned.correlation[band];
            }
        }
        MIDDLE_HALF * (self.learned.variance * inflated / n).sqrt()
    }

    /// How many standard deviations are as certain as `sure` with exactly known noise: Student's t, within a few
    /// percent.
    pub(super) fn sure(&self, sure: f32) -> f32 {
        let freedom = self.learned.rests_on;
        let nearly = (8.0 * freedom + 1.0) / (8.0 * freedom + 3.0);
        (freedom * ((sure * sure / freedom / nearly / nearly).exp() - 1.0)).sqrt()
    }
}

/// The mean distance of values from the one before. The two farthest do not count: a hiccup comes and goes.
fn unrest(values: &[f32]) -> f32 {
    let mut moves: Vec<f32> = values.windows(2).map(|pair| (pair[1] - pair[0]).abs()).collect();
    moves.sort_unstable_by(f32::total_cmp);
    moves.truncate(moves.len().saturating_sub(2).max(1));
    moves.iter().sum::<f32>() / moves.len().max(1) as f32
}

/// The lags of a band, in steps.
fn lags(band: usize) -> std::ops::Range<usize> {
    match band {
        0 => 1..2,
        band => (1 << (band - 1)) + 1..((1 << band) + 1).min(LAST_LAG + 1),
    }
}

#[cfg(test)]
mod tests;

//! How noise is carried from step to step: what a mean of some steps scatters by.
//!
//! Real step times drift: warm devices, page caches, neighbours on a host. Eight steps that look alike may then be one look at the
//! same mood, so a mean of eight says less than eight independent values would. This is learned per job from how ranks' scores differ
//! from their own ones some steps before (the variogram). What ranks differ by for good drops out of a difference.

use super::history::{CLIP_UNITS, History, ROWS};
use super::score::{median, spread_around_median};

/// The newest steps are left out: a rank that becomes slow now must not speak for its own noise.
const DELAY: usize = 8;

/// Bands of lags: 1, 2, 3-4, 5-8, 9-16, 17-32, 33-55.
const BANDS: usize = 7;
const LAST_LAG: usize = ROWS - DELAY - 1;

/// After so many steps what was seen counts for a third.
const MEMORY: f32 = 512.0;

/// The first steps, in which ranks warm up at paces of their own, are compared among each other only.
const WARM: usize = 16;

/// Of more ranks than this, every so many are looked at.
const SAMPLE: usize = 128;

/// A difference counts at most this many times its usual size, and above so many times not at all: hiccups are no scatter of the level.
const CLIP: f32 = 3.5;
const HICCUP: f32 = 5.0;

/// What is believed of a job of which nothing is known: noise of 1 % as if seen in so many steps, of which this much is carried over.
const USUAL_NOISE: f32 = 0.01;
const BELIEVED_STEPS: f32 = 45.0;
const USUALLY_CARRIED: f32 = 0.1;
const CARRIED_STEPS: f32 = 6.0;

/// A rank whose last eight scores are so many deviations from the eight before has a new level.
const NEW_LEVEL: f32 = 2.5;

/// Where the last steps scatter by no more than this share of what is known, what was before is over, and is soon forgotten.
const CALM: f32 = 0.85;
const FORGETS: f32 = 0.3;

/// Where the job as a whole changes its pace, noise may become so many times as much: that is believed as if seen in so many steps.
const MAY_RISE: f32 = 3.0;
const DOUBTED_STEPS: f32 = 6.0;

/// Whether noise has changed is seen from so many of the last steps.
const WINDOW: usize = 8;

/// The mean of the middle half of values scatters by so much more than that of all.
const MIDDLE_HALF: f32 = 1.05;

/// What is known of the noise of one job.
#[derive(Clone, Debug)]
pub(super) struct Carried {
    /// Half of the squared differences, by band: their sum and their number.
    squares: [f32; BANDS],
    pairs: [f32; BANDS],
    /// Steps that were taken in, forgotten with time.
    steps: f32,
    /// Independent series: of two ranks, each is the other's mirror.
    series: f32,
    /// What is believed before anything is seen: a variance of scores, as if seen in so many steps.
    believed: (f32, f32),
    learned: Learned,
    /// Nothing is learned from the first so many steps: the job was another one.
    began: usize,
    /// Of the ranks looked at: how many steps were seen when each came to its present level.
    level_since: Vec<usize>,
}

/// What the differences come to.
#[derive(Clone, Copy, Debug)]
struct Learned {
    /// The variance of a score around its rank's level.
    variance: f32,
    /// The correlation of scores that are so far apart, by band.
    correlation: [f32; BANDS],
    /// How many independent values that rests on.
    rests_on: f32,
}

impl Carried {
    /// Nothing seen yet.
    pub(super) fn new(ranks: usize) -> Carried {
        let series = (ranks.max(2) - 1) as f32;
        // The peers' median is noisy too.
        let variance = USUAL_NOISE * USUAL_NOISE * (1.0 + 1.2 / series).min(2.0);
        let mut carried = Carried {
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

    /// Takes in how noisy scores were in earlier runs.
    pub(super) fn recall(&mut self, noise: f32) {
        self.believed = (noise * noise, 3.0 * BELIEVED_STEPS);
        self.learn();
    }

    /// The job is another one since the first `began` steps: its noise is learned anew, and may be much more than it was.
    pub(super) fn doubt(&mut self, began: usize) {
        let rise = MAY_RISE * MAY_RISE;
        // Who doubts again before anything is learned doubts no more than before.
        let usual =
            if self.began > 0 && self.steps < 1.0 { self.believed.0 / rise } else { self.learned.variance };
        self.believed = (usual * rise, DOUBTED_STEPS);
        (self.squares, self.pairs, self.steps) = ([0.0; BANDS], [0.0; BANDS], 0.0);
        self.began = began;
        self.learn();
    }

    /// Takes in the step that was pushed last. `noise` is the usual size of a score.
    pub(super) fn push(&mut self, history: &History, noise: f32) {
        let Some(last) = history.row(DELAY) else { return };
        let newest = history.seen() - DELAY;
        if newest <= self.began {
            return;
        }
        let stride = last.len() / SAMPLE + 1;
        let usual = 2.0 * self.learned.variance.max(noise * noise);
        let (bound, hiccup) = (usual * CLIP * CLIP, usual * HICCUP * HICCUP);
        // Beginnings are soon forgotten.
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
                    // From one level to another is no scatter.
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

    /// Which ranks have come to a new level within the last steps.
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

    /// What the differences come to: bands of which little is known follow from those before.
    fn learn(&mut self) {
        let (believed, worth) = self.believed;
        let mut level = believed;
        let mut levels = [0.0; BANDS];
        for (band, kept) in levels.iter_mut().enumerate() {
            let known = self.pairs[band] * self.series;
            // Values that are far apart are fewer.
            let weight = known / (1.0 + lags(band).end as f32 / 8.0);
            let seen = if self.pairs[band] > 0.0 { self.squares[band] / self.pairs[band] } else { level };
            level = (seen * weight + level * worth) / (weight + worth);
            *kept = level;
        }
        // What still rises at the end will rise on.
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

    /// Whether ranks scatter much less around their own middle than is known: they have warmed up.
    fn is_calm(&self, history: &History, ranks: usize) -> bool {
        let scatter_of = |rank| {
            let mut scores: Vec<f32> = history.last(rank, 3 * WINDOW).map(|(_, score)| score).collect();
            (scores.len() > 2 * WINDOW).then(|| spread_around_median(&mut scores))
        };
        let sample = (0..ranks as u32).step_by(ranks / SAMPLE + 1);
        let mut scatters: Vec<f32> = sample.filter_map(scatter_of).collect();
        let of_mean = (self.of_mean(3 * WINDOW) / MIDDLE_HALF).powi(2);
        let usually = (self.learned.variance - of_mean).max(0.0).sqrt();
        // Not a number where nothing is known: that is no calm.
        median(&mut scatters) < usually * CALM / (1.0 + 0.5 / self.series.sqrt())
    }

    /// By how many times the last steps scatter more than is known, beyond what chance makes of so few values: noise may change.
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
            // Not a number where nothing is known: nothing is wilder then.
            (median(&mut moves) / usually).max(1.0)
        };
        over(WINDOW, 0.5, 0.8).max(over(3 * WINDOW, 0.65, 0.2))
    }

    /// Which share of a score is carried over to the next step.
    pub(super) fn carried_over(&self) -> f32 {
        self.learned.correlation[0]
    }

    /// The standard deviation of the mean of so many scores of a rank around its level.
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

    /// How many of its standard deviations make as sure as `sure` would if noise were known exactly: Student's t, to a few percent.
    pub(super) fn sure(&self, sure: f32) -> f32 {
        let freedom = self.learned.rests_on;
        let nearly = (8.0 * freedom + 1.0) / (8.0 * freedom + 3.0);
        (freedom * ((sure * sure / freedom / nearly / nearly).exp() - 1.0)).sqrt()
    }
}

/// How far values are from the one before, on average; the farthest two do not count: a hiccup comes and goes.
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

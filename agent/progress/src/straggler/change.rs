//! Change-point detection: the point at which a series changed its level.
//!
//! Bayesian online change-point detection (Adams and MacKay, 2007) with a normal-gamma prior: after each value it has
//! the probability of each length of the current run. The predictive distribution is Student's t, so single outliers
//! do not end a run.

/// The probability of a change at each value: one in this many.
const RARITY: f64 = 250.0;

/// The longest run that is tracked; a longer one counts as this long.
const MAX_RUN_STEPS: usize = 400;

/// Tracks the last change of a series.
#[derive(Clone, Debug)]
pub struct ChangePoint {
    /// By run length: its probability.
    probability: Vec<f64>,
    mean: Vec<f64>,
    /// The number of values in the mean, including the prior.
    weight: Vec<f64>,
    shape: Vec<f64>,
    rate: Vec<f64>,
    prior: (f64, f64, f64, f64),
}

impl ChangePoint {
    /// A series without values. `level` and `noise` are rough estimates of the values and their scatter.
    pub fn new(level: f64, noise: f64) -> ChangePoint {
        // The prior has the weight of one value for the level, wide enough for any, and of two for the noise.
        let shape = 1.0;
        let prior = (level, 0.02, shape, shape * noise.max(1e-6).powi(2));
        let (mean, weight, shape, rate) = prior;
        ChangePoint {
            probability: vec![1.0],
            mean: vec![mean],
            weight: vec![weight],
            shape: vec![shape],
            rate: vec![rate],
            prior,
        }
    }

    /// Adds the next value.
    pub fn push(&mut self, value: f64) {
        let hazard = 1.0 / RARITY;
        let runs = self.probability.len();
        let mut grown = Vec::with_capacity(runs + 1);
        let mut changed = 0.0;
        for run in 0..runs {
            let joint = self.probability[run] * self.density(run, value);
            changed += joint * hazard;
            grown.push(joint * (1.0 - hazard));
        }
        grown.insert(0, changed);
        let total: f64 = grown.iter().sum();
        if total > 0.0 && total.is_finite() {
            grown.iter_mut().for_each(|probability| *probability /= total);
        } else {
            // No run explains this value at all: a new run starts.
            grown.iter_mut().for_each(|probability| *probability = 0.0);
            grown[0] = 1.0;
        }
        for run in 0..runs {
            let (weight, mean) = (self.weight[run], self.mean[run]);
            self.mean[run] = (weight * mean + value) / (weight + 1.0);
            self.weight[run] = weight + 1.0;
            self.shape[run] += 0.5;
            self.rate[run] += weight * (value - mean).powi(2) / (2.0 * (weight + 1.0));
        }
        let (mean, weight, shape, rate) = self.prior;
        self.mean.insert(0, mean);
        self.weight.insert(0, weight);
        self.shape.insert(0, shape);
        self.rate.insert(0, rate);
        self.probability = grown;
        if self.probability.len() > MAX_RUN_STEPS {
            let last = self.probability.pop().unwrap_or(0.0);
            if let Some(longest) = self.probability.last_mut() {
                *longest += last;
            }
            for column in [&mut self.mean, &mut self.weight, &mut self.shape, &mut self.rate] {
                column.truncate(MAX_RUN_STEPS);
            }
        }
    }

    /// The most likely number of values since the last change.
    pub fn run_length(&self) -> usize {
        let likeliest = self.probability.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
        likeliest.map_or(0, |(run, _)| run)
    }

    /// The density of `value` under the run: Student's t up to a factor that all runs of a length share.
    fn density(&self, run: usize, value: f64) -> f64 {
        let (shape, weight) = (self.shape[run], self.weight[run]);
        let freedom = 2.0 * shape;
        let scale2 = self.rate[run] * (weight + 1.0) / (shape * weight);
        let distance2 = (value - self.mean[run]).powi(2) / scale2;
        let log = ln_gamma(f64::midpoint(freedom, 1.0))
            - ln_gamma(freedom / 2.0)
            - 0.5 * (freedom * std::f64::consts::PI * scale2).ln()
            - f64::midpoint(freedom, 1.0) * (distance2 / freedom).ln_1p();
        log.exp()
    }
}

/// The index at which the current level of the series started; 0 if it never changed.
pub fn onset(values: &[f32], noise: f32) -> usize {
    let Some(first) = values.first() else { return 0 };
    let mut change = ChangePoint::new(f64::from(*first), f64::from(noise));
    (0..values.len()).for_each(|at| change.push(f64::from(without_outlier(values, at))));
    values.len().saturating_sub(change.run_length())
}

/// The median of a value and its neighbors: it removes a single outlier and keeps the start of a new level.
fn without_outlier(values: &[f32], at: usize) -> f32 {
    match (at.checked_sub(1).and_then(|before| values.get(before)), values.get(at + 1)) {
        (Some(before), Some(after)) => before.max(values[at].min(*after)).min(values[at].max(*after)),
        _ => values[at],
    }
}

/// ln of the gamma function by Stirling's series, to about 1e-8 for arguments of 0.5 and more.
fn ln_gamma(x: f64) -> f64 {
    let mut shift = 0.0;
    let mut x = x;
    while x < 7.0 {
        shift += x.ln();
        x += 1.0;
    }
    let series = 1.0 / (12.0 * x) - 1.0 / (360.0 * x.powi(3)) + 1.0 / (1260.0 * x.powi(5));
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series - shift
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(levels: &[(usize, f32)]) -> Vec<f32> {
        let mut wobble = 0_u32;
        let mut values = Vec::new();
        for (count, level) in levels {
            for _ in 0..*count {
                wobble = wobble.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                values.push(level + ((wobble >> 16) as f32 / 65536.0 - 0.5) * 0.02);
            }
        }
        values
    }

    #[test]
    fn the_onset_of_a_new_level_is_found() {
        let onset = onset(&series(&[(40, 0.0), (10, 0.3)]), 0.01);
        assert!((39..=41).contains(&onset), "{onset}");
    }

    #[test]
    fn a_level_that_never_changed_has_its_onset_at_the_start() {
        assert!(onset(&series(&[(60, 0.05)]), 0.01) <= 1);
    }

    #[test]
    fn a_single_outlier_is_no_new_level() {
        let mut values = series(&[(60, 0.0)]);
        values[50] = 0.5;
        assert!(onset(&values, 0.01) <= 1, "{}", onset(&values, 0.01));
    }

    #[test]
    fn the_gamma_function_is_correct() {
        assert!((ln_gamma(0.5) - 0.572_364_94).abs() < 1e-6 && (ln_gamma(5.0) - 24_f64.ln()).abs() < 1e-6);
    }
}

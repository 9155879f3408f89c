//! Finds values that are far above those of the last steps.

use std::collections::VecDeque;

/// The number of steps that are remembered.
const MAX_STEPS: usize = 64;

/// With fewer steps the usual value is unknown.
const MIN_STEPS: usize = 32;

/// A value this many deviations above the usual is a spike at once. A value half as far is one if the next is too.
const FAR: f64 = 20.0;

/// The last values of one series.
#[derive(Clone, Debug, Default)]
pub(super) struct Series {
    values: VecDeque<f64>,
    /// Whether the last value was halfway to a spike.
    halfway: bool,
}

/// A spike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spike {
    pub(super) value: f64,
    pub(super) usual: f64,
    pub(super) deviation: f64,
}

impl Series {
    /// Adds the next finite value. Returns a spike, if it is one. A distant value becomes usual only if it lasts.
    pub(super) fn push(&mut self, value: f64) -> Option<Spike> {
        let spike = self.judge(value);
        if self.values.len() == MAX_STEPS {
            self.values.pop_front();
        }
        self.values.push_back(value);
        spike
    }

    fn judge(&mut self, value: f64) -> Option<Spike> {
        let (usual, deviation) = self.usual()?;
        let excess = value - usual;
        let halfway = excess > FAR / 2.0 * deviation && excess > 0.2 * usual.abs();
        let far = excess > FAR * deviation && excess > usual.abs();
        let before = std::mem::replace(&mut self.halfway, halfway);
        (far || halfway && before).then_some(Spike { value, usual, deviation })
    }

    /// Robust median and standard deviation. `None` while there are too few values.
    fn usual(&self) -> Option<(f64, f64)> {
        if self.values.len() < MIN_STEPS {
            return None;
        }
        let middle = |values: &mut Vec<f64>| {
            let place = values.len() / 2;
            *values.select_nth_unstable_by(place, f64::total_cmp).1
        };
        let mut values: Vec<f64> = self.values.iter().copied().collect();
        let usual = middle(&mut values);
        values.iter_mut().for_each(|value| *value = (*value - usual).abs());
        // A series without noise (a toy) still has rounding.
        Some((usual, (middle(&mut values) * 1.4826).max(1e-3 * usual.abs()).max(1e-12)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(noise: f64) -> Series {
        let mut series = Series::default();
        let mut wobble = 1_u32;
        for step in 0..200 {
            wobble = wobble.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value =
                3.0 - f64::from(step) * 0.002 + (f64::from(wobble >> 8) / f64::from(1 << 24) - 0.5) * noise;
            assert_eq!(series.push(value), None, "step {step}");
        }
        series
    }

    #[test]
    fn a_spike_is_reported_at_once_if_it_is_far_and_otherwise_if_it_lasts() {
        assert!(series(0.1).push(9.0).is_some());
        let mut lasting = series(0.1);
        assert_eq!(lasting.push(4.0), None);
        assert!(lasting.push(4.0).is_some());
        let mut passing = series(0.1);
        assert_eq!((passing.push(4.0), passing.push(2.6), passing.push(4.0)), (None, None, None));
    }

    #[test]
    fn noise_and_falling_are_no_spikes_and_few_values_are_not_judged() {
        series(1.0);
        let mut young = Series::default();
        assert!((0..31).all(|step| young.push(if step == 30 { 1e9 } else { 1.0 }).is_none()));
    }
}

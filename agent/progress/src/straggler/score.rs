//! How much longer each rank took than its peers in one step, and the noise of that ratio.

use super::peers::Peers;

/// The median absolute deviation times this is the standard deviation of a normal distribution.
const MAD_TO_SIGMA: f32 = 1.4826;

/// Groups up to this size are compared without the rank itself: in a pair, half of its excess would be lost.
const SMALL_GROUP: usize = 16;

/// With more ranks than this, the spread is sampled: the result is the same to about one percent.
const SAMPLE: usize = 8192;

/// Working memory of [`score`], kept between steps.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    values: Vec<f32>,
}

/// Writes ln(self time of the rank / median self time of its peers) for each rank into `scores`, and the median self
/// time of each group into `medians`. NaN means unknown.
pub fn score(
    peers: &Peers,
    self_times: &[f32],
    scratch: &mut Scratch,
    scores: &mut [f32],
    medians: &mut [f32],
) {
    for (group, median_of_group) in peers.groups().zip(medians) {
        let values = &mut scratch.values;
        values.clear();
        values.extend(
            group
                .iter()
                .map(|rank| self_times[*rank as usize])
                .filter(|time| *time > 0.0 && time.is_finite()),
        );
        let small = values.len() <= SMALL_GROUP;
        *median_of_group = if small {
            values.sort_unstable_by(f32::total_cmp);
            middle(values)
        } else {
            median(values)
        };
        for rank in group {
            let time = self_times[*rank as usize];
            let known = time > 0.0 && time.is_finite() && values.len() > 1;
            let reference = if small { middle_without(values, time) } else { *median_of_group };
            scores[*rank as usize] = if known { (time / reference).ln() } else { f32::NAN };
        }
    }
}

/// The standard deviation of values around zero, by their median absolute value; zero if there are none.
pub fn spread(values: &[f32], scratch: &mut Scratch) -> f32 {
    let stride = values.len() / SAMPLE + 1;
    let sample = &mut scratch.values;
    sample.clear();
    sample.extend(values.iter().step_by(stride).filter(|value| !value.is_nan()).map(|value| value.abs()));
    if sample.is_empty() {
        return 0.0;
    }
    // The lower median: of two pairs with one apart, the quiet pair is the noise.
    let known = sample.len();
    let place = (known - 1) / 2;
    let (_, middle, _) = sample.select_nth_unstable_by(place, f32::total_cmp);
    *middle * MAD_TO_SIGMA * lower_middle(known)
}

/// The ratio of the lower median of few values to the true median, for scores of this many ranks: by simulation with
/// normal noise. For four ranks less, because a slow one among them moves the others' scores too.
fn lower_middle(values: usize) -> f32 {
    match values {
        4 => 1.4,
        6 => 1.34,
        n if n > 6 && n.is_multiple_of(2) => 1.0 + 1.8 / n as f32,
        _ => 1.0,
    }
}

/// The standard deviation of values around their own median; zero if there are none.
pub fn spread_around_median(values: &mut [f32]) -> f32 {
    if values.is_empty() {
        return 0.0;
    }
    let centre = median(values);
    values.iter_mut().for_each(|value| *value = (*value - centre).abs());
    median(values) * MAD_TO_SIGMA
}

/// The median; the order of the values is lost. NaN if there are none.
pub fn median(values: &mut [f32]) -> f32 {
    if values.is_empty() {
        return f32::NAN;
    }
    let even = values.len().is_multiple_of(2);
    let (below, upper, _) = values.select_nth_unstable_by(values.len() / 2, f32::total_cmp);
    let lower = below.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if even { f32::midpoint(lower, *upper) } else { *upper }
}

fn middle(sorted: &[f32]) -> f32 {
    match sorted.len() {
        0 => f32::NAN,
        n if n.is_multiple_of(2) => f32::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
        n => sorted[n / 2],
    }
}

/// The median of the others: of `sorted` without one value equal to `own`.
fn middle_without(sorted: &[f32], own: f32) -> f32 {
    let n = sorted.len();
    if n < 2 {
        return f32::NAN;
    }
    let place = sorted.partition_point(|value| *value < own).min(n - 1);
    // The value at `index` after removal of the one at `place`.
    let at = |index: usize| sorted[if index < place { index } else { index + 1 }];
    let left = n - 1;
    if left.is_multiple_of(2) { f32::midpoint(at(left / 2 - 1), at(left / 2)) } else { at(left / 2) }
}

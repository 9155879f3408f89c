//! How long something usually takes, in constant memory: a histogram whose buckets grow by two percent.

use mainstay_model::time::Span;

/// Shorter spans are all in one bucket.
const MIN_SPAN: Span = Span(1_000);
/// Each bucket is wider than the one before by this factor: the error of every quantile.
const GROWTH: f64 = 1.02;
/// Covers up to eleven days.
const BUCKETS: usize = 1_400;
/// At this many samples all counts are halved, so that a new pace of the job is learned.
const HALVE_AT: u64 = 1 << 16;

/// The distribution of a kind of span.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sketch {
    counts: Vec<u32>,
    total: u64,
    longest: Span,
}

impl Sketch {
    /// Adds one span.
    pub fn add(&mut self, span: Span) {
        if self.counts.is_empty() {
            self.counts = vec![0; BUCKETS];
        }
        if self.total >= HALVE_AT {
            self.halve();
        }
        self.counts[bucket(span)] += 1;
        self.total += 1;
        self.longest = self.longest.max(span);
    }

    /// The longest span that was added.
    pub fn longest(&self) -> Span {
        self.longest
    }

    /// The span that the fraction `q` of all samples does not exceed. At most two percent too long, never too short.
    pub fn quantile(&self, q: f64) -> Span {
        let wanted = ((self.total as f64 * q).ceil() as u64).clamp(1, self.total.max(1));
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= wanted && index < BUCKETS - 1 {
                return upper_edge(index).min(self.longest);
            }
        }
        self.longest
    }

    /// The median absolute deviation from the median, scaled to the standard deviation of a normal distribution.
    pub fn scaled_mad(&self) -> Span {
        let median = self.quantile(0.5);
        let mut distances: Vec<(u64, u32)> = self
            .counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(index, count)| (upper_edge(index).0.abs_diff(median.0), *count))
            .collect();
        distances.sort_unstable();
        let half = self.total.div_ceil(2);
        let mut seen = 0;
        for (distance, count) in distances {
            seen += u64::from(count);
            if seen >= half {
                return Span((distance as f64 * 1.4826) as u64);
            }
        }
        Span::default()
    }

    /// The buckets that are not empty, with their counts, scaled down to about `most` samples in total.
    pub(crate) fn parts(&self, most: u64) -> Vec<(u16, u32)> {
        let total = self.total.max(1);
        let scaled = |count: u32| match total <= most {
            true => count,
            // Rounded up, so that a single sample is not lost.
            false => u32::try_from((u64::from(count) * most).div_ceil(total)).unwrap_or(count),
        };
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        filled.filter_map(|(index, count)| Some((u16::try_from(index).ok()?, scaled(*count)))).collect()
    }

    /// Adds the [`parts`](Self::parts) of an earlier sketch. They do not include the longest span.
    pub(crate) fn add_parts(&mut self, parts: &[(u16, u32)]) {
        if self.counts.is_empty() {
            self.counts = vec![0; BUCKETS];
        }
        for (index, count) in parts {
            if let Some(slot) = self.counts.get_mut(usize::from(*index)) {
                *slot = slot.saturating_add(*count);
                self.total = self.total.saturating_add(u64::from(*count));
            }
        }
    }

    fn halve(&mut self) {
        // Rounded up, so that a single sample is not lost.
        for count in &mut self.counts {
            *count = count.div_ceil(2);
        }
        self.total = self.counts.iter().map(|count| u64::from(*count)).sum();
    }
}

fn bucket(span: Span) -> usize {
    if span <= MIN_SPAN {
        return 0;
    }
    let growths = (span.0 as f64 / MIN_SPAN.0 as f64).ln() / GROWTH.ln();
    (growths.ceil() as usize).min(BUCKETS - 1)
}

fn upper_edge(index: usize) -> Span {
    let index = i32::try_from(index).unwrap_or(i32::MAX);
    Span((MIN_SPAN.0 as f64 * GROWTH.powi(index)).ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sketch_of(millis: impl IntoIterator<Item = u64>) -> Sketch {
        let mut sketch = Sketch::default();
        for span in millis {
            sketch.add(Span::millis(span));
        }
        sketch
    }

    #[test]
    fn quantiles_are_at_most_two_percent_too_long() {
        let sketch = sketch_of(1..=1000);
        for (q, exact) in [(0.5, 500.0), (0.99, 990.0), (0.999, 999.0)] {
            let estimate = sketch.quantile(q).as_seconds() * 1e3;
            assert!(estimate >= exact && estimate <= exact * 1.021, "{q}: {estimate}");
        }
        assert_eq!(sketch.quantile(1.0), Span::millis(1000));
    }

    #[test]
    fn the_spread_of_a_narrow_distribution_is_narrow() {
        let sketch = sketch_of((0..500).flat_map(|_| [90, 100, 110]));
        let mad = sketch.scaled_mad().as_seconds() * 1e3;
        assert!((10.0..=20.0).contains(&mad), "{mad}");
    }

    #[test]
    fn a_new_pace_is_learned_and_the_longest_is_kept() {
        let mut sketch = sketch_of((0..70_000).map(|_| 10));
        sketch.add(Span::seconds(30));
        for _ in 0..300_000 {
            sketch.add(Span::millis(40));
        }
        assert!(sketch.quantile(0.5) >= Span::millis(40));
        assert_eq!(sketch.longest(), Span::seconds(30));
    }

    #[test]
    fn any_span_finds_a_bucket() {
        let sketch = sketch_of([0, u64::MAX]);
        assert_eq!(sketch.quantile(1.0), Span(u64::MAX));
    }
}

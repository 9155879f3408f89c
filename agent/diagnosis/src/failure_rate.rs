//! Finds hosts and devices that fail more often than their peers. A record relates incidents to the time of exposure, so that the most
//! used place is not blamed most. An incident of several places is shared among them.
//!
//! The rate of a place has a Gamma prior around the fleet's rate. With `n` incidents in time `T` the posterior is Gamma(a + n, a /
//! fleet + T). A place counts as faulty if its rate exceeds five times the fleet's with a probability of 95 %, after at least two
//! independent incidents.

use mainstay_model::time::{Mono, Span};

/// Shape of the prior: the fleet's rate weighs as much as half an incident.
const PRIOR_SHAPE: f64 = 0.5;
/// The limit, as a multiple of the fleet's rate.
const MAX_RATE_FACTOR: f64 = 5.0;
/// A place is reported from this probability on.
const MIN_PROBABILITY: f64 = 0.95;
/// Minimum number of incidents: a single one may be chance.
const MIN_INCIDENTS: u32 = 2;
/// Faults of one place within this time are one incident: errors come in bursts.
const BURST_PERIOD: Span = Span::seconds(3600);

/// Host faults per hour, from the daily rate of a large fleet (Meta, 2024).
pub const HOST_PER_HOUR: f64 = 6.5e-3 / 24.0;
/// The same for one of a host's eight GPUs.
pub const GPU_PER_HOUR: f64 = HOST_PER_HOUR / 8.0;

/// The incidents of one place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Incidents, each by its share of the blame.
    pub blame: f64,
    /// Incidents that involved the place.
    pub incidents: u32,
    last: Option<Mono>,
}

impl Record {
    /// Adds an incident at `at` that is shared by `among` places, including this one. Incidents of one burst count once. Returns
    /// whether it was counted.
    pub fn add(&mut self, at: Mono, among: usize) -> bool {
        let same_burst = self.last.is_some_and(|last| at <= last.after(BURST_PERIOD));
        self.last = self.last.max(Some(at));
        if !same_burst {
            self.incidents += 1;
            self.blame += 1.0 / among.max(1) as f64;
        }
        !same_burst
    }

    /// The probability that the place fails more than five times as often as the fleet, after `hours` of exposure.
    /// `per_hour` is the fleet's rate.
    pub fn suspicion(&self, hours: f64, per_hour: f64) -> f64 {
        if per_hour.is_nan() || per_hour <= 0.0 {
            return 0.0;
        }
        let rate = PRIOR_SHAPE / per_hour + hours.max(0.0);
        upper_gamma(PRIOR_SHAPE + self.blame, MAX_RATE_FACTOR * per_hour * rate)
    }

    /// Whether the place fails too often.
    pub fn fails_often(&self, hours: f64, per_hour: f64) -> bool {
        self.incidents >= MIN_INCIDENTS && self.suspicion(hours, per_hour) > MIN_PROBABILITY
    }
}

/// The regularized upper incomplete gamma function Q(shape, x): the probability that a Gamma variable of that shape exceeds x. Uses the
/// series below the mean and Lentz's continued fraction above it.
fn upper_gamma(shape: f64, x: f64) -> f64 {
    if x <= 0.0 {
        return 1.0;
    }
    let scale = (shape * x.ln() - x - ln_gamma(shape)).exp();
    let value = if x < shape + 1.0 {
        let (mut term, mut sum) = (1.0 / shape, 1.0 / shape);
        for n in 1..500 {
            term *= x / (shape + f64::from(n));
            sum += term;
            if term < sum * 1e-12 {
                break;
            }
        }
        1.0 - sum * scale
    } else {
        let tiny = 1e-300;
        let mut b = x + 1.0 - shape;
        let (mut c, mut d) = (1.0 / tiny, 1.0 / b);
        let mut fraction = d;
        for n in 1..500 {
            let a = -f64::from(n) * (f64::from(n) - shape);
            b += 2.0;
            d = 1.0 / (a * d + b).abs().max(tiny).copysign(a * d + b);
            c = b + a / c;
            fraction *= d * c;
            if (d * c - 1.0).abs() < 1e-12 {
                break;
            }
        }
        fraction * scale
    };
    value.clamp(0.0, 1.0)
}

/// The logarithm of the gamma function, by Lanczos' approximation.
fn ln_gamma(x: f64) -> f64 {
    const LANCZOS: [f64; 6] =
        [76.180_091_73, -86.505_320_33, 24.014_098_24, -1.231_739_572, 0.001_208_650_97, -0.000_005_395_24];
    let base = x + 5.5;
    let sum: f64 = (1..).zip(LANCZOS).map(|(n, factor)| factor / (x + f64::from(n))).sum();
    (x + 0.5) * base.ln() - base + (2.506_628_274_631 * (1.0 + sum) / x).ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hours(n: u64) -> Mono {
        Mono(n * 3_600_000_000_000)
    }

    fn record(times: u64, apart: u64) -> Record {
        let mut record = Record::default();
        (0..times).for_each(|n| {
            record.add(hours(n * apart), 1);
        });
        record
    }

    #[test]
    fn the_upper_gamma_function_is_right_where_it_is_known() {
        // For shape 1 it is exp(-x); for shape 1/2 at 1 it is 1 - erf(1).
        assert!((upper_gamma(1.0, 2.0) - (-2.0f64).exp()).abs() < 1e-6);
        assert!((upper_gamma(1.0, 0.3) - (-0.3f64).exp()).abs() < 1e-6);
        assert!((upper_gamma(0.5, 1.0) - 0.157_299_207).abs() < 1e-6);
        assert!((upper_gamma(5.0, 5.0) - 0.440_493_285).abs() < 1e-6);
    }

    #[test]
    fn many_incidents_in_little_time_make_a_lemon_and_the_same_in_years_do_not() {
        let often = record(6, 30);
        assert!(often.fails_often(200.0, GPU_PER_HOUR), "{}", often.suspicion(200.0, GPU_PER_HOUR));
        assert!(!often.fails_often(200_000.0, GPU_PER_HOUR));
        assert!(!record(1, 30).fails_often(1.0, GPU_PER_HOUR), "one incident may happen to anyone");
    }

    #[test]
    fn a_burst_is_one_incident() {
        let mut record = Record::default();
        assert!(record.add(Mono(0), 1));
        assert!(!record.add(Mono(1_000_000_000), 1));
        assert_eq!(record.incidents, 1);
    }

    proptest! {
        #[test]
        fn more_incidents_are_more_suspicious_and_more_time_less(
            times in 0u64..20, time in 0.0f64..100_000.0, more in 1.0f64..10_000.0, among in 1usize..64,
        ) {
            let less = record(times, 2).suspicion(time, HOST_PER_HOUR);
            prop_assert!((0.0..=1.0).contains(&less));
            prop_assert!(record(times + 1, 2).suspicion(time, HOST_PER_HOUR) + 1e-9 >= less);
            prop_assert!(record(times, 2).suspicion(time + more, HOST_PER_HOUR) <= less + 1e-9);
            let mut shared = record(times, 2);
            shared.add(hours(1_000), among);
            prop_assert!(shared.blame <= record(times + 1, 2).blame + 1e-9, "a shared incident blames less");
        }
    }
}

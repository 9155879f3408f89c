//! Computes how often to save: the cost of saves against the cost of work that a failure loses.
//!
//! Young (1974), for each tier: a save every t seconds costs its stall divided by t, and each failure that this tier
//! survives costs t/2 on average. The sum is minimal at the square root of twice the stall over the failure rate. If a
//! stall is longer than a tenth of the time between failures, Daly's (2006) higher-order formula is used.

/// The costs of one tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// How long training stops for one save, seconds.
    pub stall: f64,
    /// Time from the call until the step counts in this tier, seconds: it makes no sense to save more often.
    pub in_flight: f64,
    /// Failures per second for which this is the nearest tier that survives.
    pub failures: f64,
    /// Time until training resumes from it, seconds.
    pub restore: f64,
}

/// The advice for one tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Advice {
    /// Seconds from one save to the next; infinite if nothing fails.
    pub every: f64,
    /// The share of all time that saves, lost work and restores of this tier cost at this interval, from 0 to 1.
    pub cost: f64,
}

/// Failures per second after `count` failures in `seconds`. The prior, one failure in `guess` seconds, has the weight
/// of one failure: a job that has not failed yet may still fail.
pub fn rate(count: u32, seconds: f64, guess: f64) -> f64 {
    (1.0 + f64::from(count)) / (guess.max(1.0) + seconds.max(0.0))
}

/// The best interval for each tier, the nearest first. The interval of a tier is a multiple of the nearer tier's.
pub fn advise(tiers: &[Cost]) -> Vec<Advice> {
    let mut nearer = 0.0_f64;
    let advise = |cost_of_tier: &Cost| {
        let best = best(cost_of_tier).max(cost_of_tier.in_flight);
        let every = if nearer > 0.0 && best.is_finite() {
            // The multiple closest to the best interval, but not shorter than a step is in flight.
            (best / nearer).round().max((cost_of_tier.in_flight / nearer).ceil()).max(1.0) * nearer
        } else {
            best
        };
        nearer = if every.is_finite() { every } else { nearer };
        Advice { every, cost: cost(cost_of_tier, every) }
    };
    tiers.iter().map(advise).collect()
}

/// The cost of a save every `every` seconds, as a share of all time.
pub fn cost(tier: &Cost, every: f64) -> f64 {
    let saves = if every.is_finite() { tier.stall / every.max(f64::MIN_POSITIVE) } else { 0.0 };
    let lost =
        if tier.failures > 0.0 { tier.failures * (every / 2.0 + tier.in_flight + tier.restore) } else { 0.0 };
    (saves + lost).min(1.0)
}

fn best(tier: &Cost) -> f64 {
    if tier.failures <= 0.0 {
        return f64::INFINITY;
    }
    let between = 1.0 / tier.failures;
    let young = (2.0 * tier.stall.max(0.0) * between).sqrt();
    if tier.stall <= 0.1 * between {
        return young;
    }
    if tier.stall >= 2.0 * between {
        return between;
    }
    let part = tier.stall / (2.0 * between);
    young * (1.0 + part.sqrt() / 3.0 + part / 9.0) - tier.stall
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier(stall: f64, failures: f64) -> Cost {
        Cost { stall, in_flight: 0.0, failures, restore: 0.0 }
    }

    #[test]
    fn a_large_job_saves_often_to_near_tiers_and_rarely_to_far_ones() {
        // 2,048 hosts, each with a failure every 154 days. 40% leave the host intact, 1% take its neighbours too.
        let all = 2048.0 * 6.5e-3 / 86_400.0;
        let alone = |stall, share| advise(&[tier(stall, share * all)])[0].every;
        assert!((alone(0.02, 0.40) - 25.5).abs() < 0.1);
        assert!((alone(0.05, 0.59) - 33.2).abs() < 0.1);
        assert!((alone(1.0, 0.01) / 60.0 - 19.0).abs() < 0.1);
        let nested = advise(&[tier(0.02, 0.40 * all), tier(0.05, 0.59 * all), tier(1.0, 0.01 * all)]);
        assert!((nested[2].every / nested[1].every).fract().abs() < 1e-9, "{nested:?}");
        assert!(nested.iter().map(|advice| advice.cost).sum::<f64>() < 0.0065, "{nested:?}");
    }

    #[test]
    fn no_other_interval_costs_less_than_the_best() {
        for (stall, failures) in [(0.3, 1e-5), (20.0, 1e-4), (0.001, 1e-3)] {
            let costs = tier(stall, failures);
            let best = advise(&[costs])[0];
            for factor in [0.5, 0.9, 1.1, 2.0] {
                assert!(
                    cost(&costs, best.every * factor) >= best.cost * (1.0 - 1e-9),
                    "{costs:?} at {factor}"
                );
            }
        }
    }

    #[test]
    fn saves_are_no_faster_than_they_arrive_and_none_are_made_without_failures() {
        let slow = Cost { in_flight: 600.0, ..tier(0.1, 1e-4) };
        assert_eq!(advise(&[slow])[0].every, 600.0);
        let behind = Cost { in_flight: 610.0, ..tier(0.0, 1e-4) };
        assert_eq!(advise(&[slow, behind])[1].every, 1200.0);
        let never = advise(&[tier(1.0, 0.0), tier(0.02, 1e-4)]);
        assert!(never[0].every.is_infinite() && never[0].cost == 0.0 && never[1].every.is_finite());
    }

    #[test]
    fn a_job_that_has_not_failed_still_has_a_failure_rate() {
        let day = 86_400.0;
        assert!((rate(0, 0.0, day) * day - 1.0).abs() < 1e-9);
        assert!(rate(0, 9.0 * day, day) < rate(0, day, day));
        assert!((rate(9, 9.0 * day, day) * day - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_stall_longer_than_the_time_between_failures_does_not_panic() {
        let advised = advise(&[tier(5000.0, 1e-3), tier(200.0, 1e-3)]);
        assert_eq!(advised[0].every, 1000.0);
        assert!(advised.iter().all(|advice| advice.every > 0.0 && advice.cost <= 1.0), "{advised:?}");
    }
}

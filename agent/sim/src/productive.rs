//! The share of time in which a job trains. Failures occur at published rates, and each costs the measured time.

use crate::random::Random;

/// A kind of failure.
#[derive(Clone, Copy, Debug)]
pub struct Failure {
    /// Share of all failures.
    pub share: f64,
    /// Seconds until it is detected.
    pub detect: f64,
    /// Seconds from detection until all ranks train, without the time for communicators.
    pub restart: f64,
}

/// A job and its recovery. All times are in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Hosts.
    pub hosts: f64,
    /// Failures per host and day.
    pub rate: f64,
    /// The kinds of failures.
    pub failures: &'a [Failure],
    /// The time until ranks can exchange data after each start.
    pub communicators: f64,
    /// The time for which a save stops training.
    pub stall: f64,
    /// The time from a save until it can be loaded.
    pub saved_after: f64,
    /// The duration of a step.
    pub step: f64,
}

/// A part of a job from one failure to the next. All times are in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// When the failure before it occurred.
    pub failed_at: f64,
    /// From then until it was detected.
    pub detected_after: f64,
    /// When all ranks train; not before `ends` if the restart fails.
    pub trains_from: f64,
    /// When the next failure occurs, or the time is up.
    pub ends: f64,
    /// Seconds of steps, without saves.
    pub trained: f64,
    /// Of these, the ones that are not lost at its end.
    pub kept: f64,
}

impl Job<'_> {
    /// Seconds between two failures.
    pub fn apart(&self) -> f64 {
        86_400.0 / (self.hosts * self.rate)
    }

    /// The interval of saves: by Young's formula, rounded up to whole steps.
    pub fn saves_every(&self) -> f64 {
        let best = (2.0 * self.stall.max(1e-6) * self.apart()).sqrt().max(self.saved_after);
        (best / self.step).ceil().max(1.0) * self.step
    }

    /// The share of `days` days in which the job made steps that were kept. Failures occur in bursts: the times
    /// between them have a coefficient of variation of 5, as on Titan.
    pub fn productive(&self, days: f64, seed: u64) -> f64 {
        self.runs(days, seed).iter().map(|run| run.kept).sum::<f64>() / (days * 86_400.0)
    }

    /// The runs of the job from one failure to the next, in `days` days.
    pub fn runs(&self, days: f64, seed: u64) -> Vec<Run> {
        let mut random = Random::new(seed);
        let (end, every) = (days * 86_400.0, self.saves_every());
        let (mut now, mut runs) = (0.0, Vec::new());
        let mut fails_at = self.gap(&mut random);
        // The time at which training resumes after each restart.
        let mut trains_from = self.communicators;
        let mut cost = (0.0, self.communicators);
        while now < end {
            let mut run = Run {
                failed_at: now,
                detected_after: cost.0,
                trains_from,
                ends: fails_at.min(end),
                trained: 0.0,
                kept: 0.0,
            };
            if fails_at >= trains_from {
                let ran = fails_at.min(end) - trains_from;
                let saves = ((ran - self.saved_after).max(0.0) / (every + self.stall)).floor();
                run.trained = ran * every / (every + self.stall);
                // The last part of the run is not lost.
                run.kept = if fails_at < end { saves * every } else { run.trained };
            }
            runs.push(run);
            // A failure during a restart: the restart starts again.
            now = fails_at;
            cost = self.cost(&mut random);
            trains_from = now + cost.0 + cost.1;
            fails_at = now + self.gap(&mut random);
        }
        runs
    }

    /// Seconds until a failure is detected, and from then until all ranks train.
    fn cost(&self, random: &mut Random) -> (f64, f64) {
        let mut left = f64::from(random.unit());
        for failure in self.failures {
            left -= failure.share;
            if left <= 0.0 {
                return (failure.detect, failure.restart + self.communicators);
            }
        }
        (0.0, self.communicators)
    }

    /// The time to the next failure: log-normal with the mean of [`Job::apart`].
    fn gap(&self, random: &mut Random) -> f64 {
        let variance = 26_f64.ln();
        let normal = f64::from(random.normals().0);
        self.apart() * (variance.sqrt() * normal - variance / 2.0).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(failures: &[Failure]) -> Job<'_> {
        Job {
            hosts: 1000.0,
            rate: 0.0864,
            failures,
            communicators: 0.0,
            stall: 0.0,
            saved_after: 0.0,
            step: 1.0,
        }
    }

    #[test]
    fn a_failure_every_1000_s_that_costs_10_s_leaves_99_percent() {
        let failures = [Failure { share: 1.0, detect: 4.0, restart: 6.0 }];
        let job = job(&failures);
        assert!((job.apart() - 1000.0).abs() < 1e-6);
        let productive = job.productive(2000.0, 1);
        assert!((productive - 0.99).abs() < 0.003, "{productive}");
        assert_eq!(productive.to_bits(), job.productive(2000.0, 1).to_bits(), "same seed, same job");
    }

    #[test]
    fn more_expensive_saves_are_less_frequent() {
        let failures = [Failure { share: 1.0, detect: 0.0, restart: 0.0 }];
        let cheap = Job { stall: 0.02, ..job(&failures) };
        let dear = Job { stall: 20.0, ..job(&failures) };
        assert!(cheap.saves_every() < dear.saves_every());
        assert!(cheap.productive(100.0, 1) > dear.productive(100.0, 1));
    }
}

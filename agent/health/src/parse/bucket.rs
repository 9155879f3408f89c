//! A token bucket: lets the first lines of a storm pass and counts the rest.

use mainstay_model::time::{Mono, Span};

/// The rate at which lines pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Lines that may pass at once.
    pub burst: u32,
    /// The interval at which one more line may pass.
    pub every: Span,
}

/// A token bucket.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    tokens: u32,
    /// The time up to which tokens were added.
    filled: Mono,
    held_back: u64,
}

impl Bucket {
    /// Creates a full bucket.
    pub fn new(rate: Rate, now: Mono) -> Bucket {
        Bucket { tokens: rate.burst, filled: now, held_back: 0 }
    }

    /// Whether one more may pass. Counts it if not.
    pub fn pass(&mut self, rate: Rate, now: Mono) -> bool {
        let earned = now.since(self.filled).0.checked_div(rate.every.0).unwrap_or(u64::MAX);
        if earned > 0 {
            let room = u64::from(rate.burst.saturating_sub(self.tokens));
            self.tokens = self.tokens.saturating_add(u32::try_from(earned.min(room)).unwrap_or(u32::MAX));
            // The remaining time counts towards the next token, unless the bucket is full.
            let spent = if earned >= room {
                now
            } else {
                self.filled.after(Span(earned.saturating_mul(rate.every.0)))
            };
            self.filled = spent;
        }
        if self.tokens > 0 {
            self.tokens -= 1;
            return true;
        }
        self.held_back = self.held_back.saturating_add(1);
        false
    }

    /// Returns and resets the number of lines held back.
    pub fn take_held_back(&mut self) -> u64 {
        std::mem::take(&mut self.held_back)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RATE: Rate = Rate { burst: 3, every: Span::seconds(1) };

    #[test]
    fn a_storm_costs_its_first_lines_and_is_counted() {
        let mut bucket = Bucket::new(RATE, Mono(0));
        let passed = (0..1000).filter(|n| bucket.pass(RATE, Mono(n * 1000))).count();
        assert_eq!(passed, 3);
        assert_eq!(bucket.take_held_back(), 997);
        assert_eq!(bucket.take_held_back(), 0);
    }

    #[test]
    fn quiet_fills_it_up_again_and_no_further() {
        let mut bucket = Bucket::new(RATE, Mono(0));
        for _ in 0..4 {
            bucket.pass(RATE, Mono(0));
        }
        let later = Mono(0).after(Span::seconds(3600));
        assert_eq!((0..10).filter(|_| bucket.pass(RATE, later)).count(), 3);
    }

    proptest! {
        #[test]
        fn everything_passes_or_is_counted(times in prop::collection::vec(0u64..20_000_000_000, 0..200)) {
            let mut bucket = Bucket::new(RATE, Mono(0));
            let all = times.len() as u64;
            let last = times.iter().copied().max().unwrap_or(0);
            let passed = times.into_iter().filter(|at| bucket.pass(RATE, Mono(*at))).count() as u64;
            prop_assert_eq!(passed + bucket.take_held_back(), all);
            prop_assert!(passed <= 3 + last / 1_000_000_000 + 1);
        }
    }
}

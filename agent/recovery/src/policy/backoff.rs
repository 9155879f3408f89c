//! The delay of a restart. The first one has none. Those that follow without progress have, each longer than the one
//! before, and different for each job of a host.

use mainstay_model::time::Span;

/// The wait before the second restart without progress.
const FIRST: Span = Span::seconds(1);

/// The longest wait.
const MAX_WAIT: Span = Span::seconds(300);

/// The delay before a restart after `without_progress` others in a row that did not help: doubled each time, up to a
/// quarter shorter or longer by `seed`, which differs between jobs; in whole milliseconds.
pub fn wait(without_progress: u32, seed: u64) -> Span {
    let Some(doublings) = without_progress.checked_sub(1) else { return Span::default() };
    let full = FIRST.0.saturating_mul(1_u64.checked_shl(doublings).unwrap_or(u64::MAX)).min(MAX_WAIT.0);
    Span::millis((full as f64 / 1e6 * (1.0 + jitter(without_progress, seed))) as u64)
}

/// How much longer the delay after `without_progress` restarts is for this seed, as a fraction: from a quarter less
/// to a quarter more, in 512 steps.
fn jitter(without_progress: u32, seed: u64) -> f64 {
    (mixed(seed ^ u64::from(without_progress)) % 512) as f64 / 1024.0 - 0.25
}

/// The seed of a job, from its words.
pub fn seed<'a>(words: impl Iterator<Item = &'a str>) -> u64 {
    words.flat_map(str::bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| mixed(hash ^ u64::from(byte)))
}

/// SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
fn mixed(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_a_limit_and_differ_between_jobs() {
        assert_eq!(wait(0, 7), Span::default());
        for count in 1..80 {
            let full = (1_u64 << (count - 1).min(9)).min(300) as f64;
            let waited = wait(count, 7).as_seconds();
            assert!(waited >= full * 0.74 && waited <= full * 1.26, "{count}: {waited}");
        }
        let words = |name| seed([name].into_iter());
        assert_ne!(wait(3, words("a")), wait(3, words("b")));
        assert_eq!(wait(3, words("a")), wait(3, words("a")));
    }
}

//! How sure a judgement may say that it is: no surer than evidence of its weight was right.
//!
//! Of 878 public failures that a signature named which another batch of failures bears out, the share of right domains
//! followed the weight of the strongest piece of evidence and not the number of pieces: two weak ones that agree were right
//! less often (67 %) than their sum says (87 %). So the sum is bounded by what the strongest piece is worth. The bounds stand
//! some points below what was seen, since signatures were written with these failures in view.

use super::class::Class;
use super::vote::Vote;

/// Log-odds of the strongest piece of evidence, and how sure a judgement on it may be at most.
const BOUNDS: [(f64, f64); 8] =
    [(1.0, 0.55), (1.5, 0.62), (2.0, 0.66), (2.5, 0.72), (3.0, 0.78), (3.5, 0.84), (4.0, 0.91), (5.0, 0.96)];
/// What rests on learned words alone is no surer than this.
const ONLY_WORDS: f64 = 0.6;

/// The confidence in a class, from the probability that all evidence together gives it.
pub(super) fn of(probability: f64, class: Class, for_it: &[Vote]) -> f64 {
    if class == Class::Unknown {
        return probability;
    }
    let own = |vote: &Vote| {
        vote.classes().filter(|(of, _)| *of == class).map(|(_, weight)| weight).fold(0.0, f64::max)
    };
    let strongest = for_it.iter().map(own).fold(0.0, f64::max);
    let only_words = for_it.iter().all(|vote| vote.hint || vote.is_of_words());
    let bound = if only_words { ONLY_WORDS.min(bound(strongest)) } else { bound(strongest) };
    probability.min(bound)
}

/// The bound for the strongest piece of evidence: between the entries of the table in proportion.
fn bound(weight: f64) -> f64 {
    let above = BOUNDS.partition_point(|(of, _)| *of <= weight);
    match (above.checked_sub(1).map(|below| BOUNDS[below]), BOUNDS.get(above)) {
        (None, _) => BOUNDS[0].1,
        (Some((_, last)), None) => last,
        (Some((from, low)), Some((to, high))) => low + (high - low) * (weight - from) / (to - from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::attribution::judged;

    #[test]
    fn a_bound_grows_with_the_weight() {
        assert_eq!((bound(0.0), bound(4.0), bound(9.0)), (0.55, 0.91, 0.96));
        assert!((bound(2.25) - 0.69).abs() < 1e-9);
    }

    #[test]
    fn weak_pieces_that_agree_make_no_certainty_and_a_strong_one_does() {
        let strong = judged("NVRM: Xid (PCI:0000:3b:00): 79, pid=812, GPU has fallen off the bus.\n");
        assert!(strong.confidence > 0.9, "{}", strong.confidence);
        let weak = judged(
            "UCX ERROR connect to peer failed: Destination is unreachable\nConnectionError: [Errno 110] Connection timed out\n",
        );
        assert_eq!(weak.class, Class::Fabric);
        assert!(weak.confidence < 0.8, "{}", weak.confidence);
    }
}

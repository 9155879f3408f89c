//! Bounds the confidence of an attribution: no higher than the accuracy that evidence of its weight has shown.
//!
//! Measured on 878 public failures, with signatures that another batch of failures confirms: the share of right domains followed the
//! weight of the strongest piece of evidence and not the number of pieces. Two weak pieces that agree were right less often (67 %) than
//! their sum claims (87 %). The sum is therefore bounded by the strongest piece. The bounds are some points below the measurement,
//! since signatures were written with these failures in view.

use std::collections::BTreeSet;

use super::Evidence;
use super::class::Class;
use super::vote::Vote;
use mainstay_model::verdict::FaultDomain;

/// Log-odds of the strongest piece of evidence, and the maximum confidence with it.
const BOUNDS: [(f64, f64); 8] =
    [(1.0, 0.55), (1.5, 0.62), (2.0, 0.66), (2.5, 0.72), (3.0, 0.78), (3.5, 0.84), (4.0, 0.91), (5.0, 0.96)];
/// The maximum confidence from hints alone.
const MAX_CONFIDENCE_OF_HINTS: f64 = 0.6;
/// The maximum confidence from a single log line: nothing shows which rank followed which, and the same message has several causes.
const MAX_CONFIDENCE_OF_ONE_LINE: f64 = 0.88;
/// Added to the weight of evidence in a rank's own exit note for the bound: the note is what ended the rank that failed first, whereas
/// a line found in a log may be the wrong one.
const EXIT_NOTE_LOG_ODDS: f64 = 1.0;
/// Under the launcher the odds of a right domain are multiplied by this, compared with a log read afterwards: how and when each rank
/// ended is known, and lines from before healthy steps are left out. A hardware fault stays as certain as the device's own messages
/// make it. Chosen on the even programs of the live fault matrix (`cargo xtask bench verdicts`); its `verdict.live_calibration_ece`
/// covers the odd ones.
const LIVE_ODDS_FACTOR: f64 = 4.0;
/// The maximum confidence of an abstention. Of the failures without a cause in the log, people found the cause of half of the labelled
/// ones elsewhere, whatever the log says about consequences.
const MAX_CONFIDENCE_OF_AN_ABSTENTION: f64 = 0.5;
/// The odds of a right domain of a log read afterwards: this factor times the odds that the bounds allow, to this power. Fitted on 117
/// labelled failures (79 without memory of their source) and 334 texts that were written before the catalog was read. With each source
/// judged by a fit of the others, confidence and share of right answers differ by 0.03 instead of 0.06 for the labelled ones.
const AFTERWARDS_ODDS: (f64, f64) = (1.43, 1.35);
/// Pieces of evidence below this log-odds do not count as corroboration.
const MIN_CORROBORATING_LOG_ODDS: f64 = 1.0;

/// The confidence in a class, from its probability under all evidence.
pub(super) fn calibrated(probability: f64, class: Class, for_it: &[Vote], evidence: &Evidence) -> f64 {
    if class == Class::Unknown {
        return probability.min(MAX_CONFIDENCE_OF_AN_ABSTENTION);
    }
    let own = |vote: &Vote| {
        vote.classes().filter(|(other, _)| *other == class).map(|(_, weight)| weight).fold(0.0, f64::max)
    };
    let ended = |source: &usize| evidence.findings.get(*source).is_some_and(|findings| findings.ended);
    let of_own_end = |vote: &Vote| vote.spots.iter().any(|(source, _)| ended(source));
    let worth = |vote: &Vote| own(vote) + if of_own_end(vote) { EXIT_NOTE_LOG_ODDS } else { 0.0 };
    let strongest = for_it.iter().map(worth).fold(0.0, f64::max);
    let only_hints = for_it.iter().all(|vote| vote.hint);
    let corroborating: Vec<&Vote> =
        for_it.iter().filter(|vote| own(vote) >= MIN_CORROBORATING_LOG_ODDS).collect();
    let mut bound = bound(strongest);
    if only_hints {
        bound = bound.min(MAX_CONFIDENCE_OF_HINTS);
    }
    if distinct_lines(&corroborating) == 1 && !corroborating.iter().any(|vote| of_own_end(vote)) {
        bound = bound.min(MAX_CONFIDENCE_OF_ONE_LINE);
    }
    let sure = probability.min(bound);
    // Hints are no stronger in a live run.
    let is_surer = evidence.live && class.domain() != FaultDomain::Hardware;
    if is_surer && !only_hints { with_odds(sure, LIVE_ODDS_FACTOR) } else { sure }
}

/// The confidence that is reported for a log read afterwards. The bounds are modest, and advice depends on them.
pub(super) fn afterwards(sure: f64, class: Class, for_it: &[Vote], evidence: &Evidence) -> f64 {
    let is_modest = !evidence.live && class != Class::Unknown && !for_it.iter().all(|vote| vote.hint);
    if is_modest { reported(sure) } else { sure }
}

/// The confidence that is reported where the bounds allow `sure`.
fn reported(sure: f64) -> f64 {
    let (factor, power) = AFTERWARDS_ODDS;
    let odds = factor * (sure / (1.0 - sure)).powf(power);
    odds / (1.0 + odds)
}

/// Multiplies the odds of `probability` by `times`.
fn with_odds(probability: f64, times: f64) -> f64 {
    times * probability / (1.0 - probability + times * probability)
}

/// The number of places with evidence: distinct log lines, and evidence without a line (an exit, a device, another judge).
fn distinct_lines(votes: &[&Vote]) -> usize {
    let lines: BTreeSet<(usize, u64)> =
        votes.iter().flat_map(|vote| vote.spots.iter().map(|(source, spot)| (*source, spot.line))).collect();
    lines.len() + votes.iter().filter(|vote| vote.spots.is_empty()).count()
}

/// The bound for the strongest piece of evidence, interpolated linearly between the entries of the table.
fn bound(weight: f64) -> f64 {
    let above = BOUNDS.partition_point(|(bound, _)| *bound <= weight);
    match (above.checked_sub(1).map(|below| BOUNDS[below]), BOUNDS.get(above)) {
        (None, _) => BOUNDS[0].1,
        (Some((_, last)), None) => last,
        (Some((from, low)), Some((to, high))) => low + (high - low) * (weight - from) / (to - from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribution::catalog::Catalog;
    use crate::attribution::scan::{Findings, Kind, Scan};
    use crate::attribution::{attribute, judged};

    #[test]
    fn a_bound_grows_with_the_weight() {
        assert_eq!((bound(0.0), bound(4.0), bound(9.0)), (0.55, 0.91, 0.96));
        assert!((bound(2.25) - 0.69).abs() < 1e-9);
    }

    #[test]
    fn an_abstention_is_never_surer_than_half() {
        let victim =
            "[rank1]: NCCL WARN Call to recv from 10.0.0.3<4000> failed : Connection closed by remote peer\n";
        let judged = judged(victim);
        assert_eq!((judged.class, judged.confidence), (Class::Unknown, MAX_CONFIDENCE_OF_AN_ABSTENTION));
    }

    #[test]
    fn one_line_of_a_log_alone_is_less_sure_than_two_and_than_the_ranks_own_exit_note() {
        let lost = "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, GPU has fallen off the bus.\n";
        let again = "nvidia-smi: Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.\n";
        let (one, two) = (judged(lost), judged(&format!("{lost}{again}")));
        assert_eq!((one.class, two.class), (Class::HardwareGpu, Class::HardwareGpu));
        let most = reported(MAX_CONFIDENCE_OF_ONE_LINE);
        assert!(one.confidence <= most && two.confidence > most, "{} {}", one.confidence, two.confidence);
        let catalog = Catalog::built_in().expect("the catalog is compiled in");
        let raised = b"RuntimeError: CUDA error: uncorrectable ECC error encountered\n";
        let found = Scan::of_text(catalog, "last words", Some(0), Kind::Log, raised);
        let most_for = |ended| {
            let findings = vec![Findings { ended, ..found.clone() }];
            attribute(catalog, &Evidence { findings, ..Evidence::default() }).confidence
        };
        assert!(most_for(false) <= most && most_for(true) > most, "{} {}", most_for(false), most_for(true));
    }

    #[test]
    fn a_live_failure_is_surer_than_the_same_log_read_afterwards_but_not_by_hints_alone() {
        assert!((with_odds(0.5, 3.0) - 0.75).abs() < 1e-9 && with_odds(0.0, 3.0) == 0.0);
        let catalog = Catalog::built_in().expect("the catalog is compiled in");
        let judged_as = |log: &str, live| {
            let findings = vec![Scan::of_text(catalog, "log", Some(0), Kind::Log, log.as_bytes())];
            attribute(catalog, &Evidence { findings, live, ..Evidence::default() })
        };
        let raised = "  File \"/home/a/train.py\", line 3, in step\n    x[k]\nKeyError: 'k'\n";
        let (live, afterwards) = (judged_as(raised, true), judged_as(raised, false));
        assert_eq!(live.class, afterwards.class);
        assert!(live.confidence > afterwards.confidence && live.confidence < 0.99, "{}", live.confidence);
        let hint = "ERROR: the node was rebooted after a machine check exception of its board\n";
        assert!(
            judged_as(hint, true).confidence
                <= judged_as(hint, false).confidence.max(MAX_CONFIDENCE_OF_HINTS)
        );
    }

    #[test]
    fn agreeing_weak_pieces_stay_uncertain_and_a_strong_one_is_certain() {
        let strong = judged("NVRM: Xid (PCI:0000:3b:00): 79, pid=812, GPU has fallen off the bus.\n");
        assert!(strong.confidence > 0.85, "{}", strong.confidence);
        let weak = judged(
            "UCX ERROR connect to peer failed: Destination is unreachable\nConnectionError: [Errno 110] Connection timed out\n",
        );
        assert_eq!(weak.class, Class::Fabric);
        assert!(weak.confidence < reported(0.8), "{}", weak.confidence);
    }
}

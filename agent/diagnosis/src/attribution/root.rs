//! The rank where a failure started: causes before consequences, ordered by time where known. The others are victims. A cause on many
//! ranks at once belongs to no rank.

use std::collections::BTreeSet;

use super::Evidence;
use super::lines;
use super::scan::RelevantLine;
use super::vote::Vote;
use super::votes::is_log;

/// Maximum number of root lines.
const MAX_LINES: usize = 3;
/// A second piece of evidence belongs to the root if its weight is nearly that of the first.
const MIN_WEIGHT_RATIO: f64 = 0.8;
/// From this share of the named ranks on, a cause is common to them.
const MIN_COMMON_SHARE: f64 = 0.3;

/// Where the failure started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Root {
    /// The lines that show it: the index of the source in the evidence, and the line. Best first.
    pub lines: Vec<(usize, RelevantLine)>,
    /// The rank.
    pub rank: Option<u32>,
    /// Ranks that show the same cause at the same time, so that none of them is the culprit.
    pub common: BTreeSet<u32>,
    /// Ranks that only show consequences.
    pub victims: BTreeSet<u32>,
}

/// Evidence about ranks in addition to the lines of the cause.
#[derive(Clone, Debug, Default)]
pub struct Pointers {
    /// The rank that all others wait for, and the line that shows it.
    pub laggard: Option<(u32, usize, RelevantLine)>,
    /// The rank that others report as ended.
    pub named: Option<u32>,
    /// The rank that the others wait for according to their flight records.
    pub held_up_by: Option<u32>,
    /// The ranks that wait for it.
    pub waiting: BTreeSet<u32>,
    /// Whether the cause is known. An unknown cause has no rank unless others follow from it.
    pub cause_known: bool,
    /// Possible causes if the cause is unknown, heaviest first. Their lines come before the consequences.
    pub hints: Vec<Vote>,
}

/// Finds the root in the evidence for the class (heaviest first) and in the consequences. With nothing but consequences, the laggard
/// that the others waited for is the root.
pub fn root(evidence: &Evidence, for_it: &[Vote], consequences: &[Vote], pointers: Pointers) -> Root {
    let Pointers { laggard, named: named_by_others, held_up_by, waiting, cause_known, hints } = pointers;
    // A record of the operations that ranks entered is better evidence than one rank's report about another.
    let reported_rank = held_up_by.or(laggard.as_ref().map(|(rank, ..)| *rank)).or(named_by_others);
    let grounds = [hints.as_slice(), for_it, consequences]
        .into_iter()
        .find(|votes| !votes.is_empty())
        .unwrap_or_default();
    let agree = |rank: u32| held_up_by.is_none_or(|blocker| blocker == rank);
    let laggard = laggard.filter(|(rank, ..)| for_it.is_empty() && agree(*rank));
    let lines = match &laggard {
        Some((_, source, spot)) => vec![(*source, spot.clone())],
        None => root_lines(evidence, grounds),
    };
    let ranks: BTreeSet<u32> = for_it
        .first()
        .map(|vote| vote.spots.iter().filter_map(|(_, spot)| spot.rank).collect())
        .unwrap_or_default();
    let named = super::ranks_named(evidence);
    let is_common = ranks.len() > 2 && ranks.len() as f64 >= MIN_COMMON_SHARE * named.len() as f64;
    let first_dead = evidence
        .exits
        .iter()
        .filter(|exit| exit.order.is_some())
        .min_by_key(|exit| exit.order)
        .and_then(|exit| exit.rank);
    let by_reporter = for_it.first().is_some_and(|vote| vote.reporter);
    let others_follow = consequences
        .iter()
        .flat_map(|vote| vote.spots.iter().filter_map(|(_, spot)| spot.rank))
        .any(|follower| !ranks.contains(&follower));
    let rank = if let Some((rank, ..)) = laggard {
        Some(rank)
    } else if is_common {
        None
    } else if for_it.is_empty() || by_reporter || !(cause_known || others_follow) {
        reported_rank.or_else(|| only_failure(evidence).filter(|_| !by_reporter))
    } else {
        let of_lines = lines.iter().find_map(|(_, spot)| spot.rank).or_else(|| only_rank_of(for_it));
        of_lines.or(held_up_by).or(first_dead).or(named_by_others).or_else(|| only_failure(evidence))
    };
    let victims = consequences
        .iter()
        .flat_map(|vote| vote.spots.iter().filter_map(|(_, spot)| spot.rank))
        .chain(waiting)
        .filter(|follower| Some(*follower) != rank && !ranks.contains(follower))
        .collect();
    let common = if is_common { ranks } else { BTreeSet::new() };
    Root { lines, rank, common, victims }
}

/// The rank that all other evidence for the cause names: a line of the kernel names none.
fn only_rank_of(for_it: &[Vote]) -> Option<u32> {
    let ranks: BTreeSet<u32> =
        for_it.iter().flat_map(|vote| vote.spots.iter().filter_map(|(_, spot)| spot.rank)).collect();
    ranks.first().copied().filter(|_| ranks.len() == 1)
}

/// The rank in the launchers' tables of failures if there is one only. Of several the first to end need not be the cause.
fn only_failure(evidence: &Evidence) -> Option<u32> {
    let ranks: BTreeSet<u32> =
        evidence.findings.iter().flat_map(|finding| finding.in_table.iter().copied()).collect();
    ranks.first().copied().filter(|_| ranks.len() == 1)
}

fn root_lines(evidence: &Evidence, grounds: &[Vote]) -> Vec<(usize, RelevantLine)> {
    // The heaviest evidence may be only in kernel lines; the log has its own root.
    let shows = |vote: &&Vote| vote.spots.iter().any(|(source, _)| is_log(evidence, *source));
    let least = grounds.iter().find(shows).map_or(0.0, |vote| vote.weight * MIN_WEIGHT_RATIO);
    let mut lines: Vec<(usize, RelevantLine)> = Vec::new();
    for vote in grounds.iter().filter(|vote| vote.weight >= least) {
        let mut spots: Vec<&(usize, RelevantLine)> =
            vote.spots.iter().filter(|(source, _)| is_log(evidence, *source)).collect();
        if let Some(times) = spots.iter().map(|(_, spot)| spot.time).collect::<Option<Vec<f64>>>()
            && lines::spans_less_than_half_a_day(&times)
        {
            spots.sort_by(|a, b| a.1.time.partial_cmp(&b.1.time).unwrap_or(std::cmp::Ordering::Equal));
        }
        for spot in spots {
            if lines.len() < MAX_LINES
                && !lines.iter().any(|(at, line)| *at == spot.0 && line.line == spot.1.line)
            {
                lines.push(spot.clone());
            }
        }
    }
    lines
}

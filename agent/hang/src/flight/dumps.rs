//! Compares the flight records of a job's ranks: which rank the others wait for, in which process group and
//! operation.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{FlightRecord, GroupProgress, counted};
use crate::collective_counters::waits;
use mainstay_model::hang::{HangKind, listed};
use mainstay_model::id::Rank;

/// What the records show of a job that hangs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockedCollective {
    /// The kind of hang. `None` if the records show only which rank the others wait for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<HangKind>,
    /// The ranks that the others wait for, because they have not entered or not completed an operation; empty if all have entered it
    /// and none has left it.
    pub culprits: Vec<Rank>,
    /// The ranks that wait in the operation.
    pub waiting: Vec<Rank>,
    /// The process group.
    pub process_group: String,
    /// Its number in the group, from 1.
    pub collective: u64,
    /// The operation: `all_reduce of [8] Float`.
    pub operation: String,
    /// Ranks of the job without a record.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without_record: Vec<Rank>,
    /// A summary in one sentence.
    #[serde(rename = "told")]
    pub summary: String,
}

/// Finds the rank that the others wait for. `None` if no rank waits or the records do not show it. `known`: ranks
/// that the job is known to have in addition to those with records.
#[must_use]
pub fn held_up(known: &BTreeSet<Rank>, records: &BTreeMap<Rank, FlightRecord>) -> Option<BlockedCollective> {
    let named = records.values().flat_map(|record| record.groups.values()).flat_map(|group| &group.ranks);
    let all: BTreeSet<Rank> =
        known.iter().copied().chain(records.keys().copied()).chain(named.map(|rank| Rank(*rank))).collect();
    let all: Vec<Rank> = all.into_iter().collect();
    let found = waits("the flight records", &counted(&all, records))?;
    let place = WaitingOperation::find(records, &found.culprits)?;
    let without_record: Vec<Rank> =
        all.into_iter().filter(|rank| !records.contains_key(rank)).take(MOST_RANKS).collect();
    let summary = place.describe(found.kind, &found.culprits, records);
    let WaitingOperation { group, number, operation, waiting } = place;
    Some(BlockedCollective {
        kind: found.kind,
        culprits: found.culprits,
        waiting,
        process_group: group.to_owned(),
        collective: number,
        operation: operation.to_owned(),
        without_record,
        summary,
    })
}

/// The most ranks without a record that are listed.
const MOST_RANKS: usize = 1024;

/// The operation in which ranks wait.
struct WaitingOperation<'r> {
    group: &'r str,
    number: u64,
    operation: &'r str,
    waiting: Vec<Rank>,
}

impl<'r> WaitingOperation<'r> {
    /// The operation in which most ranks wait for the culprits: one that the culprits have not entered. If they have
    /// entered all, the one in which most ranks wait.
    fn find(records: &'r BTreeMap<Rank, FlightRecord>, culprits: &[Rank]) -> Option<WaitingOperation<'r>> {
        let mut places: BTreeMap<(&str, u64), Vec<(Rank, &str)>> = BTreeMap::new();
        for (rank, record) in records {
            for (name, standing) in &record.groups {
                for (number, operation) in &standing.open {
                    places.entry((name.as_str(), *number)).or_default().push((*rank, operation));
                }
            }
        }
        let entered = |rank: &Rank, group: &str| {
            let standing = records.get(rank).and_then(|record| record.groups.get(group));
            standing.map_or(0, |standing| standing.entered)
        };
        let for_culprits = |(group, number): &(&str, u64)| {
            let member = |rank: &&Rank| is_member(records, **rank, group);
            culprits.iter().filter(member).any(|rank| entered(rank, group) < *number)
        };
        let left = |(group, number): &(&str, u64)| {
            let has_left = |progress: &GroupProgress| progress.entered > 0 && progress.completed >= *number;
            records.values().any(|record| record.groups.get(*group).is_some_and(has_left))
        };
        let of_culprits = |place: &(&str, u64), ranks: &[(Rank, &str)]| {
            for_culprits(place) || left(place) && ranks.iter().any(|(rank, _)| culprits.contains(rank))
        };
        let all: BTreeSet<Rank> = places.values().flatten().map(|(rank, _)| *rank).collect();
        // Of equals the first: the later ones wait behind it.
        let best = places.into_iter().max_by_key(|(place, ranks)| {
            (of_culprits(place, ranks), ranks.len(), std::cmp::Reverse(place.1))
        });
        let ((group, number), ranks) = best?;
        let others_left = !for_culprits(&(group, number)) && left(&(group, number));
        // The culprit's own name for the operation may be the mismatch.
        let other = ranks.iter().find(|(rank, _)| !culprits.contains(rank)).or(ranks.first());
        let operation = other.map(|(_, operation)| *operation).unwrap_or_default();
        let of_place: BTreeSet<Rank> = ranks.iter().map(|(rank, _)| *rank).collect();
        // Ranks that have left the operation wait elsewhere, behind it.
        let waiting = if others_left { all } else { of_place };
        let waiting = waiting.into_iter().filter(|rank| !culprits.contains(rank)).collect();
        Some(WaitingOperation { group, number, operation, waiting })
    }

    fn describe(
        &self,
        kind: Option<HangKind>,
        culprits: &[Rank],
        records: &BTreeMap<Rank, FlightRecord>,
    ) -> String {
        let WaitingOperation { group, number, operation, waiting } = self;
        let place = format!("collective {number} of process group {group}");
        let (who, others) = (listed(culprits), listed(waiting));
        let has = if culprits.len() == 1 { "has" } else { "have" };
        let wait = if waiting.len() == 1 { "waits" } else { "wait" };
        match (kind, culprits) {
            (Some(HangKind::Mismatch), [rank]) => {
                let standing = records.get(rank).and_then(|record| record.groups.get(*group));
                let other = standing.and_then(|standing| standing.open.get(number));
                let other = other.map_or("another operation", String::as_str);
                format!("in {place} {who} entered {other}, and {others} entered {operation}")
            }
            (Some(HangKind::Mismatch), _) => {
                format!("{who} wait for each other in a circle, one of them in {operation} ({place})")
            }
            (_, []) => format!("{others} entered {operation} ({place}), and none has left it"),
            (None, _) if culprits.iter().all(|rank| records.contains_key(rank)) => {
                format!("{who} {has} not completed {operation} ({place}), which others have left")
            }
            (None, _) => {
                format!("{others} {wait} in {operation} ({place}), and {who} {has} no flight record")
            }
            (Some(_), _) => {
                format!("{who} {has} not reached {operation} ({place}), in which {others} {wait}")
            }
        }
    }
}

/// Whether a rank belongs to a group, as far as the records show.
fn is_member(records: &BTreeMap<Rank, FlightRecord>, rank: Rank, group: &str) -> bool {
    let entered_by = |record: &FlightRecord| {
        let standing = record.groups.get(group);
        standing.is_some_and(|progress: &GroupProgress| progress.is_world || progress.ranks.contains(&rank.0))
    };
    records.get(&rank).is_some_and(|record| record.groups.contains_key(group))
        || records.values().any(entered_by)
}

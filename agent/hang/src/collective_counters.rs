//! Collective counters that are read once nothing moves: from NCCL's RAS service or from PyTorch's flight recorders.
//! They find the ranks that the others wait for if the ranks' own pages do not show it.

use std::collections::{BTreeMap, BTreeSet};

use crate::counters::{Count, Counters};
use mainstay_model::id::Rank;
use mainstay_model::time::Mono;

use crate::locate::ROOT_SHARE;
use crate::wait_for::{End, Presence, behind, locate};
use mainstay_model::hang::{Hang, HangKind, Waits, listed};

/// Such counters replace the culprits of a verdict below this confidence.
const MAX_REPLACED_CONFIDENCE: f64 = 0.9;

/// The counters from one source.
#[derive(Clone, Debug, Default)]
pub struct SourceCounters {
    /// The counters of the ranks, zero in groups of which a silent rank is known to be a member.
    pub counts: BTreeMap<Rank, Vec<Count>>,
    /// Ranks about which the source has nothing current.
    pub silent: BTreeSet<Rank>,
    /// The names of the communicators.
    pub names: BTreeMap<u64, String>,
}

/// The ranks that others wait for, according to the source `by`. `None` if unknown.
pub fn waits(by: &str, counted: &SourceCounters) -> Option<Waits> {
    let all: Vec<Rank> = counted.counts.keys().copied().collect();
    let mut counters = Counters::new(all.len());
    for (index, counts) in counted.counts.values().enumerate() {
        counters.set(index, counts);
    }
    let presence = |index: usize| match counted.silent.contains(&all[index]) {
        false => Presence::Reports,
        true => Presence::Silent(Mono::default()),
    };
    let found = locate(&counters, presence, |index| u32::try_from(index).unwrap_or(u32::MAX), all.len());
    let (first, votes) = *found.ends.first()?;
    let rank = |index: u32| all.get(index as usize).copied().unwrap_or_default();
    let (kind, culprits, what) = match first {
        End::Root(_) | End::Silent(_) => {
            let named = found.ends.iter().filter(|(_, share)| share.saturating_mul(ROOT_SHARE) >= votes);
            let named = named.filter_map(|(end, _)| match (first, *end) {
                (End::Root(_), End::Root(index)) | (End::Silent(_), End::Silent(index)) => Some(rank(index)),
                _ => None,
            });
            let culprits: Vec<Rank> = named.collect();
            let what = format!("{votes} of {} waiting ranks wait for {}", found.waiting, listed(&culprits));
            (matches!(first, End::Root(_)).then_some(HangKind::UserCode), culprits, what)
        }
        End::Mismatch(index) => {
            let what = format!("{} entered another operation than the others", rank(index));
            (Some(HangKind::Mismatch), vec![rank(index)], what)
        }
        End::Cycle(_) => {
            let circle: Vec<Rank> = found.circle.iter().map(|index| rank(*index)).collect();
            let what = format!("{} wait for each other in a circle", listed(&circle));
            (Some(HangKind::Mismatch), circle, what)
        }
        // A silent rank may be the one that has not entered.
        End::Network(_) if !counted.silent.is_empty() => return None,
        End::Network(row) => {
            let behind: Vec<Rank> = behind(&counters, presence, all.len()).into_iter().map(rank).collect();
            if !behind.is_empty() {
                let completed = if behind.len() == 1 { "has" } else { "have" };
                let text = format!(
                    "by {by} {} {completed} entered what the others wait in and completed less than they",
                    listed(&behind)
                );
                return Some(Waits { kind: None, culprits: behind, reported: text });
            }
            let name = counted.names.get(&counters.name(row)).map_or("a communicator", String::as_str);
            let what = format!("all ranks of {name} have entered an operation and none has left it");
            (Some(HangKind::Network), Vec::new(), what)
        }
    };
    Some(Waits { kind, culprits, reported: format!("by {by} {what}") })
}

/// Adds the evidence of the counters: they name the culprits if the verdict is not sure of them.
pub fn weigh(hang: &mut Hang, waits: &Waits) {
    if hang.confidence >= MAX_REPLACED_CONFIDENCE || hang.kind == HangKind::Livelock {
        return;
    }
    // An operation that all have entered does not clear a rank with other evidence against it: launches run
    // ahead.
    if waits.culprits.is_empty() && !hang.culprits.is_empty() {
        return;
    }
    let mut all: Vec<Rank> = hang.culprits.drain(..).chain(hang.victims.drain(..)).collect();
    all.sort_unstable();
    hang.culprits.clone_from(&waits.culprits);
    hang.victims = all.into_iter().filter(|rank| !waits.culprits.contains(rank)).collect();
    // What a rank's page shows, such as a wait for data or a disk, is more specific than that others wait for it.
    if let Some(kind) = waits.kind
        && (kind != HangKind::UserCode || hang.kind == HangKind::AllStill)
    {
        hang.kind = kind;
    }
    hang.confidence = if waits.culprits.is_empty() { 0.8 } else { MAX_REPLACED_CONFIDENCE };
}

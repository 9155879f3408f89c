//! Ranks that wait in collectives: whether they wait for the same one, and for which rank.

use std::collections::BTreeMap;

use super::{number_after, spots_of, vote};
use crate::attribution::Evidence;
use crate::attribution::catalog::Catalog;
use crate::attribution::class::Class;
use crate::attribution::scan::RelevantLine;
use crate::attribution::vote::Vote;

/// Log-odds when ranks wait in different collectives of one group: the program's branches differ.
const DISAGREE: f64 = 3.4;
/// The same if the lines may be from different groups.
const DISAGREE_PERHAPS: f64 = 2.2;

/// A collective in which a rank waited when its watchdog reported a timeout.
#[derive(Clone, Debug, PartialEq)]
struct Waiting {
    rank: u32,
    group: String,
    sequence: u64,
    operation: String,
    elements: String,
    place: usize,
    spot: RelevantLine,
}

/// The rank that all others wait for: the only one that is behind in a group, or that has no pending work while the others have. `None`
/// if the lines do not show it.
pub fn laggard(catalog: &Catalog, evidence: &Evidence) -> Option<(u32, usize, RelevantLine)> {
    of_status(catalog, evidence).or_else(|| of_sequences(&waiting(catalog, evidence)))
}

/// Ranks of one group that wait at one sequence number for different operations.
pub(super) fn disagreement(catalog: &Catalog, evidence: &Evidence) -> Option<Vote> {
    let waiting = waiting(catalog, evidence);
    let mut seen: BTreeMap<(&str, u64), &Waiting> = BTreeMap::new();
    for one in &waiting {
        let key = (one.group.as_str(), one.sequence);
        let Some(other) = seen.get(&key) else {
            seen.insert(key, one);
            continue;
        };
        let differ = (&other.operation, &other.elements) != (&one.operation, &one.elements);
        if other.rank == one.rank || !differ || is_point_to_point(one) || is_point_to_point(other) {
            continue;
        }
        let reported =
            |of: &Waiting| format!("rank {} in {} of {} elements", of.rank, of.operation, of.elements);
        let default = matches!(one.group.as_str(), "" | "0");
        return Some(vote(
            "nccl.collectives_differ",
            format!(
                "at collective {} {}, {}: they took different code paths",
                one.sequence,
                reported(other),
                reported(one)
            ),
            (Class::UserCode, if default { DISAGREE } else { DISAGREE_PERHAPS }),
            vec![(other.place, other.spot.clone()), (one.place, one.spot.clone())],
            "nccl",
        ));
    }
    None
}

fn is_point_to_point(one: &Waiting) -> bool {
    matches!(
        one.operation.as_str(),
        "SEND" | "RECV" | "COALESCED" | "SENDRECV" | "ALLTOALL" | "ALLTOALL_BASE"
    )
}

/// The rank that is alone behind the others of its group.
fn of_sequences(waiting: &[Waiting]) -> Option<(u32, usize, RelevantLine)> {
    let mut first: BTreeMap<(&str, u32), &Waiting> = BTreeMap::new();
    for one in waiting {
        first.entry((one.group.as_str(), one.rank)).or_insert(one);
    }
    let group = first.keys().map(|(group, _)| *group).next()?;
    let mut ranks: Vec<&Waiting> = first.values().filter(|one| one.group == group).copied().collect();
    ranks.sort_by_key(|one| one.sequence);
    match ranks.as_slice() {
        [least, next, _, ..] if least.sequence < next.sequence => {
            Some((least.rank, least.place, least.spot.clone()))
        }
        _ => None,
    }
}

/// `last enqueued work: 7220, last completed work: 7218`: a rank that has completed all its enqueued work while others have pending
/// work never entered the collective.
fn of_status(catalog: &Catalog, evidence: &Evidence) -> Option<(u32, usize, RelevantLine)> {
    let mut idle: BTreeMap<u32, (usize, RelevantLine)> = BTreeMap::new();
    let mut busy = 0;
    for (place, spot) in spots_of(catalog, evidence, "nccl.last_enqueued") {
        let (Some(rank), Some(enqueued), Some(completed)) = (
            spot.rank,
            number_after(
                &spot.text,
                &["last enqueued work: ", "Last enqueued NCCL work: ", "last enqueued NCCL work: "],
            ),
            number_after(
                &spot.text,
                &["last completed work: ", "last completed NCCL work: ", "Last completed NCCL work: "],
            ),
        ) else {
            continue;
        };
        if enqueued == completed {
            idle.entry(rank).or_insert((place, spot.clone()));
        } else {
            busy += 1;
        }
    }
    let alone = idle.len() == 1 && busy > 0;
    idle.into_iter().next().filter(|_| alone).map(|(rank, (place, spot))| (rank, place, spot))
}

fn waiting(catalog: &Catalog, evidence: &Evidence) -> Vec<Waiting> {
    spots_of(catalog, evidence, "nccl.watchdog_timeout")
        .filter_map(|(place, spot)| {
            let work = spot.text.split_once("WorkNCCL(")?.1;
            Some(Waiting {
                rank: spot.rank?,
                group: group(&spot.text),
                sequence: number_after(work, &["SeqNum="])?,
                operation: field(work, "OpType=")?.to_owned(),
                elements: field(work, "NumelIn=")?.to_owned(),
                place,
                spot: spot.clone(),
            })
        })
        .collect()
}

/// The process group that a line names: `[PG ID 2 PG GUID 7(tp) Rank 3]`, `[PG 2 Rank 3]`.
fn group(text: &str) -> String {
    let named = ["PG GUID ", "[PG ID ", "[PG "].iter().find_map(|mark| text.split_once(mark));
    named.map(|(_, rest)| rest.chars().take_while(char::is_ascii_digit).collect()).unwrap_or_default()
}

fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let rest = text.split_once(name)?.1;
    rest.split([',', ')']).next().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use crate::attribution::class::Class;
    use crate::attribution::judged;

    fn timeout(rank: u32, sequence: u64, operation: &str, elements: u64) -> String {
        format!(
            "[rank{rank}]: [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, \
             OpType={operation}, NumelIn={elements}, NumelOut={elements}, Timeout(ms)=600000) ran for 600063 milliseconds\n"
        )
    }

    #[test]
    fn ranks_in_different_collectives_point_to_the_program() {
        let log = timeout(0, 5769, "ALLREDUCE", 100) + &timeout(1, 5769, "ALLREDUCE", 2_958_336);
        assert_eq!(judged(&log).class, Class::UserCode);
        let same = timeout(0, 5769, "ALLREDUCE", 2_958_336) + &timeout(1, 5769, "ALLREDUCE", 2_958_336);
        assert_eq!(judged(&same).class, Class::Unknown);
        let pipeline = timeout(0, 5769, "SEND", 100) + &timeout(1, 5769, "RECV", 200);
        assert_eq!(judged(&pipeline).class, Class::Unknown);
    }

    #[test]
    fn the_rank_that_is_behind_is_the_one_that_all_wait_for() {
        let log = timeout(0, 900, "ALLREDUCE", 4096)
            + &timeout(1, 899, "ALLREDUCE", 4096)
            + &timeout(2, 900, "ALLREDUCE", 4096);
        assert_eq!(judged(&log).root.rank, Some(1));
        let two = timeout(0, 900, "ALLREDUCE", 4096) + &timeout(1, 899, "ALLREDUCE", 4096);
        assert_eq!(judged(&two).root.rank, None, "of two nobody can tell who waits for whom");
    }

    #[test]
    fn the_rank_without_pending_work_is_the_laggard() {
        let status = |rank, enqueued, completed| {
            format!(
                "[rank{rank}]: [Rank {rank}] failure detected: last enqueued work: {enqueued}, last completed work: {completed}\n"
            )
        };
        let log = status(0, 52, 51) + &status(1, 51, 51) + &status(2, 52, 51);
        assert_eq!(judged(&log).root.rank, Some(1));
        let all_busy = status(0, 52, 51) + &status(1, 52, 51);
        assert_eq!(judged(&all_busy).root.rank, None);
    }
}

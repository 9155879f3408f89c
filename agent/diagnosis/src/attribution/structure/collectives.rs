//! Ranks that wait in collectives: whether they wait for the same one, and for which rank.

use std::collections::{BTreeMap, BTreeSet};

use super::{is, number_after, spots_of, vote};
use crate::attribution::Evidence;
use crate::attribution::catalog::Catalog;
use crate::attribution::class::Class;
use crate::attribution::scan::RelevantLine;
use crate::attribution::vote::Vote;

/// Log-odds when ranks wait in different collectives of one group: the program's branches differ.
const DIFFERENT_COLLECTIVES_LOG_ODDS: f64 = 3.4;
/// The same if the lines may be from different groups.
const UNKNOWN_GROUPS_LOG_ODDS: f64 = 2.2;

/// Log-odds of a rank that is seen to prepare data while the others wait for it.
const PREPARES_DATA_LOG_ODDS: f64 = 3.8;
/// Log-odds of a rank that is seen to have left the loop in which the others wait for it.
const LEFT_LOOP_LOG_ODDS: f64 = 3.0;

/// A collective in which a rank waited when its watchdog reported a timeout.
#[derive(Clone, Debug, PartialEq)]
struct Waiting {
    rank: u32,
    group: String,
    sequence: u64,
    operation: String,
    elements: String,
    source: usize,
    spot: RelevantLine,
}

/// The rank that all others wait for: the only one that is behind in a group, that has no pending work while the others have, or that
/// does not wait where all others do. `None` if the lines do not show it.
pub fn laggard(catalog: &Catalog, evidence: &Evidence) -> Option<(u32, usize, RelevantLine)> {
    let waiting = waiting(catalog, evidence);
    of_status(catalog, evidence)
        .or_else(|| of_sequences(&waiting))
        .or_else(|| of_absence(catalog, evidence, &waiting))
        .or_else(|| of_setup(catalog, evidence))
        .or_else(|| of_barrier(catalog, evidence))
}

/// Ranks wait in a collective while another prepares data, or has left the loop that they are in.
pub(super) fn busy_elsewhere(catalog: &Catalog, evidence: &Evidence) -> Option<Vote> {
    let (laggard, ..) = laggard(catalog, evidence).or_else(|| of_one_report(catalog, evidence))?;
    let of_it = |(_, spot): &(usize, &RelevantLine)| !spot.is_past() && spot.rank.unwrap_or(0) == laggard;
    let newest = |id| spots_of(catalog, evidence, id).filter(of_it).last();
    let end = |spot: &(usize, &RelevantLine)| (spot.0, spot.1.line);
    let goes_on =
        |spot: &(usize, &RelevantLine)| newest("data.prepared").is_none_or(|done| end(&done) < end(spot));
    let at = |(source, spot): (usize, &RelevantLine)| {
        vec![(source, RelevantLine { rank: Some(laggard), ..spot.clone() })]
    };
    if let Some(preparing) = newest("data.preparing").filter(goes_on) {
        let meaning = format!("rank {laggard} prepares data for longer than the others wait for it");
        return Some(vote(
            "collectives.preparing",
            meaning,
            (Class::UserConfig, PREPARES_DATA_LOG_ODDS),
            at(preparing),
            "preparing",
        ));
    }
    let left = newest("program.left_loop")?;
    let meaning = format!("rank {laggard} has left the loop in which the others wait for it: uneven work");
    Some(vote("collectives.left_loop", meaning, (Class::UserCode, LEFT_LOOP_LOG_ODDS), at(left), "preparing"))
}

/// The only rank that does not wait where all ranks around it do.
fn of_absence(
    catalog: &Catalog,
    evidence: &Evidence,
    waiting: &[Waiting],
) -> Option<(u32, usize, RelevantLine)> {
    let first = waiting.first()?;
    let together = |one: &Waiting| one.sequence == first.sequence && matches!(one.group.as_str(), "" | "0");
    let ranks = ranks_of(catalog, evidence, "nccl.watchdog_timeout");
    let missing = (0..*ranks.last()?).filter(|rank| !ranks.contains(rank)).collect::<Vec<u32>>();
    let [missing] = missing[..] else { return None };
    (ranks.len() >= 2 && waiting.iter().all(together)).then(|| (missing, first.source, first.spot.clone()))
}

/// Rank 0 gives the others what they need to set up a communicator: they wait for it.
fn of_setup(catalog: &Catalog, evidence: &Evidence) -> Option<(u32, usize, RelevantLine)> {
    let mut spots =
        ["torch.tcpstore", "torch.store_connect"].into_iter().flat_map(|id| spots_of(catalog, evidence, id));
    let (source, spot) = spots.find(|(_, spot)| spot.text.contains("ncclUniqueId from ["))?;
    let rank =
        number_after(&spot.text, &["ncclUniqueId from ["]).and_then(|rank| u32::try_from(rank).ok())?;
    let reports = ranks_of(catalog, evidence, "torch.tcpstore").contains(&rank);
    (!reports && spot.rank != Some(rank)).then(|| (rank, source, spot.clone()))
}

/// `Ranks 5 failed to pass monitoredBarrier`.
fn of_barrier(catalog: &Catalog, evidence: &Evidence) -> Option<(u32, usize, RelevantLine)> {
    spots_of(catalog, evidence, "torch.barrier_timeout").find_map(|(source, spot)| {
        let (before, _) = spot.text.split_once(" failed to pass monitoredBarrier")?;
        let ranks = before.rsplit_once("Ranks ").or_else(|| before.rsplit_once("Rank "))?.1;
        Some((ranks.trim().parse().ok()?, source, spot.clone()))
    })
}

/// One rank reports that it waits, another than the first one: the first does the work that one rank does for all.
fn of_one_report(catalog: &Catalog, evidence: &Evidence) -> Option<(u32, usize, RelevantLine)> {
    let ranks = ranks_of(catalog, evidence, "nccl.watchdog_timeout");
    let (source, spot) = spots_of(catalog, evidence, "nccl.watchdog_timeout").next()?;
    (!ranks.is_empty() && !ranks.contains(&0)).then(|| (0, source, spot.clone()))
}

fn ranks_of(catalog: &Catalog, evidence: &Evidence, id: &str) -> BTreeSet<u32> {
    let sightings = evidence.findings.iter().flat_map(|finding| &finding.sightings);
    sightings
        .filter(|sighting| is(catalog, sighting, id))
        .flat_map(|sighting| sighting.ranks.iter().copied())
        .collect()
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
        let described = |waiting: &Waiting| {
            format!("rank {} in {} of {} elements", waiting.rank, waiting.operation, waiting.elements)
        };
        let default = matches!(one.group.as_str(), "" | "0");
        return Some(vote(
            "nccl.collectives_differ",
            format!(
                "at collective {} {}, {}: they took different code paths",
                one.sequence,
                described(other),
                described(one)
            ),
            (Class::UserCode, if default { DIFFERENT_COLLECTIVES_LOG_ODDS } else { UNKNOWN_GROUPS_LOG_ODDS }),
            vec![(other.source, other.spot.clone()), (one.source, one.spot.clone())],
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
            Some((least.rank, least.source, least.spot.clone()))
        }
        _ => None,
    }
}

/// `last enqueued work: 7220, last completed work: 7218`: a rank that has completed all its enqueued work while others have pending
/// work never entered the collective.
fn of_status(catalog: &Catalog, evidence: &Evidence) -> Option<(u32, usize, RelevantLine)> {
    let mut idle: BTreeMap<u32, (usize, RelevantLine)> = BTreeMap::new();
    let mut busy = 0;
    for (source, spot) in spots_of(catalog, evidence, "nccl.last_enqueued") {
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
            idle.entry(rank).or_insert((source, spot.clone()));
        } else {
            busy += 1;
        }
    }
    let alone = idle.len() == 1 && busy > 0;
    idle.into_iter().next().filter(|_| alone).map(|(rank, (source, spot))| (rank, source, spot))
}

fn waiting(catalog: &Catalog, evidence: &Evidence) -> Vec<Waiting> {
    spots_of(catalog, evidence, "nccl.watchdog_timeout")
        .filter_map(|(source, spot)| {
            let work = spot.text.split_once("WorkNCCL(")?.1;
            Some(Waiting {
                rank: spot.rank?,
                group: group(&spot.text),
                sequence: number_after(work, &["SeqNum="])?,
                operation: field(work, "OpType=")?.to_owned(),
                elements: field(work, "NumelIn=")?.to_owned(),
                source,
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

    #[test]
    fn the_rank_that_does_not_wait_where_all_others_do_is_the_one_they_wait_for() {
        let log =
            |ranks: &[u32]| ranks.iter().map(|rank| timeout(*rank, 88, "ALLREDUCE", 64)).collect::<String>();
        assert_eq!(judged(&log(&[0, 1, 3])).root.rank, Some(2));
        assert_eq!(judged(&log(&[1, 2, 3])).root.rank, Some(0));
        assert_eq!(judged(&log(&[0, 1, 2])).root.rank, None, "nothing shows that there is another");
        assert_eq!(judged(&log(&[0, 4])).root.rank, None, "of several absent ranks none is named");
        let group = log(&[0, 1, 3]).replace("[Rank", "[PG ID 2 PG GUID 5(tp) Rank");
        assert_eq!(judged(&group).root.rank, None, "ranks of a group are other numbers");
    }

    #[test]
    fn the_rank_that_a_store_or_a_barrier_names_is_the_one_they_wait_for() {
        let setup = "[rank3]: torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout\n";
        let judged_setup = judged(setup);
        assert_eq!((judged_setup.class, judged_setup.root.rank), (Class::Unknown, Some(0)));
        let barrier =
            "[rank0]: RuntimeError: [Rank 0]: Ranks 6 failed to pass monitoredBarrier in 900000 ms\n";
        assert_eq!(judged(barrier).root.rank, Some(6));
        let several = barrier.replace("Ranks 6", "Ranks 6, 7");
        assert_eq!(judged(&several).root.rank, None);
    }

    #[test]
    fn a_rank_that_prepares_data_while_others_wait_is_a_setting_and_one_that_left_the_loop_a_bug() {
        let wait = timeout(1, 2, "ALLREDUCE", 1) + &timeout(2, 2, "ALLREDUCE", 1);
        let preparing = "Tokenizing corpus:  37%|███       | 370/1000 [29:58<51:02,  4.86s/it]\n";
        let found = judged(&(preparing.to_owned() + &wait));
        assert_eq!((found.class, found.root.rank), (Class::UserConfig, Some(0)));
        assert!(found.evidence.iter().any(|vote| vote.id == "collectives.preparing"));
        let prepared = "Tokenizing corpus: 100%|██████████| 1000/1000 [39:58<00:00,  2.86s/it]\n";
        let done = judged(&(preparing.to_owned() + prepared + &wait));
        assert!(done.evidence.iter().all(|vote| vote.id != "collectives.preparing"), "{:?}", done.evidence);
        let later = timeout(1, 4711, "ALLREDUCE", 64) + &timeout(2, 4711, "ALLREDUCE", 64);
        let left = judged(&("[rank0]: epoch done, 311 batches\n".to_owned() + &later));
        assert_eq!((left.class, left.root.rank), (Class::UserCode, Some(0)));
        let of_a_waiting_rank = judged(&("[rank1]: epoch done, 311 batches\n".to_owned() + &later));
        assert_eq!((of_a_waiting_rank.class, of_a_waiting_rank.root.rank), (Class::Unknown, Some(0)));
    }
}

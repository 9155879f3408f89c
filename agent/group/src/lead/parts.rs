//! The parts of an entry for a host that does not keep the journal of a large job: all that concerns the job, and
//! what concerns its own ranks.

use std::ops::Range;
use std::sync::Arc;

use mainstay_model::entry::{Body, Fact};
use mainstay_model::id::Rank;
use mainstay_model::verdict::Verdict;

/// Lists of ranks up to this length are sent whole.
const MAX_WHOLE_LIST: usize = 64;

/// The rank, if the entry is about a single one.
pub(super) fn only_rank(body: &Body) -> Option<Rank> {
    match body {
        Body::Fact(
            Fact::RankConnected { rank, .. }
            | Fact::RankRefused { rank, .. }
            | Fact::RankRaised { rank, .. }
            | Fact::RankEnding { rank, .. }
            | Fact::RankExited { rank, .. },
        ) => Some(*rank),
        _ => None,
    }
}

/// The part of an entry for a host with these ranks. `None` if it is only about ranks of others.
pub(super) fn part_for(body: &Arc<Body>, own: Range<u32>) -> Option<Arc<Body>> {
    let ours = |rank: &Rank| own.contains(&rank.0);
    let of_own = |ranks: &[Rank]| -> Vec<Rank> {
        match ranks.len() > MAX_WHOLE_LIST && ranks.is_sorted() {
            true => within(ranks, |rank| *rank, &own).to_vec(),
            false => ranks.to_vec(),
        }
    };
    if let Some(rank) = only_rank(body) {
        return ours(&rank).then(|| Arc::clone(body));
    }
    let part = match body.as_ref() {
        // Such entries have a file per host or a place per rank.
        Body::Fact(Fact::EvidenceTaken { .. }) => return None,
        Body::Fact(Fact::AttemptStarted { attempt, master_port, ranks, hosts }) => {
            let ranks = within(ranks, |started| started.rank, &own).to_vec();
            let hosts = within(hosts, |host| host.first_rank, &own).to_vec();
            Body::Fact(Fact::AttemptStarted { attempt: *attempt, master_port: *master_port, ranks, hosts })
        }
        Body::Fact(Fact::AttemptEnded { attempt, orphans_killed, waiting })
            if waiting.len() > MAX_WHOLE_LIST =>
        {
            let (attempt, orphans_killed) = (*attempt, *orphans_killed);
            Body::Fact(Fact::AttemptEnded { attempt, orphans_killed, waiting: of_own(waiting) })
        }
        Body::Fact(Fact::RanksHung { attempt, hang, acts }) if hang.victims.len() > MAX_WHOLE_LIST => {
            let mut hang = hang.clone();
            hang.victims = of_own(&hang.victims);
            Body::Fact(Fact::RanksHung { attempt: *attempt, hang, acts: *acts })
        }
        Body::Verdict(verdict) if verdict.victims.len() > MAX_WHOLE_LIST => {
            let victims = of_own(&verdict.victims);
            Body::Verdict(Verdict { victims, ..verdict.clone() })
        }
        _ => return Some(Arc::clone(body)),
    };
    Some(Arc::new(part))
}

/// The part of a list, sorted by rank, that is about these ranks.
fn within<'a, T>(all: &'a [T], rank: impl Fn(&T) -> Rank, own: &Range<u32>) -> &'a [T] {
    let [from, to] = [own.start, own.end].map(|limit| all.partition_point(|one| rank(one).0 < limit));
    all.get(from..to).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::entry::StartedRank;
    use mainstay_model::id::{Attempt, Pid};

    fn connected(rank: u32) -> Arc<Body> {
        let (attempt, rank) = (Attempt(0), Rank(rank));
        Arc::new(Body::Fact(Fact::RankConnected { attempt, rank, client: String::new() }))
    }

    #[test]
    fn an_entry_about_a_rank_goes_to_its_host() {
        assert!(part_for(&connected(8), 8..16).is_some());
        assert!(part_for(&connected(15), 8..16).is_some());
        assert!(part_for(&connected(16), 8..16).is_none());
    }

    #[test]
    fn a_host_gets_its_own_started_ranks_and_whole_entries_about_the_job() {
        let started = |rank| StartedRank {
            rank: Rank(rank),
            local_rank: 0,
            pid: Pid(1),
            page: None,
            start_ticks: None,
        };
        let (attempt, ranks) = (Attempt(0), (0..100).map(started).collect());
        let body =
            Arc::new(Body::Fact(Fact::AttemptStarted { attempt, master_port: 1, ranks, hosts: Vec::new() }));
        let part = part_for(&body, 8..16).expect("all hosts are told of a start");
        let Body::Fact(Fact::AttemptStarted { ranks, .. }) = part.as_ref() else { panic!("{part:?}") };
        assert_eq!(
            ranks.iter().map(|started| started.rank.0).collect::<Vec<_>>(),
            (8..16).collect::<Vec<_>>()
        );
        let waiting: Vec<Rank> = (0..100).map(Rank).collect();
        let body = Arc::new(Body::Fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting }));
        let part = part_for(&body, 96..104).expect("all hosts are told of an end");
        let Body::Fact(Fact::AttemptEnded { waiting, .. }) = part.as_ref() else { panic!("{part:?}") };
        assert_eq!(*waiting, [96, 97, 98, 99].map(Rank));
        let ended = Arc::new(Body::Fact(Fact::JobEnded { exit: 0, reason: String::new() }));
        assert!(part_for(&ended, 0..8).is_some_and(|part| Arc::ptr_eq(&part, &ended)));
    }
}

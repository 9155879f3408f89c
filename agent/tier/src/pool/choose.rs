//! Which step counts, which slot may go, and what is written next: decisions over what lies in memory, without looking at anything.

use std::ops::Range;

/// One sealed shard in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Whose.
    pub rank: u32,
    /// Its slot.
    pub index: usize,
    /// When it was saved: by attempt, then by step. What a later attempt saved is newer, whatever its number.
    pub at: At,
    /// Whether it is being written to the disk.
    pub writing: bool,
}

/// Attempt and step.
pub type At = (u64, u64);

/// The newest step of which the shard of each of these ranks is in memory or `elsewhere`.
#[must_use]
pub fn newest_whole(held: &[Held], ranks: &Range<u32>, elsewhere: &dyn Fn(At, u32) -> bool) -> Option<At> {
    let mut steps: Vec<At> = held.iter().map(|shard| shard.at).collect();
    steps.sort_unstable();
    steps.dedup();
    steps.into_iter().rev().find(|at| {
        ranks.clone().all(|rank| {
            held.iter().any(|shard| (shard.rank, shard.at) == (rank, *at)) || elsewhere(*at, rank)
        })
    })
}

/// What is to be written to the disk next: the newest whole step, as far as it does not lie there yet.
#[must_use]
pub fn to_write(held: &[Held], newest: Option<At>, on_disk: &dyn Fn(At, u32) -> bool) -> Vec<Held> {
    let wanted = |shard: &&Held| Some(shard.at) == newest && !on_disk(shard.at, shard.rank);
    held.iter().filter(wanted).copied().collect()
}

/// Which sealed slot of a rank is given free, when it has no free one: the oldest that is neither of the newest whole step nor being
/// written, nor among `kept`: the one to go back to should replicas turn out to differ, and the newest that has its copies on other
/// hosts. One that is newer than the newest whole one, and may still become whole, only for a rank that has waited long.
#[must_use]
pub fn to_free(
    held: &[Held],
    rank: u32,
    newest: Option<At>,
    kept: &[At],
    waited_long: bool,
) -> Option<usize> {
    let goes = |shard: &&Held| {
        shard.rank == rank
            && !shard.writing
            && !kept.contains(&shard.at)
            && match newest {
                Some(newest) => shard.at < newest || (shard.at > newest && waited_long),
                None => waited_long,
            }
    };
    held.iter().filter(goes).min_by_key(|shard| shard.at).map(|shard| shard.index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(rank: u32, index: usize, attempt: u64, step: u64) -> Held {
        Held { rank, index, at: (attempt, step), writing: false }
    }

    const NOWHERE: &dyn Fn(At, u32) -> bool = &|_, _| false;

    #[test]
    fn a_step_counts_when_every_rank_has_it_of_one_attempt() {
        let shards = [held(0, 0, 0, 10), held(1, 0, 0, 10), held(0, 1, 0, 20), held(1, 1, 1, 20)];
        assert_eq!(newest_whole(&shards, &(0..2), NOWHERE), Some((0, 10)));
        assert_eq!(newest_whole(&shards, &(0..3), NOWHERE), None);
        assert_eq!(newest_whole(&shards, &(0..2), &|at, rank| (at, rank) == ((0, 20), 1)), Some((0, 20)));
    }

    #[test]
    fn the_newest_whole_step_is_never_given_free() {
        let mut shards = vec![held(0, 0, 0, 10), held(1, 0, 0, 10), held(0, 1, 0, 20)];
        assert_eq!(to_free(&shards, 0, Some((0, 10)), &[], false), None);
        assert_eq!(
            to_free(&shards, 0, Some((0, 10)), &[], true),
            Some(1),
            "step 20 may be passed over, 10 may not"
        );
        shards.push(held(1, 1, 0, 20));
        assert_eq!(to_free(&shards, 0, Some((0, 20)), &[], false), Some(0));
        shards[0].writing = true;
        assert_eq!(to_free(&shards, 0, Some((0, 20)), &[], true), None, "it is on its way to the disk");
    }

    #[test]
    fn the_step_to_go_back_to_is_not_given_free_for_newer_ones() {
        let shards = [held(0, 0, 0, 10), held(0, 1, 0, 20), held(0, 2, 0, 30)];
        assert_eq!(to_free(&shards, 0, Some((0, 30)), &[(0, 10)], true), Some(1));
        assert_eq!(to_free(&shards[1..], 0, Some((0, 30)), &[(0, 20)], true), None);
    }

    #[test]
    fn what_a_later_attempt_saved_is_newer_though_its_number_is_lower() {
        let shards = [held(0, 0, 0, 30), held(0, 1, 1, 20)];
        assert_eq!(newest_whole(&shards, &(0..1), NOWHERE), Some((1, 20)));
        assert_eq!(to_free(&shards, 0, Some((1, 20)), &[], false), Some(0));
    }

    #[test]
    fn only_what_is_not_on_the_disk_is_written() {
        let shards = [held(0, 0, 0, 10), held(1, 0, 0, 10), held(0, 1, 0, 20)];
        let written = to_write(&shards, Some((0, 10)), &|_, rank| rank == 0);
        assert_eq!(written, [held(1, 0, 0, 10)]);
        assert!(to_write(&shards, None, NOWHERE).is_empty());
    }
}
